"""What a text says of a model's matrices: how much each column counts, and how the columns depend on each other.

A matrix W that is rounded to W + E gives x W + x E. Over the rows x of a text the expected square of x E, as far as the
columns of x are independent, is the sum over columns of mean(x^2) E^2: what `weights.quantise.rounding` weighs errors
by. The sums of x^T x, which GPTQ needs, say how far they are not.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.quality.score import load_to_score
from roofline.common.errors import CapacityError, ConfigError
from roofline.hardware.detect import detect
from roofline.ops import registry
from roofline.ops.batch import PAGE_TOKENS, Segment
from roofline.ops.traits import Trait
from roofline.program.ir import Instr
from roofline.weights.quantise.calibration import Folding, WeightCalibration

if TYPE_CHECKING:
    from roofline.program.ir import Program
    from roofline.weights.checkpoint import Checkpoint

CONTEXT = 512  # tokens that see each other
# Of a text, by method: the reference, which is slow, reads it. GPTQ measures cols^2 numbers of each matrix, not cols.
TOKENS = {"importance": 1024, "awq": 1024, "gptq": 8192}
_FLOOR = 1e-3  # of the mean: a column that a text never used may still be used by another

Progress = Callable[[int, int], None]


def calibrate(
    checkpoint: "Checkpoint",
    text: str,
    method: str,
    threads: int | None,
    progress: Progress = lambda done, total: None,
) -> WeightCalibration:
    """Run the model on a text in plain float32.

    Args:
        text: of which up to `TOKENS[method]` tokens are read.
        method: "importance" measures columns (their mean is 1); "awq" also says what can be scaled; "gptq" also
            measures the sums of products of two columns.
        threads: that compute; None: as torch chooses.

    Raises ConfigError where the text is too short, CapacityError where the model in float32 has no room.
    """
    count = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    if method == "gptq":  # at most: matrices with the same input share their products
        count += sum(info.shape[-1] ** 2 for info in checkpoint.tensors.values() if len(info.shape) > 1)
    free = detect().memory_available
    if free is not None and 4 * count > free:
        remedy = "Quantise without --calibrate, which needs no more memory than a piece of a tensor."
        if method == "gptq":
            remedy = f"Use --method importance, which holds no products of columns. {remedy}"
        raise CapacityError("calibrating, which holds the model in float32,", 4 * count, free, "bytes", remedy)
    context = min(CONTEXT, checkpoint.config["max_position"])
    load = replace(LoadOptions(), backend="reference", arithmetic="plain", threads=threads)
    model = load_to_score(checkpoint, load, context)
    executable, tokenizer = model.executable, model.tokenizer
    from roofline.backends.reference.executable import ReferenceExecutable

    assert isinstance(executable, ReferenceExecutable), "it was asked for"
    assert tokenizer is not None, "it was loaded with its text side"
    ids = tokenizer.encode(text, add_special=True)[: TOKENS[method]]
    if not ids:
        raise ConfigError("the text to calibrate with is empty")
    sums = _Sums(executable.program, products=method == "gptq")
    executable.observe(sums.see)
    step = executable.limits.tokens
    for begin in range(0, len(ids), context):
        window = ids[begin : begin + context]
        for start in range(0, len(window), step):
            part = window[start : start + step]
            pages = range(-(-(start + len(part)) // PAGE_TOKENS))
            executable.batch.fill([Segment(part, start, pages)], range(len(part)))
            executable.forward()
            progress(begin + start + len(part), len(ids))
    executable.close()
    foldings = _foldings(executable.program) if method == "awq" else ()
    return WeightCalibration(sums.importance(), sums.products(), foldings)


def _foldings(program: "Program") -> tuple[Folding, ...]:
    """Matrices that alone read the result of a norm, and those that alone read the product of two others (SwiGLU)."""
    matrices = Counter(weight for instr in program.body for weight in instr.weights)
    tensors = Counter(piece.tensor for recipe in program.weights.values() for piece in recipe.pieces)

    def scalable(weights: Sequence[str]) -> bool:
        """Whether nothing else reads these weights, nor the tensors that they are made of."""
        pieces = [piece for weight in weights for piece in program.weights[weight].pieces]
        return all(matrices[weight] == 1 for weight in weights) and all(tensors[piece.tensor] == 1 for piece in pieces)

    foldings = []
    for instr in program.body:
        readers = [other for other in program.body if instr.output.name in other.inputs]
        if instr.output.name in program.outputs or not readers or not all(_multiplies(r, instr) for r in readers):
            continue
        divided = _factors_of(program, instr)
        products = [reader.weights[0] for reader in readers]
        if divided and scalable([*products, *instr.weights]):
            names = [piece.tensor for weight in products for piece in program.weights[weight].pieces]
            foldings.append(Folding(tuple(names), divided))
    return tuple(foldings)


def _multiplies(reader: Instr, instr: Instr) -> bool:
    """Whether an instruction reads the result of another only to multiply a matrix with it."""
    return reader.has(Trait.PRODUCT) and reader.inputs[0] == instr.output.name not in reader.inputs[1:]


def _factors_of(program: "Program", instr: Instr) -> tuple[str, ...]:
    """The parameters that the columns of an instruction's result are proportional to; none: there are no such."""
    recipes, width = [program.weights[weight] for weight in instr.weights], instr.output.type.width
    if instr.has(Trait.SCALES) and all(recipe.shape == (width,) for recipe in recipes):
        return tuple(piece.tensor for recipe in recipes for piece in recipe.pieces)
    gated = any(registry.has(op, Trait.GATED) for op in registry.get(instr.op).fuses)
    if instr.has(Trait.PRODUCT) and gated and [recipe.shape[0] for recipe in recipes] == [2 * width]:
        pieces = recipes[0].pieces
        return (pieces[1].tensor,) if len(pieces) == 2 else ()  # gate, up
    return ()


