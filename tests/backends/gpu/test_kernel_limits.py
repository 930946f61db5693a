"""Every kernel, with the tile chosen for each chip, compiles, passes its gates and keeps its limits.

The slow run compiles, for a chip of each vendor, one case of each kernel that multiplies matrices, that with least
room, and the heaviest case of each kernel and tile. The soak run does the latter for the other chips, and compiles
every case for two; `write_kernel_limits.py` compiles every case for all of them.
"""

import kernel_limits
import pytest

from roofline.backends.gpu.ahead import check, kernel_list
from roofline.hardware.chips import chips

DEFAULT = ("gfx942", "sm_90")
COMPLETE = ("gfx942", "sm_90")
HEAVIEST = ("gfx942", "sm_100")
# (chip, whether every case is compiled)
RUNS = [
    *((name, False) for name in HEAVIEST),
    *(pytest.param(name, False, marks=pytest.mark.soak) for name in chips.chips() if name not in HEAVIEST),
    *(pytest.param(name, True, marks=pytest.mark.soak) for name in COMPLETE),
]
LIMITS = kernel_limits.read()


def heaviest(chip):
    """The (kernel, case) of a chip that every run compiles."""
    return {key for key, limit in LIMITS[chip].items() if limit.heaviest}


def tightest(chip):
    """Of each kernel with the chip's matrix instruction the heaviest case that leaves fewest waves resident."""
    cases = {}
    for (kernel, case), limit in LIMITS[chip].items():
        if limit.heaviest and limit.matrix:
            cases[kernel] = min(cases.get(kernel, (limit.waves, case)), (limit.waves, case))
    return {(kernel, case) for kernel, (_, case) in cases.items()}


@pytest.mark.slow
def test_the_tightest_kernels_pass_their_gates_and_keep_their_limits(kernel_cache):
    only = {(chip, *key) for chip in DEFAULT for key in tightest(chip)}
    assert {(chip, kernel) for chip, kernel, _ in only} >= {(c, k) for c in DEFAULT for k in ("attend", "linear_quant")}
    proofs = list(check.prove([chips.get(name) for name in DEFAULT], only=only, folder=kernel_cache))
    assert not [str(violation) for proof in proofs for violation in proof.violations]
    for chip in DEFAULT:
        limits = {key: LIMITS[chip][key] for key in tightest(chip)}
        of_chip = [proof for proof in proofs if proof.chip == chip]
        assert not kernel_limits.broken(limits, of_chip, chips.get(chip)), kernel_limits.WRITE


@pytest.fixture(scope="session")
def proofs(request, kernel_cache):
    """(chip, complete) -> what came of its compilations, of the pairs that tests of this run ask for."""
    items = [item for item in request.session.items if "proofs" in getattr(item, "fixturenames", ())]
    runs = dict.fromkeys((item.callspec.params["chip"], item.callspec.params["complete"]) for item in items)
    by_run = {run: [] for run in runs}
    for complete in (True, False):
        names = [name for name, each in runs if each == complete]
        only = None if complete else {(name, *key) for name in names for key in heaviest(name)}
        for proof in check.prove([chips.get(name) for name in names], only=only, folder=kernel_cache):
            by_run[proof.chip, complete].append(proof)
    return by_run


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "complete"), RUNS)
def test_every_kernel_passes_its_gates_and_keeps_its_limits(chip, complete, proofs):
    violations = [str(violation) for proof in proofs[chip, complete] for violation in proof.violations]
    assert not violations, "\n".join(violations)
    cases = LIMITS[chip] if complete else {key: LIMITS[chip][key] for key in heaviest(chip)}
    broken = kernel_limits.broken(cases, proofs[chip, complete], chips.get(chip))
    assert not broken, "\n".join([*broken, kernel_limits.WRITE])


@pytest.mark.parametrize("chip", chips.chips())
def test_every_case_has_limits_and_every_tile_a_heaviest_case(chip):
    compilations = [compilation for _, _, compilation in kernel_list.compilations(chips.get(chip))]
    tiles = {(each.kernel, each.case): check.tile_text(each) for each in compilations}
    assert tiles.keys() == LIMITS[chip].keys(), kernel_limits.WRITE
    covered = {(kernel, tiles[kernel, case]) for kernel, case in heaviest(chip)}
    assert covered == {(kernel, tile) for (kernel, _), tile in tiles.items()}, kernel_limits.WRITE


def test_the_table_is_what_its_writer_makes_of_it(tmp_path):
    kernel_limits.write(LIMITS, tmp_path / "table.txt")
    assert (tmp_path / "table.txt").read_text("utf-8") == kernel_limits.TABLE.read_text("utf-8")
