"""What exact results cost: a layer's products timed in one order and in the fastest one."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.backends.gpu.runtime.step import StepSizes
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from roofline.backends.gpu.runtime.executable import GpuExecutable


def exact_over_fast(executable: "GpuExecutable", rows: int) -> float:
    """Device time of the first layer's products with so many rows, exact, over the same without; needs a GPU."""
    from triton.testing import do_bench

    with executable.runtime.here(), executable.weights.using(0):
        exact, fast = (do_bench(_products(executable, rows, order), return_mode="median") for order in (True, False))
    return float(exact / fast)


def _products(executable: "GpuExecutable", rows: int, exact: bool) -> Callable[[], None]:
    """A function that runs the products of the first layer on random rows."""
    import torch

    from roofline.backends.gpu.runtime.executable import activations

    dtype, device = activations(executable.program), executable.runtime.device
    products = replace(executable.products, exact=exact, choices={})
    step = executable.step_of(StepSizes(rows, rows, 1, rows, rows))
    work = []
    for instr in executable.program.body:
        if instr.has(Trait.PRODUCT) and instr.weights[0].startswith("layers.0."):
            parts = executable.weights.matrices[instr.weights[0]]
            columns = executable.program.weights[instr.weights[0]].columns
            x = torch.randn(rows, columns, device=device).to(dtype)
            work.append((x, parts, torch.empty(rows, sum(part.rows for part in parts), dtype=dtype, device=device)))

    def run() -> None:
        for x, parts, out in work:
            products.linear(step, x, parts, None, out)

    return run
