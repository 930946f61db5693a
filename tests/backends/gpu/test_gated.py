"""Activations, plain and gated, against the ops' references in float64."""

import pytest

from roofline import ops
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")

REFERENCE = {
    "silu": (ops.silu_mul, ops.silu),
    "gelu_tanh": (ops.gelu_mul, ops.gelu),
    "gelu_erf": (lambda gate, up: ops.gelu_mul(gate, up, tanh=False), lambda x: ops.gelu(x, tanh=False)),
    "sigmoid": (ops.sigmoid_mul, None),
    "plain": (ops.mul, None),
    "relu": (None, ops.relu),
    "relu_squared": (None, lambda x: ops.relu(x, squared=True)),
}
# rows, ffn, dtype in, dtype out
SHAPES = [
    (1, 7, "float32", "float32"),
    (3, 1025, "bfloat16", "bfloat16"),
    (2, 1536, "float16", "float32"),
    (5, 33, "float32", "bfloat16"),
]
STEPS = {"float32": 2**-21, "bfloat16": 2**-8, "float16": 2**-11}


def near(got, want, dtype):
    return ((got.double() - want).abs() <= want.abs() * STEPS[dtype] + 1e-6).all()


@pytest.mark.parametrize("kind", REFERENCE)
@pytest.mark.parametrize(("rows", "ffn", "source", "target"), SHAPES)
def test_gated_and_plain(kind, rows, ffn, source, target):
    from roofline.backends.gpu.kernels.gated import activated, gated

    chip = chips.get("gfx1100")
    both = (4 * torch.randn(rows, 2 * ffn + 3)).to(getattr(torch, source))[:, : 2 * ffn]  # rows that lie apart
    gate, up = both[:, :ffn].double(), both[:, ffn:].double()
    gated_reference, plain_reference = REFERENCE[kind]
    wide = torch.full((3, rows, ffn + 2), float("nan"), dtype=getattr(torch, target))
    outs = wide[:, :, :ffn]
    if plain_reference is not None:
        activated(chip, kind, both[:, :ffn], out=outs[2])
        assert near(outs[2], plain_reference(gate), target)
    if gated_reference is not None:
        gated(chip, kind, both, out=outs[0])
        gated(chip, kind, both[:, :ffn], both[:, ffn:], out=outs[1])
        assert near(outs[0], gated_reference(gate, up), target)
        assert torch.equal(outs[0], outs[1])
    assert wide[:, :, ffn:].isnan().all()


@pytest.mark.parametrize(("rows", "ffn", "source", "target"), SHAPES)
def test_clamped_swiglu(rows, ffn, source, target):
    """Gates beyond the limit above and below, ups beyond it on both sides; in the place of gate too."""
    from roofline.backends.gpu.kernels.gated import clamped_swiglu

    gate, up = (3 * torch.randn(2, rows, ffn)).to(getattr(torch, source))
    up[0, 0], up[0, 1], gate[0, 2], gate[0, 3] = 5.0, -5.0, 5.0, -5.0
    want = ops.clamped_swiglu(gate.double(), up.double(), 2.0)
    out = gate if source == target else torch.full((rows, ffn), float("nan"), dtype=getattr(torch, target))
    clamped_swiglu(chips.get("sm_90"), gate, up, 2.0, out=out)
    assert near(out, want, target)


@pytest.mark.parametrize("place", [0, 1])
def test_clamping_keeps_a_nan(place):
    from roofline.backends.gpu.kernels.gated import clamped_swiglu

    operands = torch.ones(2, 1, 4)
    operands[place, 0, 2] = float("nan")
    out = torch.zeros(1, 4)
    clamped_swiglu(chips.get("sm_90"), *operands, 7.0, out=out)
    assert out.isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("kind", [kind for kind, (_, plain) in REFERENCE.items() if plain])
def test_large_values_have_their_limits(kind):
    from roofline.backends.gpu.kernels.gated import activated

    x = torch.tensor([[-1e4, -200.0, -0.0, 0.0, 200.0, 1e4, float("inf"), float("nan")]])
    activated(chips.get("sm_90"), kind, x, out=x)
    large = [4e4, 1e8] if kind == "relu_squared" else [200, 1e4]
    assert x[0, :7].tolist() == [0, 0, 0, 0, *large, float("inf")]
    assert x[0, 7].isnan()


def test_a_row_is_the_same_alone_and_in_company():
    from roofline.backends.gpu.kernels.gated import gated

    both = torch.randn(5, 2 * 100).bfloat16()
    together, alone = torch.zeros(5, 100), torch.zeros(1, 100)
    gated(chips.get("sm_90"), "silu", both, out=together)
    gated(chips.get("sm_90"), "silu", both[3:4], out=alone)
    assert torch.equal(together[3:4], alone)
