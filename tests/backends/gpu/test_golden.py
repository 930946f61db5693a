"""Every kernel, with the tile chosen for each chip, compiles, passes its gates and is what its golden says.

Of three chips every case, of the others the heaviest case of each kernel and tile: what differs between chips of a
family is their tiles and their compilers. `write_golden.py` compiles every case for all of them.
"""

import gpu_golden as golden
import pytest

from roofline.backends.gpu.ahead import check as static
from roofline.backends.gpu.ahead import kernel_list as catalogue
from roofline.hardware.chips import chips

DEFAULT, WHOLE = ("gfx942",), ("gfx942", "gfx1201", "sm_90")  # all but the first take their time: -m slow
CHIPS = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in chips.chips()]


@pytest.fixture(scope="session")
def proofs(request, tmp_path_factory):
    """Chip -> what came of its compilations, of the chips that tests of this run ask for; all compiled at once."""
    items = (item for item in request.session.items if "proofs" in getattr(item, "fixturenames", ()))
    wanted = dict.fromkeys(item.callspec.params["chip"] for item in items)
    found = {name: [] for name in wanted}
    folder = tmp_path_factory.mktemp("kernels")
    whole = [name for name in wanted if name in WHOLE]
    few = [name for name in wanted if name not in WHOLE]
    only = {(name, *case) for name in few for case in golden.heaviest(name)}
    for names, cases in ((whole, None), (few, only)):
        for proof in static.prove([chips.get(name) for name in names], only=cases, folder=folder):
            found[proof.chip].append(proof)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_passes_its_gates_and_is_as_its_golden(chip, proofs):
    violations = [str(violation) for proof in proofs[chip] for violation in proof.violations]
    assert not violations, "\n".join(violations)
    cases = None if chip in WHOLE else golden.heaviest(chip)
    found = golden.differences(golden.read(chip), proofs[chip], cases)
    assert not found, "\n".join([*found, golden.WRITE])


@pytest.mark.parametrize("chip", chips.chips())
def test_goldens_hold_every_case_with_the_tile_that_is_chosen_now(chip):
    """So the heaviest cases are those of every kernel and tile there is."""
    there = [compilation for _, _, compilation in catalogue.compilations(chips.get(chip))]
    wanted = {(each.kernel, each.case): static.tile_text(each) for each in there}
    held = golden.read(chip)["kernels"]
    assert wanted == {(kernel, case): facts["tile"] for kernel, cases in held.items() for case, facts in cases.items()}
    heaviest = golden.heaviest(chip)
    assert {(kernel, wanted[kernel, case]) for kernel, case in heaviest} == {
        (kernel, tile) for (kernel, _), tile in wanted.items()
    }
