"""Products whose quantised weights are scaled in registers, beside the widened matrix, in Triton's interpreter."""

import numpy as np
import pytest

from roofline.backends.gpu.pack import LAYOUTS, pack
from roofline.hardware.chips import chips
from roofline.ops import formats

torch = pytest.importorskip("torch")

FORMATS = [name for name, layout in LAYOUTS.items() if layout.bits < 8]
SM_90 = chips.get("sm_90")


def weight_of(name, rows, columns):
    """Return the packed matrix, and its values in float64 [rows, columns] as they are rounded to bf16."""
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    raw = formats.get(name).quantize(values)
    widened = torch.from_numpy(formats.get(name).dequantize(raw, (rows, columns))).bfloat16().double()
    return pack(raw, name, rows, columns).to("cpu"), widened


def random_rows(rows, width):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()


def product(x, weight, bias=None):
    from roofline.backends.gpu.kernels.linear_unpacked import ARRIVED, linear_unpacked, sums_bytes

    rows = x.shape[0]
    out = torch.full((rows, weight.rows + 3), float("nan"))
    sums = torch.full((sums_bytes(rows, weight.rows, x.shape[1]) // 4,), float("nan"))
    arrived = torch.zeros(ARRIVED, dtype=torch.int32)
    linear_unpacked(SM_90, x, weight, bias, out[:, : weight.rows], sums=sums, arrived=arrived)
    assert out[:, weight.rows :].isnan().all()
    assert not arrived.any()  # as the next launch needs it
    return out[:, : weight.rows]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_equals_the_widened_matrix(name):
    weight, widened = weight_of(name, 64, 512)
    x = random_rows(19, 512)
    want = x.double() @ widened.T
    # The interpreter rounds between multiplication and addition: a value near the middle may go to the other side.
    assert float((product(x, weight).double() - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("rows", [33, pytest.param(130, marks=pytest.mark.slow)])
def test_every_tile_with_a_bias_and_rows_of_x_that_lie_apart(rows):
    weight, widened = weight_of("Q4_K", 128, 256)
    bias = torch.randn(128, generator=torch.Generator().manual_seed(2))
    x = random_rows(rows, 400)[:, 100:356]
    want = x.double() @ widened.T + bias
    assert float((product(x, weight, bias).double() - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_few_rows_whose_parts_have_programs_equal_many_rows_to_the_bit(name):
    from roofline.backends.gpu.kernels.linear_unpacked import parts_of

    weight, _ = weight_of(name, 64, 2048)
    assert parts_of(64, 2048) == 4
    x = random_rows(129, 2048)  # two tiles of rows: a program adds all parts
    assert torch.equal(product(x[:3], weight), product(x, weight)[:3])


def test_parts_are_whole_blocks_and_none_is_empty():
    from roofline.backends.gpu.kernels.linear_unpacked import ARRIVED, COLUMN_TILE, PROGRAMS, parts_of, sums_bytes
    from roofline.backends.gpu.pack import SUPER

    shapes = ((4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008), (64, 256))
    assert [parts_of(*shape) for shape in shapes] == [4, 2, 1, 4, 1]
    for columns in range(COLUMN_TILE, 30_000, COLUMN_TILE):
        for blocks in range(1, 40):
            parts = parts_of(columns, SUPER * blocks)
            each = -(-blocks // parts)
            assert (parts - 1) * each < blocks
            if parts > 1:
                assert parts * columns // COLUMN_TILE <= PROGRAMS
                assert columns // COLUMN_TILE <= ARRIVED
                assert sums_bytes(100, columns, SUPER * blocks) == 4 * parts * 100 * columns


def test_it_is_taken_on_hopper_for_matrices_that_tiles_divide():
    from roofline.backends.gpu.kernels.linear_unpacked import takes_unpacked

    taken = {
        (name, chip)
        for name, layout in LAYOUTS.items()
        for chip in ("sm_80", "sm_90", "sm_100", "gfx942")
        if takes_unpacked(chips.get(chip), layout, torch.bfloat16, 128, 512)
    }
    assert taken == {(name, "sm_90") for name in FORMATS}
    for columns, width, dtype in ((96, 512, torch.bfloat16), (128, 384, torch.bfloat16), (128, 512, torch.float16)):
        assert not takes_unpacked(SM_90, LAYOUTS["Q4_0"], dtype, columns, width)
