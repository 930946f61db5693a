"""Products of each head with a matrix of its own, in Triton's interpreter against float64."""

import pytest

from roofline import ops
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")


def product(x, w, heads, chip="sm_90", exact=False, out=None):
    from roofline.backends.gpu.kernels.head_linear import head_linear

    out = torch.full((x.shape[0], w.shape[0]), float("nan")) if out is None else out
    head_linear(chips.get(chip), x, w, heads, out=out, exact=exact)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "heads", "columns", "width"), [(1, 3, 40, 24), (16, 2, 64, 128), (70, 5, 33, 48)])
def test_head_linear(dtype, rows, heads, columns, width):
    x = torch.randn(rows, heads * width).to(getattr(torch, dtype))
    w = torch.randn(heads * columns, width).to(x.dtype)
    want = ops.head_linear(x.double(), w.double(), heads)
    for exact in (False, True):
        assert (product(x, w, heads, exact=exact) - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("chip", [pytest.param(name, marks=pytest.mark.slow) for name in chips.chips()])
def test_tiles_of_chips(chip):
    for rows in (3, 40):
        x, w = torch.randn(rows, 2 * 48).bfloat16(), torch.randn(2 * 72, 48).bfloat16()
        want = ops.head_linear(x.double(), w.double(), 2)
        for exact in (False, True):
            assert (product(x, w, 2, chip, exact) - want).norm() < 1e-6 * want.norm()


def test_rows_may_lie_apart():
    x, w = torch.randn(5, 2 * 24).bfloat16(), torch.randn(2 * 16, 24).bfloat16()
    wider, wide_out = torch.full((5, 64), float("nan")).bfloat16(), torch.full((5, 40), 7.0)
    wider[:, 8:56] = x
    product(wider[:, 8:56], w, 2, out=wide_out[:, 4:36])
    assert torch.equal(wide_out[:, 4:36], product(x, w, 2))
    assert (wide_out[:, :4] == 7).all()
    assert (wide_out[:, 36:] == 7).all()


def test_exact_rows_do_not_depend_on_the_batch():
    x, w = torch.randn(70, 2 * 200).bfloat16(), torch.randn(2 * 40, 200).bfloat16()
    alone = torch.cat([product(x[i : i + 1], w, 2, exact=True) for i in (0, 1, 63, 64, 69)])
    assert torch.equal(product(x, w, 2, exact=True)[[0, 1, 63, 64, 69]], alone)
