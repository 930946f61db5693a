"""Products with quantised weights against float64, every format we read, in Triton's interpreter."""

import numpy as np
import pytest

from roofline.backends.gpu.pack import LAYOUTS, pack
from roofline.ops import formats

torch = pytest.importorskip("torch")


def weight_of(name, rows, columns, seed=0):
    """(the matrix on the device, its values in float64 [rows, columns])."""

    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    raw = formats.get(name).quantize(values)
    held = torch.from_numpy(formats.get(name).dequantize(raw, (rows, columns))).double()
    return pack(raw, name, rows, columns).to("cpu"), held


def run(x, weight, **options):
    from roofline.backends.gpu.kernels.linear_quant import linear_quant
    from roofline.hardware.chips import chips

    rows = weight.rows // 2 if options.get("gated") else weight.rows
    out = torch.full((x.shape[0], rows), float("nan"), dtype=torch.float32)
    options = {"bias": None, **options}
    linear_quant(chips.get("sm_90"), x, weight, out=out, **options)
    return out


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


# Another type of rows changes nothing of how a format is read: the default run has them with one format.
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(dtype, name, marks=() if dtype == "bfloat16" or name == "Q4_1" else pytest.mark.slow)
        for dtype in ("bfloat16", "float16", "float32")
        for name in LAYOUTS
    ],
)
def test_every_format(name, dtype):
    weight, values = weight_of(name, 48, 256)
    x = torch.randn(3, 256).to(getattr(torch, dtype))
    assert error(run(x, weight), x.double() @ values.T) < 4e-6


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("columns", [32, 96, 288])
def test_columns_that_are_no_whole_chunk(name, columns):
    weight, values = weight_of(name, 33, columns)
    x = torch.randn(2, columns).bfloat16()
    assert error(run(x, weight), x.double() @ values.T) < 4e-6


WHOLE = [name for name, layout in LAYOUTS.items() if layout.bits < 8]


@pytest.mark.parametrize(
    ("rows", "dtype", "name"),
    [
        # A format without scales of scales, and those with them, of 5 bits and of 6.
        pytest.param(*case, name, marks=() if case[0] == 3 and name in ("Q4_1", "Q5_K", "Q6_K") else pytest.mark.slow)
        for case in ((3, "bfloat16"), (8, "float16"), (11, "bfloat16"), (40, "float16"))
        for name in WHOLE
    ],
)
def test_a_matrix_that_tiles_divide(name, rows, dtype):
    """The loop of linear_whole.py with each of its tiles: plain, gated, and in one order for all rows."""
    weight, values = weight_of(name, 128, 512)
    x = torch.randn(rows, 512).to(getattr(torch, dtype))
    want = x.double() @ values.T
    assert error(run(x, weight), want) < 4e-6
    assert error(run(x, weight, exact=True), want) < 4e-6
    gate, up = want.chunk(2, dim=1)
    assert error(run(x, weight, gated=True), gate * torch.sigmoid(gate) * up) < 4e-6


@pytest.mark.slow
def test_a_wide_matrix_that_tiles_divide():
    """More than 4,096 rows, whose tiles are wider; the last rows and columns, a bias, rows of x that lie apart."""
    weight, values = weight_of("Q4_K", 4224, 256)
    bias = torch.randn(4224)
    x = torch.randn(33, 700).bfloat16()[:, 100:356]
    want = x.double() @ values.T + bias
    for rows in (5, 13, 33):
        assert error(run(x[:rows], weight, bias=bias), want[:rows]) < 4e-6


def test_matrices_that_tiles_divide_have_a_loop_of_their_own():
    """Which the tests above would not notice, were it never taken."""
    from roofline.backends.gpu.kernels.linear_quant import takes_whole
    from roofline.hardware.chips import chips

    taken = {
        (name, chip)
        for name, layout in LAYOUTS.items()
        for chip in ("sm_90", "gfx942")
        if takes_whole(chips.get(chip), layout, torch.bfloat16, 128, 512)
    }
    assert taken == {(name, "sm_90") for name in WHOLE}
    for columns, width, dtype in ((120, 512, torch.bfloat16), (128, 288, torch.bfloat16), (128, 512, torch.float32)):
        assert not takes_whole(chips.get("sm_90"), LAYOUTS["Q4_0"], dtype, columns, width)


def test_rows_beyond_a_tile_a_bias_and_strided_rows():
    weight, values = weight_of("Q4_K", 40, 512)
    bias = torch.randn(40)
    x = torch.randn(19, 700).bfloat16()[:, 100:612]
    assert error(run(x, weight, bias=bias), x.double() @ values.T + bias) < 4e-6


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=() if rows == 37 and name != "Q4_K" else pytest.mark.slow)
        for name, layout in LAYOUTS.items()
        if layout.two_level
        for rows in (36, 37)
    ],
)
def test_scales_in_bytes_of_rows_that_are_no_whole_tile_or_no_whole_four(name, rows):
    weight, values = weight_of(name, 2 * rows, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert error(run(x, weight), x.double() @ values.T) < 4e-6
    gate, up = (x.double() @ values.T).chunk(2, dim=1)
    assert error(run(x, weight, gated=True), gate * torch.sigmoid(gate) * up) < 4e-6


def test_gated():
    weight, values = weight_of("Q6_K", 80, 256)
    x = torch.randn(4, 256).bfloat16()
    both = x.double() @ values.T
    want = torch.nn.functional.silu(both[:, :40]) * both[:, 40:]
    assert error(run(x, weight, gated=True), want) < 4e-6


@pytest.mark.parametrize("rows", [pytest.param(40, marks=pytest.mark.slow), 64])
def test_exact_rows_do_not_depend_on_the_batch(rows):
    weight, _ = weight_of("Q4_K", rows, 512)
    x = torch.randn(34, 512).bfloat16()
    together = run(x, weight, exact=True)
    alone = torch.cat([run(x[i : i + 1], weight, exact=True) for i in (0, 1, 15, 31, 33)])
    assert torch.equal(together[[0, 1, 15, 31, 33]], alone)


def test_a_wrong_index_is_caught():
    """Scales read one group too far, as a planted fault: the comparison above would fail."""
    weight, values = weight_of("Q4_0", 32, 256)
    wrong = type(weight)(**{**vars(weight), "scale": weight.scale.roll(1, 0)})
    x = torch.randn(3, 256).bfloat16()
    assert error(run(x, wrong), x.double() @ values.T) > 1e-2


@pytest.mark.parametrize("array", ["words", "high", "scale", "minimum", "super_scale", "super_minimum"])
def test_a_wrong_index_of_a_matrix_that_tiles_divide_is_caught(array):
    """The same where each array is one row off."""
    weight, values = weight_of("Q5_K", 64, 512)
    held = getattr(weight, array)
    wrong = type(weight)(**{**vars(weight), array: held.roll(1, 0 if held.shape[0] == 2 else 1)})
    x = torch.randn(3, 512).bfloat16()
    assert error(run(x, weight), x.double() @ values.T) < 4e-6
    assert error(run(x, wrong), x.double() @ values.T) > 1e-3


def test_pack_takes_no_more_than_the_file():
    """Up to the 6-bit scales of K-quants, which lie in bytes here."""
    for name, layout in LAYOUTS.items():
        packed = pack(np.zeros(formats.get(name).nbytes((64, 1024)), np.uint8), name, 64, 1024)
        spare = 4 * 64 * 1024 // 256 if layout.has_minimum and layout.two_level else 0
        assert packed.nbytes == formats.get(name).nbytes((64, 1024)) + spare, name
