"""Every kernel, with the tile chosen for each chip, compiles, passes its gates and is what its golden says."""

import gpu_golden as golden
import pytest

from roofline.backends.gpu import static
from roofline.hardware import chips

DEFAULT = ("gfx942",)  # the others take their time: -m slow
CHIPS = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in chips.chips()]


@pytest.fixture(scope="session")
def proofs(request, tmp_path_factory):
    """Chip -> what came of all compilations, of the chips that tests of this run ask for; all compiled at once."""
    items = (item for item in request.session.items if "proofs" in getattr(item, "fixturenames", ()))
    wanted = dict.fromkeys(item.callspec.params["chip"] for item in items)
    found = {name: [] for name in wanted}
    for proof in static.prove([chips.get(name) for name in wanted], folder=tmp_path_factory.mktemp("kernels")):
        found[proof.chip].append(proof)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_passes_its_gates_and_is_as_its_golden(chip, proofs):
    violations = [str(violation) for proof in proofs[chip] for violation in proof.violations]
    assert not violations, "\n".join(violations)
    found = golden.differences(golden.read(chip), proofs[chip])
    assert not found, "\n".join([*found, golden.WRITE])
