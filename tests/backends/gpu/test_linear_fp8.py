"""Products with weights in 8-bit floats against float64, in the interpreter, on chips of both flavours and none."""

import numpy as np
import pytest

from roofline.hardware.chips import chips
from roofline.ops import formats
from roofline.ops.formats.float8 import join, split

torch = pytest.importorskip("torch")
CHIPS = ("sm_90", "gfx942", "gfx90a")  # e4m3fn, e4m3fnuz, neither: codes are widened by their bits


def weight_of(rows, columns, seed=0):
    """(Float8Weight, its values in float64 [rows, columns])."""
    from roofline.backends.gpu.kernels.float8 import Float8Weight

    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    values[:, 128:] *= 4  # scales that differ
    raw = formats.get("E4M3").quantize(values)
    held = torch.from_numpy(formats.get("E4M3").dequantize(raw, (rows, columns))).double()
    return Float8Weight.of(raw, rows, "cpu"), held


def run(x, weight, chip="sm_90", **options):
    from roofline.backends.gpu.kernels.linear_fp8 import linear_fp8

    rows = weight.rows // 2 if options.get("gated") else weight.rows
    out = torch.full((x.shape[0], rows), float("nan"), dtype=torch.float32)
    linear_fp8(chips.get(chip), x, weight, out=out, **{"bias": None, **options})
    return out


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_of_16_bits(chip, dtype):
    weight, values = weight_of(48, 256)
    x = torch.randn(3, 256).to(getattr(torch, dtype))
    assert error(run(x, weight, chip), x.double() @ values.T) < 4e-6


def test_rows_beyond_a_tile_a_bias_and_strided_rows():
    weight, values = weight_of(40, 384)
    bias = torch.randn(40)
    for rows in (19, 70):
        x = torch.randn(rows, 700).bfloat16()[:, 100:484]
        assert error(run(x, weight, bias=bias), x.double() @ values.T + bias) < 4e-6


@pytest.mark.parametrize("chip", CHIPS)
def test_gated(chip):
    weight, values = weight_of(80, 256)
    x = torch.randn(4, 256).bfloat16()
    both = x.double() @ values.T
    want = torch.nn.functional.silu(both[:, :40]) * both[:, 40:]
    assert error(run(x, weight, chip, gated=True), want) < 4e-6


def test_exact_rows_do_not_depend_on_the_batch():
    weight, _ = weight_of(40, 256)
    x = torch.randn(34, 256).bfloat16()
    together = run(x, weight, exact=True)
    alone = torch.cat([run(x[i : i + 1], weight, exact=True) for i in (0, 15, 33)])
    assert torch.equal(together[[0, 15, 33]], alone)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_code_is_widened_exactly(chip):
    from roofline.backends.gpu.kernels.dequantize import dequantize
    from roofline.backends.gpu.kernels.float8 import Float8Weight

    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F][:254]
    codes = np.concatenate([codes, codes[:2]]).reshape(2, 128)
    scale = np.array([[0.5], [3.0]], np.float32)
    weight = Float8Weight.of(join(codes, scale), 2, "cpu")
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scale)
    out = torch.full((2, 128), float("nan"))
    dequantize(chips.get(chip), weight, out=out)
    assert torch.equal(out, want)
    picked = torch.full((4, 128), float("nan"))
    dequantize(chips.get(chip), weight, out=picked, ids=torch.tensor([1, 0, 2, -1], dtype=torch.int32))
    assert torch.equal(picked[:2], want.flip(0))
    assert picked[2:].isnan().all()


def test_nan_in_a_file_is_nan_in_its_column_and_no_other():
    raw = formats.get("E4M3").quantize(np.ones((3, 256), np.float32))
    codes, scale = split(raw, 3)
    codes[1, 130] = 0xFF
    from roofline.backends.gpu.kernels.float8 import Float8Weight

    for chip in CHIPS:
        out = run(torch.randn(2, 256).bfloat16(), Float8Weight.of(join(codes, scale), 3, "cpu"), chip)
        assert out[:, 1].isnan().all()
        assert torch.isfinite(out[:, [0, 2]]).all()


def rounded(x, chip):
    """(x in the chip's 8-bit floats, scales, what both stand for by the reference)."""
    from roofline.backends.gpu.kernels.float8 import FLAVOURS, rows_fp8
    from roofline.ops.matmul import round_rows

    chip = chips.get(chip)
    eight, scale = torch.empty(*x.shape, dtype=FLAVOURS[chip.fp8]), torch.full((x.shape[0],), float("nan"))
    rows_fp8(chip, x, out=eight, scale=scale)
    return eight, scale, round_rows(x.float(), chip.fp8)


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_rows_of_8_bits(chip):
    x = torch.randn(19, 1500).bfloat16()[:, 100:1252]  # more than a block, and not whole ones
    x[3] = 0
    x[4, 7] = 3e38
    x[5, 8] = float("nan")
    x[6] *= 1e-38
    eight, scale, want = rounded(x, chip)
    got = eight.float() * scale[:, None]
    assert got[5, 8].isnan()
    assert (got[3] == 0).all()
    kept = [i for i in range(19) if i != 5]
    assert torch.allclose(got[kept], want[kept], rtol=1e-6, atol=0)
    assert eight[kept].float().abs().amax(1).eq(torch.finfo(eight.dtype).max).sum() == len(kept) - 2  # the zeros


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
@pytest.mark.parametrize("rows", [3, 70])
def test_products_of_8_bits(chip, rows):
    weight, values = weight_of(80, 384)
    eight, scale, x = rounded(torch.randn(rows, 384).bfloat16(), chip)
    bias = torch.randn(80)
    both = x.double() @ values.T
    assert error(run(eight, weight, chip, x_scale=scale, bias=bias), both + bias) < 4e-6
    gated = torch.nn.functional.silu(both[:, :40]) * both[:, 40:]
    assert error(run(eight, weight, chip, x_scale=scale, gated=True), gated) < 4e-6


def test_a_wrong_index_is_caught():
    """Scales read one group too far, as a planted fault: the comparisons above would fail."""
    weight, values = weight_of(32, 256)
    wrong = type(weight)(weight.codes, weight.scale.roll(1, 0))
    x = torch.randn(3, 256).bfloat16()
    assert error(run(x, wrong), x.double() @ values.T) > 1e-2
