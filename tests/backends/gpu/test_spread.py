"""Rows made as long as others, and what of rows lies far above their mean, against the ops' references in float64."""

import pytest

from roofline import ops
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")
CHIP = chips.get("sm_90")
SHAPES = [(1, 7), (3, 600), (2, 2048)]
STEPS = {"float32": 2**-19, "bfloat16": 2**-8}


def close(got, want, dtype):
    return ((got.double() - want).abs() <= want.abs() * STEPS[dtype] + 2e-6 * want.abs().max()).all()


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_like_norm(rows, width, dtype):
    """Rows that lie apart, the last of zeros; then in the place of x."""
    from roofline.backends.gpu.kernels.spread import like_norm

    both = torch.randn(rows, 2 * width + 3)
    both[-1, :width] = 0.0
    x, y = both[:, :width].to(getattr(torch, dtype)), 3.0 * both[:, width : 2 * width]
    wide = torch.full((rows, width + 2), float("nan"), dtype=x.dtype)
    want = ops.like_norm(x.double(), y.double())
    like_norm(CHIP, x, y, out=wide[:, :width])
    assert close(wide[:, :width], want, dtype)
    assert wide[:, width:].isnan().all()
    like_norm(CHIP, x, y, out=x)
    assert torch.equal(x, wide[:, :width])


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_above_spread(rows, width, dtype):
    from roofline.backends.gpu.kernels.spread import above_spread

    x = (2.0 * torch.randn(rows, width + 3) + 0.5).to(getattr(torch, dtype))[:, :width]  # rows that lie apart
    want = ops.above_spread(x.double(), 0.8)
    out = torch.full((rows, width), float("nan"), dtype=x.dtype)
    above_spread(CHIP, x, 0.8, out=out)
    assert close(out, want, dtype)
    assert width < 100 or 0 < (out > 0).sum() < out.numel() / 2
    above_spread(CHIP, x, 0.8, out=x)
    assert torch.equal(x, out)


def test_a_row_is_the_same_alone_and_in_company_and_no_number_stays_none():
    from roofline.backends.gpu.kernels.spread import above_spread, like_norm

    x, y = torch.randn(2, 5, 100)
    alike, above = torch.zeros(2, 5, 100)
    x[1, 7] = y[2, 7] = float("nan")
    like_norm(CHIP, x, y, out=alike)
    above_spread(CHIP, x, 0.3, out=above)
    assert alike[[1, 2]].isnan().all()
    assert above[1].isnan().all()
    one = torch.zeros(2, 1, 100)
    like_norm(CHIP, x[3:4], y[3:4], out=one[0])
    above_spread(CHIP, x[3:4], 0.3, out=one[1])
    assert torch.equal(one[0], alike[3:4])
    assert torch.equal(one[1], above[3:4])
