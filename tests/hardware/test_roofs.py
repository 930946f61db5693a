"""The type and store of measured roofs, and the measurements against torch and numpy."""

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.hardware import roofs as store
from roofline.hardware.roofs import Roofs

ROOFS = Roofs(2e12, 9e11, 5e11, ((1 << 20, 4e11), (1 << 24, 1e11), (1 << 28, 5e10)), 2, "avx512", "chip", "now")

BETTER = Roofs(3e12, 9e11, 11e11, ROOFS.reads, 2, "avx512", "chip", "later")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))


def test_reads_are_interpolated_in_the_logarithm():
    assert ROOFS.read_bytes_per_s(1) == 4e11
    assert ROOFS.read_bytes_per_s(1 << 20) == 4e11
    assert ROOFS.read_bytes_per_s(1 << 22) == pytest.approx(2.5e11)
    assert ROOFS.read_bytes_per_s(1 << 24) == 1e11
    assert ROOFS.read_bytes_per_s(1 << 40) == 5e10
    sizes = [2.0**e for e in np.linspace(18, 30, 100)]
    rates = [ROOFS.read_bytes_per_s(size) for size in sizes]
    assert all(a >= b for a, b in itertools.pairwise(rates))


@pytest.mark.parametrize(
    "reads", [(), ((1, 0.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, float("nan")),)]
)
def test_nonsense_is_refused(reads):
    with pytest.raises(ConfigError):
        Roofs(1.0, 1.0, 1.0, reads)


def test_store_and_load():
    assert store.load("abc", 2, "avx512") is None
    path = store.store(ROOFS, "abc")
    assert store.load("abc", 2, "avx512") == ROOFS
    assert store.load("abc", 1, "avx512") is None
    assert store.load("abc", 2, "avx2") is None
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0}', '{"version": 1, "reads": []}', '{"version": 1}'])
def test_a_damaged_store_means_measuring_again(text):
    path = store.store(ROOFS, "abc")
    path.write_text(text)
    assert store.load("abc", 2, "avx512") is None


def test_roofs_that_cannot_be_written_stay_in_the_process(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "file"))
    assert store.load("abc", 2, "avx512") is None
    store.store(ROOFS, "abc")
    assert store.load("abc", 2, "avx512") == ROOFS
    assert store.load("abc", 1, "avx512") is None


@pytest.mark.parametrize(
    ("measured", "times", "correction"),
    [(0, 0, 1.0), (1.9, 1, 1.0), (1.0, 3, 2.0), (1.6, 3, 1.25), (0.1, 3, 2.0)],
    ids=["high enough", "measured again", "raised", "measured again and raised", "never lowered"],
)
def test_roofs_are_confirmed_by_what_was_reached(measured, times, correction):
    """Work took as long as a step would at twice ROOFS, unless they are high enough."""
    calls, reached = [], 2 * ROOFS.f32_flops if times else ROOFS.f32_flops

    def measure():
        calls.append(1)
        return dataclasses.replace(ROOFS, f32_flops=measured * ROOFS.f32_flops) if measured != 1.9 else BETTER

    roofs = store.reachable(ROOFS, lambda roofs: reached / roofs.f32_flops, measure)
    assert len(calls) == times
    assert reached / roofs.f32_flops <= 1 + 1e-12
    assert roofs.correction == pytest.approx(correction)
    assert bool(store.correction_note(roofs)) == (correction > 1)
    if correction > 1:
        assert roofs.reads == tuple((size, pytest.approx(rate * correction)) for size, rate in ROOFS.reads)


native = pytest.importorskip("roofline._native", reason="the native module is not built")


def test_bad_arguments_are_refused():
    for arguments in (
        ("int4", "portable", 1, 0.1),
        ("f32", "sse9", 1, 0.1),
        ("f32", "portable", 0, 0.1),
        ("f32", "portable", 1, 0.0),
    ):
        with pytest.raises(ValueError):
            native.roof_ops(*arguments)
    for arguments in ((0, 1, 0.1), (4096, 3, 0.1), (1 << 43, 1, 0.1)):
        with pytest.raises(ValueError):
            native.roof_read(*arguments)


def test_measure_and_ensure(monkeypatch):
    from roofline.backends.cpu.roofs import ensure_roofs, highest, measure_roofs, stored_roofs
    from roofline.hardware import busy

    # Roofs that were measured beside other programs are measured again: whether there are some is not for this test.
    monkeypatch.setattr(busy.OtherLoad, "cores", lambda self: 0.0)
    assert stored_roofs(threads=1, isa="portable") is None
    first = ensure_roofs(quick=True, threads=1, isa="portable")
    assert stored_roofs(threads=1, isa="portable") == first
    assert ensure_roofs(threads=1, isa="portable") == first
    assert (first.threads, first.isa) == (1, "portable")
    again = measure_roofs(quick=True, threads=1, isa="portable")
    both = highest(first, again)
    assert both.f32_flops == max(first.f32_flops, again.f32_flops)
    assert all(rate >= dict(first.reads)[size] for size, rate in both.reads)


def best_of(seconds_of, repeats=8):
    return min(seconds_of() for _ in range(repeats))