class _Sums:
    """Sums over the rows that come into the linear ops of a Program: of squares, and of products if these are used."""

    def __init__(self, program: "Program", products: bool) -> None:
        self._program, self._with_products = program, products
        # By the weight of the Program, which may hold several matrices of the file.
        self._squares: dict[str, np.ndarray] = {}  # float64 [cols]
        self._products: dict[str, np.ndarray] = {}  # float32 [cols, cols]

    def see(self, instr: Instr, operands: list[object]) -> None:
        import torch

        if not instr.op.startswith("linear"):
            return
        x = operands[0]
        assert isinstance(x, torch.Tensor), "plain arithmetic keeps rows as floats"
        weight = instr.weights[0]
        _add(self._squares, weight, x.to(torch.float64).square().sum(dim=0).numpy())
        if self._with_products:
            _add(self._products, weight, (x.T @ x).numpy())

    def importance(self) -> dict[str, np.ndarray]:
        importance = {}
        for name, squares in self._by_tensor(self._squares).items():
            mean = squares.mean()
            if not np.isfinite(mean) or mean <= 0:
                raise ConfigError(f"tensor {name!r}: what it is multiplied with is zero, or no number, in this text")
            importance[name] = np.maximum(squares / mean, _FLOOR).astype(np.float32)
        return importance

    def products(self) -> dict[str, np.ndarray]:
        return self._by_tensor(self._products)

    def _by_tensor(self, sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        by_tensor: dict[str, np.ndarray] = {}
        for weight, addend in sums.items():
            for name in {piece.tensor for piece in self._program.weights[weight].pieces}:
                by_tensor[name] = by_tensor[name] + addend if name in by_tensor else addend
        return by_tensor


def _add(sums: dict[str, np.ndarray], weight: str, addend: np.ndarray) -> None:
    if weight in sums:
        sums[weight] += addend
    else:
        sums[weight] = addend
