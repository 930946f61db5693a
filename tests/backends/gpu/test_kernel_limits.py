"""Every kernel, with the tile chosen for each chip, compiles, passes its gates and keeps its limits.

Of three chips every case, of the others the heaviest case of each kernel and tile: what differs between chips of a
family is their tiles and their compilers. `write_kernel_limits.py` compiles every case for all of them.
"""

import kernel_limits
import pytest

from roofline.backends.gpu.ahead import check, kernel_list
from roofline.hardware.chips import chips

DEFAULT, COMPLETE = ("gfx942",), ("gfx942", "gfx1201", "sm_90")  # all but the first take their time: -m slow
CHIPS = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in chips.chips()]
LIMITS = kernel_limits.read()


def heaviest(chip):
    """The (kernel, case) of a chip that every run compiles."""
    return {key for key, limit in LIMITS[chip].items() if limit.heaviest}


@pytest.fixture(scope="session")
def proofs(request, kernel_cache):
    """Chip -> what came of its compilations, of the chips that tests of this run ask for; all compiled at once."""
    items = (item for item in request.session.items if "proofs" in getattr(item, "fixturenames", ()))
    names = dict.fromkeys(item.callspec.params["chip"] for item in items)
    by_chip = {name: [] for name in names}
    complete = [name for name in names if name in COMPLETE]
    partial = [name for name in names if name not in COMPLETE]
    only = {(name, *key) for name in partial for key in heaviest(name)}
    for group, cases in ((complete, None), (partial, only)):
        for proof in check.prove([chips.get(name) for name in group], only=cases, folder=kernel_cache):
            by_chip[proof.chip].append(proof)
    return by_chip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_passes_its_gates_and_keeps_its_limits(chip, proofs):
    violations = [str(violation) for proof in proofs[chip] for violation in proof.violations]
    assert not violations, "\n".join(violations)
    cases = LIMITS[chip] if chip in COMPLETE else {key: LIMITS[chip][key] for key in heaviest(chip)}
    broken = kernel_limits.broken(cases, proofs[chip], chips.get(chip))
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