def highest_roof(measure, target, repeats=20):
    """A roof is the highest of several measurements, as `highest` keeps it: any of them may meet a busy machine."""
    highest = 0.0
    for _ in range(repeats):
        highest = max(highest, measure())
        if highest >= target:
            break
    return highest


def timed(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@pytest.mark.parametrize(("kind", "field"), [("bf16", "bf16_flops"), ("float32", "f32_flops"), ("int8", "int8_ops")])
def test_roofs_are_not_below_torch(kind, field):
    """One thread, the best instruction set here: no GEMM of torch's may beat the register-only loop."""
    torch = pytest.importorskip("torch", reason="the comparison needs torch")
    from roofline.backends.cpu.select import choose_isa

    flags, isa = Path("/proc/cpuinfo").read_text(), str(choose_isa().value)
    if "amx_tile" in flags or ("avx512f" in flags and isa != "avx512"):
        pytest.skip(f"torch uses instructions of this chip that are beyond our {isa}")
    before, n = torch.get_num_threads(), 1024
    torch.set_num_threads(1)
    try:
        if kind == "int8":
            a = torch.ones(n, n, dtype=torch.int8)
            call = lambda: torch._int_mm(a, a)  # noqa: E731
        else:
            a = torch.ones(n, n, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
            call = lambda: a @ a  # noqa: E731
        gemm = 2 * n**3 / best_of(lambda: timed(call))
    finally:
        torch.set_num_threads(before)
    roof = highest_roof(lambda: native.roof_ops(kind.replace("float32", "f32"), isa, 1, 0.3), 0.98 * gemm)
    assert roof >= 0.98 * gemm, f"{field}: roof {roof:.3g}, torch {gemm:.3g}"


@pytest.mark.parametrize("size", [16 << 20, pytest.param(128 << 20, marks=pytest.mark.slow)])
def test_reads_are_not_below_numpy(size):
    """One thread: summing, and the read half of a copy, are never faster than the read roof."""
    data = np.ones(size // 8, dtype=np.int64)
    target = np.empty_like(data)
    summed = size / best_of(lambda: timed(data.sum))
    copied = size / best_of(lambda: timed(lambda: np.copyto(target, data)))
    fastest = max(summed, copied)
    roof = highest_roof(lambda: native.roof_read(size, 1, 0.5), 0.98 * fastest)
    assert roof >= 0.98 * fastest, f"roof {roof:.3g}, sum {summed:.3g}, copy {copied:.3g}"


def test_measuring_again_measures_every_size_that_is_stored(monkeypatch):
    """A large working set that was measured on a busy machine stays in the file until it is measured again."""
    from roofline.backends.cpu import roofs

    sizes = []

    def measure(kind, isa, threads, seconds):
        return 1e12

    monkeypatch.setattr(native, "roof_ops", measure)
    monkeypatch.setattr(native, "roof_read", lambda size, threads, seconds: sizes.append(size) or 1e11)
    first = roofs.ensure_roofs(threads=1)
    assert [size for size, _ in first.reads] == list(dict.fromkeys(sizes))
    sizes.clear()
    roofs.ensure_roofs(threads=1, quick=True, again=True)
    assert {size for size, _ in first.reads} <= set(sizes)


def rechecked(monkeypatch, kept, *fresh):
    """What `recheck_roofs` makes of kept roofs and of measurements, one after the other, the last one again and again;
    how many there were; and what is stored then."""
    from roofline.backends.cpu import roofs as cpu

    measured = []

    def measure(**_):
        measured.append(fresh[min(len(measured), len(fresh) - 1)])
        return measured[-1]

    monkeypatch.setattr(cpu, "READ_SIZES", tuple(size for size, _ in kept.reads))
    monkeypatch.setattr(cpu, "measure_roofs", measure)
    fingerprint = cpu.detect.detect().fingerprint
    store.store(kept, fingerprint)
    monkeypatch.setattr(cpu, "stored_roofs", lambda **_: store.load(fingerprint, 2, "avx512"))
    roofs, checks = cpu.recheck_roofs()
    return roofs, checks, len(measured), store.load(fingerprint, 2, "avx512")


def times(roofs, factor):
    return dataclasses.replace(
        roofs, int8_ops=roofs.int8_ops * factor, reads=tuple((size, rate * factor) for size, rate in roofs.reads)
    )


def test_kept_roofs_that_agree_are_measured_once(monkeypatch):
    roofs, checks, count, stored = rechecked(monkeypatch, ROOFS, times(ROOFS, 0.97))
    assert (count, roofs.reads, stored) == (1, ROOFS.reads, ROOFS)
    reads = [f"reads of {size}.0 MiB" for size in (1, 16, 256)]
    assert [check.name for check in checks] == ["int8", "bf16", "f32", *reads]
    assert all(check.agrees for check in checks)


def test_lower_roofs_are_measured_again_and_told(monkeypatch):
    roofs, checks, count, _ = rechecked(monkeypatch, ROOFS, times(ROOFS, 0.8))
    assert count == store.TRIES
    assert roofs.reads == ROOFS.reads, "a busy machine hides a roof; it does not lower it"
    assert [check.agrees for check in checks] == [False, True, True, False, False, False]
    _, checks, count, _ = rechecked(monkeypatch, ROOFS, times(ROOFS, 0.8), ROOFS)
    assert (count, all(check.agrees for check in checks)) == (2, True), "the best of the measurements counts"


def test_higher_roofs_count_from_now_on(monkeypatch):
    roofs, checks, count, stored = rechecked(monkeypatch, ROOFS, times(ROOFS, 1.2))
    assert count == 1
    assert roofs.int8_ops == stored.int8_ops == pytest.approx(2.4e12)
    assert [check.now > check.kept for check in checks] == [True, False, False, True, True, True]


def test_a_quick_measurement_that_is_kept_is_completed(monkeypatch):
    from roofline.backends.cpu import roofs as cpu

    asked = []
    monkeypatch.setattr(cpu, "ensure_roofs", lambda again=False, **_: asked.append(again) or ROOFS)
    monkeypatch.setattr(cpu, "measure_roofs", lambda **_: ROOFS)
    monkeypatch.setattr(cpu, "READ_SIZES", (1 << 20, 1 << 30))
    monkeypatch.setattr(cpu, "_room", lambda: 1 << 31)
    cpu.recheck_roofs()
    assert asked == [False, True]
    asked.clear()
    monkeypatch.setattr(cpu, "_room", lambda: 1 << 29)
    cpu.recheck_roofs()
    assert asked == [False], "what has no room is not measured"


def test_bench_roofs_prints_both_denominators(monkeypatch):
    import json

    from roofline.backends.cpu import roofs as cpu
    from roofline.hardware.roofs import compare
    from tests.command_line import call_roofline

    roofs = dataclasses.replace(ROOFS, chip="AMD Instinct MI300X")
    monkeypatch.setattr(cpu, "recheck_roofs", lambda **_: (roofs, compare(roofs, times(roofs, 0.8))))
    told = call_roofline(["bench", "roofs"], env={"COLUMNS": "200"}).stdout
    rows = [" ".join(line.split()) for line in told.splitlines()]
    assert "reads of 256.0 MiB 50.0 GB/s 40.0 GB/s (!) 5.3 TB/s" in rows
    assert "bf16 900.0 Gop/s 900.0 Gop/s 1307.4 Top/s" in rows
    assert "more than 5 % below what this device has reached" in told
    assert "data sheet of MI300X" in told
    (record,) = json.loads(call_roofline(["bench", "roofs", "--json"]).stdout)["devices"]
    assert record["checks"][0] == {"name": "int8", "unit": "op", "kept": 2e12, "now": 1.6e12, "agrees": False}
    assert record["data_sheet"] == {"product": "MI300X", "bf16_flops": 1307.4e12, "bytes_per_s": 5.3e12}
    monkeypatch.setattr(cpu, "recheck_roofs", lambda **_: (ROOFS, compare(ROOFS, ROOFS)))
    told = call_roofline(["bench", "roofs"], env={"COLUMNS": "200"}).stdout
    assert "No data sheet: chip is not in the table of products, and no other chip's figures are used." in told
    assert "(!)" not in told


def test_bench_roofs_of_gpus(monkeypatch):
    """Each die of a package has half of its data sheet."""
    import json
    from types import SimpleNamespace

    pytest.importorskip("torch", reason="torch is not installed")
    from roofline.backends.gpu import devices
    from roofline.backends.gpu.measure import roofs as gpu
    from roofline.hardware.roofs import compare
    from tests.command_line import call_roofline

    roofs = Roofs(None, 1.5e14, 4e13, ((1 << 26, 2e12), (1 << 30, 1.4e12)), 0, "", "AMD Instinct MI250", "now")
    die = SimpleNamespace(torch=1, name="AMD Instinct MI250", units=104, title="amd:1 AMD Instinct MI250")
    measured = []
    monkeypatch.setattr(devices, "choose", lambda names: [die] if names is None else [])
    monkeypatch.setattr(
        gpu, "recheck_op_roofs", lambda *names: measured.append(names) or (roofs, compare(roofs, roofs))
    )
    told = call_roofline(["bench", "roofs", "--device", "gpu"], env={"COLUMNS": "200"}).stdout
    rows = [" ".join(line.split()) for line in told.splitlines()]
    assert "reads of 1.0 GiB 1.4 TB/s 1.4 TB/s 1.6 TB/s" in rows
    assert "bf16 150.0 Top/s 150.0 Top/s 181.1 Top/s" in rows
    assert measured == [("cuda:1", "AMD Instinct MI250")]
    (record,) = json.loads(call_roofline(["bench", "roofs", "--device", "gpu", "--json"]).stdout)["devices"]
    assert record["data_sheet"]["bf16_flops"] == pytest.approx(181.05e12)
    assert "torch can use none here" in call_roofline(["bench", "roofs", "--device", "amd:7"]).stderr
    monkeypatch.setattr(gpu, "recheck_op_roofs", lambda *_: None)
    assert "its memory is full" in call_roofline(["bench", "roofs", "--device", "gpu"]).stderr
