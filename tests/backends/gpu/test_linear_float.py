"""Products with 16-bit weights against float64, and quantised ones widened, in Triton's interpreter."""

import numpy as np
import pytest

from roofline.backends.gpu.pack import LAYOUTS, pack
from roofline.hardware.chips import chips
from roofline.ops import formats

torch = pytest.importorskip("torch")
CHIP = chips.get("sm_90")
NARROW = 4096


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def product(x, w, columns, **options):
    from roofline.backends.gpu.kernels.linear_float import linear_float

    out = poisoned(x.shape[0], columns)
    linear_float(CHIP, x, w, options.pop("bias", None), out, **options)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 33, 100), (16, 64, 512), (70, 48, 256)])
def test_linear_float(dtype, rows, columns, width):
    x, w = (torch.randn(n, width).to(getattr(torch, dtype)) for n in (rows, columns))
    bias, want = torch.randn(columns), x.double() @ w.double().T
    assert (product(x, w, columns, bias=bias) - want - bias).norm() < 1e-6 * want.norm()


def test_gated():
    x, w = torch.randn(3, 128).bfloat16(), torch.randn(50, 128).bfloat16()
    both = x.double() @ w.double().T
    want = torch.nn.functional.silu(both[:, :25]) * both[:, 25:]
    assert (product(x, w, 25, gated=True) - want).norm() < 1e-6 * want.norm()


def test_exact_rows_do_not_depend_on_the_batch():
    x, w = torch.randn(70, 200).bfloat16(), torch.randn(40, 200).bfloat16()
    # In one tile: the interpreter rounds once for all of a tile's width, a GPU's matrix units after each 16 of it.
    alone = torch.cat([product(x[i : i + 1], w, 40, exact=True, one_tile=True) for i in (0, 1, 63, 64, 69)])
    assert torch.equal(product(x, w, 40, exact=True, one_tile=True)[[0, 1, 63, 64, 69]], alone)


@pytest.mark.parametrize("columns", [NARROW, NARROW + 1])
def test_every_tile_for_a_number_of_rows(columns):
    from roofline.backends.gpu.kernels.linear_float import ROW_BUCKETS, table_tile

    x, w = torch.randn(20, 100).bfloat16(), torch.randn(40, 100).bfloat16()
    want = x.double() @ w.double().T
    for rows in ROW_BUCKETS:
        assert (product(x, w, 40, tile=table_tile(CHIP, rows, columns)) - want).norm() < 1e-6 * want.norm()
    few, many = (table_tile(CHIP, rows, columns, exact=True) for rows in (1, 5000))
    assert few.sizes["BLOCK_M"] < many.sizes["BLOCK_M"]
    few, many = (table_tile(CHIP, rows, columns, exact=True, one_tile=True) for rows in (1, 5000))
    assert few == many


@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantize(name):
    from roofline.backends.gpu.kernels.dequantize import dequantize

    values = np.random.default_rng(1).standard_normal((70, 256)).astype(np.float32)
    raw = formats.get(name).quantize(values)
    want = torch.from_numpy(formats.get(name).dequantize(raw, values.shape))
    weight = pack(raw, name, 70, 256).to("cpu")
    whole, some = poisoned(70, 256), poisoned(4, 300)[:, :256]
    dequantize(CHIP, weight, out=whole)
    assert torch.allclose(whole, want, rtol=1e-6, atol=1e-7)
    dequantize(CHIP, weight, out=some, ids=torch.tensor([69, 0, 70, 5], dtype=torch.int32))
    assert torch.equal(some[[0, 1, 3]], whole[[69, 0, 5]])
    assert some[2].isnan().all()
