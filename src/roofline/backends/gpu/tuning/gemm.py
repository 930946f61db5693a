"""Lets torch's TunableOp find the fastest BLAS kernel of each product, each result on disk before the next is begun.

Only AMD's libraries have candidates: on NVIDIA torch knows one kernel, its default.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from roofline.backends.gpu.runtime.libraries import tuning, validators
from roofline.common.errors import RooflineError, UnsupportedError
from roofline.hardware.chips.chips import Chip
from roofline.hardware.tuning import tunableop
from roofline.hardware.tuning.tunableop import Journal, TunableOpRow
from roofline.program.gemms import Gemm

CANDIDATE_MS = 30  # that torch gives each candidate; its documented default
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class TunedProduct:
    """A product is done. remaining: products; seconds: they will take at the rate so far."""

    row: TunableOpRow
    remaining: int
    seconds: float


@dataclass(frozen=True)
class ProductSplit:
    """tunable: products that TunableOp has; block_formats: the others, which no BLAS library reads."""

    tunable: tuple[Gemm, ...]
    block_formats: tuple[Gemm, ...]


def split(products: Mapping[Gemm, int]) -> ProductSplit:
    """Sort products by whether TunableOp has them."""
    mine = tuple(gemm for gemm in products if gemm.format in tunableop.DTYPES)
    return ProductSplit(mine, tuple(gemm for gemm in products if gemm not in mine))


def key(gemm: Gemm) -> tuple[str, tunableop.Shape]:
    """Operator and shape that torch looks the product up by."""
    return tunableop.gemm(gemm.format, gemm.rows, gemm.out, gemm.width, gemm.bias)


def device_here() -> tuple[Chip, str]:
    """The chip of torch's current device, and its product's name. Raises UnsupportedError where torch sees no GPU."""
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except ImportError:
        has_gpu = False
    if not has_gpu:
        alternatives = ("roofline tune export MODEL --untuned FILE", "roofline tune MODEL for the CPU")
        raise UnsupportedError("tuning a GPU's products", "torch sees no GPU in this process", alternatives)
    from roofline.backends.gpu.runtime.dense import chip_of

    return chip_of(torch.cuda.current_device()), torch.cuda.get_device_name()


class GemmTuner:
    """Tunes products one after the other.

    Args:
        path: of the results file; what is in it already is not measured again. Results of other versions that lie
            there stay, and a file beside it is begun (see `tunableop.target_path`).
        products: of `split`.
    """

    def __init__(self, path: Path, products: Sequence[Gemm]) -> None:
        self.journal = Journal(path, validators())
        measured = self.journal.results.rows
        self.products = [gemm for gemm in products if _row_key(gemm) not in measured]
        self.measured = len(products) - len(self.products)

    @property
    def least_seconds(self) -> float:
        """What it takes if every product has one candidate; how many there are is known when the first is done."""
        return len(self.products) * CANDIDATE_MS / 1e3

    def run(self, budget: float | None = None) -> Iterator[TunedProduct]:
        """Tune, product by product, until all are done or the next would exceed the budget's seconds.

        Raises RooflineError where torch gives no result for a product.
        """
        start, mean = time.perf_counter(), 0.0
        for done, gemm in enumerate(self.products, 1):
            if budget is not None and time.perf_counter() - start + mean > budget:
                return
            row = _tune(gemm)
            self.journal.add(row)
            mean = (time.perf_counter() - start) / done
            remaining = len(self.products) - done
            yield TunedProduct(row, remaining, remaining * mean)


def _row_key(gemm: Gemm) -> tuple[str, str]:
    operator, shape = key(gemm)
    return operator, str(shape)


def _tune(gemm: Gemm) -> TunableOpRow:
    """Run the product once with tuning on, and find what torch chose."""
    import torch
    from torch.cuda import tunable
    from torch.nn import functional

    random = partial(torch.randn, dtype=getattr(torch, _DTYPES[gemm.format]), device="cuda")
    bias = random(gemm.out) if gemm.bias else None
    with tuning():
        functional.linear(random(gemm.rows, gemm.width), random(gemm.out, gemm.width), bias)
        torch.cuda.synchronize()
    key = _row_key(gemm)
    results: Sequence[tuple[str, str, str, float]] = tunable.get_results()  # type: ignore[assignment]
    for operator, shape, solution, ms, *_ in results:
        row = TunableOpRow(operator, tunableop.Shape.parse(shape), solution, ms)
        if row.key == key:
            return row
    raise RooflineError(f"TunableOp has no result for {key[0]},{key[1]}: torch ran another operation for it")
