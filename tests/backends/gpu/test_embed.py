"""Rows picked by number."""

import pytest

from roofline import ops
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")

FLOATS = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("width", [1, 77, 1030])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_embed(width, source, target):
    from roofline.backends.gpu.kernels.embed import embed

    table = torch.randn(50, width + 5).to(getattr(torch, source))[:, :width]
    ids = torch.tensor([49, 0, 7, 7])
    out = torch.full((4, width), float("nan"), dtype=getattr(torch, target))
    embed(chips.get("sm_90"), ids, table, out=out)
    assert torch.equal(out, ops.embed(ids, table).float().to(out.dtype))


def test_take_rows_into_rows_that_lie_apart():
    from roofline.backends.gpu.kernels.embed import embed

    x, rows = torch.randn(9, 40), torch.tensor([8, 0], dtype=torch.int32)
    out = torch.full((2, 64), float("nan"))
    embed(chips.get("gfx942"), rows, x, out=out[:, :40])
    assert torch.equal(out[:, :40], ops.take_rows(x, rows))
    assert out[:, 40:].isnan().all()


def test_numbers_outside_the_table_give_nan_in_their_rows_alone():
    from roofline.backends.gpu.kernels.embed import embed

    table, out = torch.randn(4, 8), torch.zeros(5, 8)
    embed(chips.get("sm_90"), torch.tensor([3, -1, 4, 2**40, 0]), table, out=out)
    assert out[1:4].isnan().all()
    assert torch.equal(out[[0, 4]], table[[3, 0]])
