"""Roofs of a busy machine: samples that other programs interrupted, and what is said and done about them."""

import dataclasses
import itertools

import pytest

from roofline.backends.cpu import roofs as cpu
from roofline.backends.cpu.select import choose_threads
from roofline.common.errors import ConfigError
from roofline.hardware import busy
from roofline.hardware import roofs as store
from roofline.hardware.roofs import Roofs, best_of, load_note

native = pytest.importorskip("roofline._native")
TRUE = {"int8": 4e12, "bf16": 1e12, "f32": 5e11}  # of two threads; one reaches half


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))


def test_two_samples_that_agree_are_enough() -> None:
    samples = iter([100.0, 98.0, 1e9])
    assert best_of(lambda: next(samples)) == 100.0


def test_interrupted_samples_are_taken_again() -> None:
    samples = iter([2.0, 60.0, 10.0, 100.0, 99.0])
    assert best_of(lambda: next(samples)) == 100.0
    endless = itertools.count(1.0)
    assert best_of(lambda: 2.0 ** next(endless)) == 2.0**store.MOST_SAMPLES


def test_no_roof_is_below_one_that_is_known() -> None:
    """Samples that agree because all of them were interrupted are not believed where one thread alone did more."""
    samples = iter([10.0, 10.0, 10.0, 90.0, 90.0])
    assert best_of(lambda: next(samples), least=50.0) == 90.0
    assert best_of(lambda: 10.0, least=50.0) == 50.0


@pytest.fixture
def machine(monkeypatch):
    """machine(busy samples...) -> sets what the loops give: these shares of the truth, in turn; and the load."""

    def make(shares=(1.0,), load=0.0):
        turn = itertools.cycle(shares)

        def rate(kind, isa, threads, seconds):
            return TRUE[kind] / 2 if threads == 1 else TRUE[kind] * next(turn)

        monkeypatch.setattr(native, "roof_ops", rate)
        monkeypatch.setattr(native, "roof_read", lambda size, threads, seconds: 1e11 * next(turn))
        monkeypatch.setattr(busy.OtherLoad, "cores", lambda self: load)
        monkeypatch.setattr(cpu, "load_of_others", lambda seconds: load)
        monkeypatch.setattr(cpu, "_room", lambda: 1 << 31)

    return make


def test_roofs_of_a_busy_machine_are_the_best_of_their_samples(machine) -> None:
    machine(shares=(0.01, 0.4, 0.03, 1.0, 0.97), load=4.2)
    roofs = cpu.measure_roofs(threads=2, isa="portable")
    assert dict(roofs.computes) == pytest.approx(TRUE, rel=0.05)
    assert all(rate == pytest.approx(1e11, rel=0.05) for _, rate in roofs.reads)
    assert roofs.load == 4.2


def test_roofs_that_were_measured_beside_others_are_measured_again_when_it_is_quiet(machine) -> None:
    machine(shares=(0.3,), load=4.0)
    low = cpu.ensure_roofs(threads=2, isa="portable")
    assert cpu.ensure_roofs(threads=2, isa="portable") == low, "it still is busy"
    assert "4.0 cores" in load_note(low.load)
    machine()
    right = cpu.ensure_roofs(threads=2, isa="portable")
    assert (right.load, load_note(right.load)) == (0.0, "")
    assert all(rate == pytest.approx(1e11) for _, rate in right.reads), "of every size, the largest too"
    machine(shares=(0.5,), load=4.0)
    assert cpu.ensure_roofs(threads=2, isa="portable") == right


def test_a_recheck_measures_large_sets_too_where_they_may_be_too_low(machine) -> None:
    machine(shares=(0.3,), load=4.0)
    cpu.ensure_roofs(threads=2, isa="portable")
    machine(load=2.0)  # fewer, but still some, so that they are not measured anew before
    raised, checks = cpu.recheck_roofs(threads=2, isa="portable")
    assert all(rate == pytest.approx(1e11) for _, rate in raised.reads)
    assert "reads of 1.6 GiB" in [check.name for check in checks]


def test_the_load_is_stored_and_the_least_counts() -> None:
    roofs = Roofs(1.0, 1.0, 1.0, ((1, 1.0),), threads=2, isa="portable", load=3.5)
    store.store(roofs, "abc")
    assert store.load("abc", 2, "portable") == roofs
    quiet = dataclasses.replace(roofs, load=0.1)
    assert store.highest(roofs, quiet).load == store.highest(quiet, roofs).load == 0.1


def test_each_thread_has_something_to_read(machine, monkeypatch) -> None:
    """Of a machine with more than 512 threads, whose smallest sets would give a thread less than it reads at least."""
    machine()
    monkeypatch.setattr("os.cpu_count", lambda: 1024)
    roofs = cpu.measure_roofs(threads=1000, isa="portable")
    assert roofs.reads[0][0] == 4 << 20


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_threads_that_would_only_wait_are_refused(monkeypatch, cores) -> None:
    with pytest.raises(ConfigError, match=r"^threads=999: this machine has 2 cores.*at most 64"):
        choose_threads(999)
    monkeypatch.setenv("ROOFLINE_THREADS", "65")
    with pytest.raises(ConfigError, match="ROOFLINE_THREADS=65"):
        choose_threads()
    assert choose_threads(64).value == 64
