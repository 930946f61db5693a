"""Kernels are compiled for chips that are not here, and faults in them are caught."""

from pathlib import Path

import gpu_golden as golden
import pytest

from roofline.backends.gpu.ahead import check as static
from roofline.hardware.chips import chips


@pytest.fixture(scope="session")
def kernel_cache(request):
    """Binaries that later runs find again, as long as neither their source nor the compiler changes."""
    return Path(request.config.cache.mkdir("kernels"))


@pytest.fixture(scope="session")
def planted(kernel_cache):
    """(chip, case) -> what came of a kernel with a fault (gpu_planted.py)."""
    wanted = [chips.get(name) for name in ("gfx1201", "sm_90")]
    found = list(static.prove(wanted, modules=["gpu_planted"], folder=kernel_cache))
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
    assert "ended its process" in violation.found
    assert not by_case["before"].violations + by_case["after"].violations


def test_what_lies_in_the_cache_is_not_compiled_again(planted, kernel_cache):
    def binaries():
        return {
            path: path.stat().st_mtime_ns for path in kernel_cache.glob("*/*") if path.suffix in (".hsaco", ".cubin")
        }

    before = binaries()
    wanted = [chips.get("gfx1201"), chips.get("sm_90")]
    again = static.prove(wanted, modules=["gpu_planted"], folder=kernel_cache)
    assert {(proof.chip, proof.case): proof.facts for proof in again} == {k: p.facts for k, p in planted.items()}
    assert binaries() == before


def test_the_golden_notices(planted):
    proofs = [planted["gfx1201", "good"], planted["gfx1201", "f32"]]
    figures = {"good": golden.figures(proofs[0]), "f32": golden.figures(proofs[1])}
    same = {"triton": proofs[0].triton, "kernels": {"product": figures}}
    assert not golden.differences(same, proofs)
    drifted = same | {"kernels": {"product": figures | {"good": figures["good"] | {"registers": 86}}}}
    assert not golden.differences(drifted, proofs)
    for name, value in (("registers", 70), ("spills", 1), ("local_bytes", 0), ("matrix", {}), ("tile", "8w 2s")):
        other = same | {"kernels": {"product": figures | {"good": figures["good"] | {name: value}}}}
        (difference,) = golden.differences(other, proofs)
        assert name in difference
        assert not golden.differences(other | {"triton": "1.0.0"}, proofs)
    assert len(golden.differences(same | {"kernels": {"product": {"old": {}}}}, proofs)) == 3
