"""Kernels are compiled for chips that are not here, and faults in them are caught."""

from dataclasses import replace

import kernel_limits
import pytest

from roofline.backends.gpu.ahead import check as static
from roofline.backends.gpu.ahead import gates
from roofline.hardware.chips import chips

pytestmark = pytest.mark.slow  # each compiles; what the default run compiles is in test_kernel_limits.py


@pytest.fixture(scope="session")
def planted_cache(kernel_cache):
    """A folder of its own: tests in other processes compile into the shared one at the same time."""
    folder = kernel_cache / "planted"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def planted(planted_cache):
    """(chip, case) -> what came of a kernel with a fault (gpu_planted.py)."""
    wanted = [chips.get(name) for name in ("gfx1201", "sm_90")]
    found = list(static.prove(wanted, modules=["gpu_planted"], folder=planted_cache))
    return {(proof.chip, proof.case): proof for proof in found}


def test_a_planted_spill_is_caught(planted):
    for chip in ("gfx1201", "sm_90"):
        (violation,) = planted[chip, "spilling"].violations
        assert (violation.gate, violation.chip, violation.case) == ("spills", chip, "spilling")
        assert "tiles.toml" in str(violation)


def test_planted_local_memory_is_caught(planted):
    for chip, held in (("gfx1201", "65,536"), ("sm_90", "232,448")):
        (violation,) = planted[chip, "local"].violations
        assert (violation.gate, violation.allowed) == ("local memory", held)


def test_a_missing_matrix_instruction_is_caught(planted):
    """A product written as a sum, and one of a dtype that the chip has no instruction for, which is let pass."""
    for chip in ("gfx1201", "sm_90"):
        (violation,) = planted[chip, "plain"].violations
        assert violation.gate == "dots"
        assert planted[chip, "f32"].facts.plain_dots == {"f32": 1}
        assert not planted[chip, "f32"].violations
        assert not planted[chip, "good"].violations
        assert planted[chip, "good"].facts.matrix


def test_a_compiler_that_dies_takes_nothing_else_along(kernel_cache):
    found = static.prove([chips.get("sm_90")], modules=["gpu_planted_death"], folder=kernel_cache, jobs=2)
    by_case = {proof.case: proof for proof in found}
    assert set(by_case) == {"before", "deadly", "after"}
    (violation,) = by_case["deadly"].violations
    assert violation.gate == "compiles"
    assert "ended its process" in violation.figure
    assert not by_case["before"].violations + by_case["after"].violations


def test_what_lies_in_the_cache_is_not_compiled_again(planted, planted_cache):
    def binaries():
        return {
            path: path.stat().st_mtime_ns for path in planted_cache.glob("*/*") if path.suffix in (".hsaco", ".cubin")
        }

    before = binaries()
    wanted = [chips.get("gfx1201"), chips.get("sm_90")]
    again = static.prove(wanted, modules=["gpu_planted"], folder=planted_cache)
    assert {(proof.chip, proof.case): proof.facts for proof in again} == {k: p.facts for k, p in planted.items()}
    assert binaries() == before


def test_limits_notice_a_lost_step_of_occupancy_and_a_lost_instruction(planted):
    """One register more passes, one that costs a wave does not."""
    chip = chips.get("gfx1201")
    proof = planted["gfx1201", "good"]
    key = (proof.kernel, proof.case)
    limits = kernel_limits.limits_of([proof], chip)
    assert limits[key].matrix
    assert kernel_limits.broken(limits, [proof], chip) == []

    def changed(**facts):
        facts = replace(proof.facts, **facts)
        return replace(proof, facts=facts, occupancy=gates.reached(facts, chip))

    granted = -(-proof.facts.registers // chip.register_step) * chip.register_step
    assert kernel_limits.broken(limits, [changed(registers=granted)], chip) == []
    registers = next(n for n in range(granted, 1000) if changed(registers=n).occupancy.waves < limits[key].waves)
    for facts, words in (({"registers": registers}, "waves"), ({"matrix": {}}, "v_wmma")):
        (sentence,) = kernel_limits.broken(limits, [changed(**facts)], chip)
        assert words in sentence
    assert len(kernel_limits.broken({("product", "old"): limits[key]}, [proof], chip)) == 2


def test_a_small_matrix_instruction_in_the_place_of_a_large_one_breaks_a_limit(planted):
    chip, proof = chips.get("sm_90"), planted["sm_90", "good"]
    limits = kernel_limits.limits_of([proof], chip)
    assert limits[proof.kernel, proof.case].matrix
    small = replace(
        proof, facts=replace(proof.facts, matrix={"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 8})
    )
    (sentence,) = kernel_limits.broken(limits, [small], chip)
    assert "wgmma" in sentence
