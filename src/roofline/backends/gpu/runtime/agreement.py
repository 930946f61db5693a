"""Whether a device's tiles give the same bits: exact products may then have a tile for each number of rows.

Kernels add in one order whatever the tile is, but what a matrix instruction does with its 16 products is the chip's
affair. An H200 gives the same bits for every instruction and shape; a device is asked whenever exact results are.
Triton's interpreter adds all that a tile holds at once, so there tiles differ.
"""

from typing import TYPE_CHECKING

import numpy as np

from roofline.hardware.chips.chips import Chip

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS, WIDTH = 300, 256, 4096  # of the products compared: more rows than two tiles of most kinds have


def tiles_agree(chip: Chip, dtype: "torch.dtype", device: str) -> bool:
    """Return whether all tiles of exact products of a dtype give the same bits on a device.

    device: torch's name; of "meta", where nothing is computed, what is known of the chip.
    """
    if not device.startswith("cuda"):
        return device == "meta"
    import torch

    from roofline.backends.gpu.kernels.linear_float import exact_tiles, linear_float
    from roofline.backends.gpu.kernels.linear_unpacked import takes_unpacked
    from roofline.backends.gpu.pack import LAYOUTS

    tiles, results = exact_tiles(chip), []
    if len(tiles) == 1:
        return True
    random = torch.Generator(device=device).manual_seed(0)
    x, w = (torch.randn(n, WIDTH, generator=random, device=device).to(dtype) for n in (ROWS, COLUMNS))
    for tile in tiles:
        results.append(torch.empty(ROWS, COLUMNS, device=device))
        linear_float(chip, x, w, None, results[-1], tile=tile)
    agree = all(torch.equal(result, results[0]) for result in results)
    if takes_unpacked(chip, LAYOUTS["Q4_0"], dtype, COLUMNS, WIDTH):
        agree = agree and _parts_agree(chip, x)
    return agree


def _parts_agree(chip: Chip, x: "torch.Tensor") -> bool:
    """Return whether few rows, whose sums are shared among programs, have the bits of many, for Q4_0."""
    import torch

    from roofline.backends.gpu.kernels.linear_unpacked import ARRIVED, ROW_BUCKETS, linear_unpacked, sums_bytes
    from roofline.backends.gpu.pack import pack
    from roofline.ops import formats

    values = np.random.default_rng(0).standard_normal((COLUMNS, WIDTH)).astype(np.float32)
    weight = pack(formats.get("Q4_0").quantize(values), "Q4_0", COLUMNS, WIDTH).to(str(x.device))
    sums = x.new_empty(sums_bytes(ROWS, COLUMNS, WIDTH) // 4, dtype=torch.float32)
    arrived, results = x.new_zeros(ARRIVED, dtype=torch.int32), []
    for rows in (*ROW_BUCKETS, ROWS):
        results.append(torch.empty(rows, COLUMNS, device=x.device))
        linear_unpacked(chip, x[:rows], weight, None, results[-1], sums=sums, arrived=arrived)
    return all(torch.equal(result, results[-1][: len(result)]) for result in results)
