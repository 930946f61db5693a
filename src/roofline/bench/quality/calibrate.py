"""What a text says of a model's matrices: how much each column counts, and how the columns depend on each other.

A matrix W that is rounded to W + E gives x W + x E. Over the rows x of a text the expected square of x E, as far as the
columns of x are independent, is the sum over columns of mean(x^2) E^2: what `weights.quantise.rounding` weighs errors
by. The sums of x^T x, which GPTQ needs, say how far they are not.

The model runs in the form that a GGUF file has (`ordered_form`): what is measured has the names and the columns of the
matrices that are written, whatever order the source has them in.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.quality.column_sums import ColumnSums, MeasuredProducts
from roofline.bench.quality.score import load_to_score
from roofline.common.errors import CapacityError, ConfigError
from roofline.hardware.detect import detect
from roofline.ops import registry
from roofline.ops.batch import PAGE_TOKENS, Segment
from roofline.ops.traits import Trait
from roofline.program.ir import Instr
from roofline.weights.families.shared.tensor_names import layer_part, without_expert
from roofline.weights.gguf_form import ordered_form
from roofline.weights.latent_form import KEYS, TOGETHER, VALUES
from roofline.weights.quantise.calibration import Folding, WeightCalibration

if TYPE_CHECKING:
    from roofline.program.ir import Program
    from roofline.weights.checkpoint import Checkpoint

CONTEXT = 512  # tokens that see each other
# Of a text, by method: the reference, which is slow, reads it. GPTQ measures cols^2 numbers of each matrix, not cols.
TOKENS = {"importance": 1024, "awq": 1024, "gptq": 8192}
OTHERS = "keys and values of compressed rows are computed with its two parts apart, whose columns are others"
EXPERT_PART = ".experts."  # of the names of their matrices
UNREAD = "no token of the text was sent to the expert"
NO_ROOM = "products of the columns of experts have no room in memory: rounded by importance instead"

Progress = Callable[[int, int], None]


def calibrate(
    checkpoint: "Checkpoint",
    text: str,
    method: str,
    threads: int | None,
    progress: Progress = lambda done, total: None,
) -> WeightCalibration:
    """Run the model, its columns in a GGUF file's order, on a text in plain float32.

    Args:
        text: of which up to `TOKENS[method]` tokens are read.
        method: "importance" measures columns (their mean is 1); "awq" also says what can be scaled; "gptq" also
            measures the sums of products of two columns.
        threads: that compute; None: as torch chooses.

    Raises ConfigError where the text is too short, CapacityError where the model in float32 has no room.
    """
    checkpoint = ordered_form(checkpoint)
    products = _products_with_room(checkpoint, method == "gptq")
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
    sums = ColumnSums(executable.program, products)
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
    importance, products_of = sums.importance(), sums.products()
    reasons = dict.fromkeys(sums.unread_experts(), UNREAD)
    if not checkpoint.config.get("latent"):  # the reference computes with other matrices than the file then has
        importance, products_of = (_without_latent(measured) for measured in (importance, products_of))
        reasons |= {name: OTHERS for name in checkpoint.tensors if layer_part(name)[1] == TOGETHER}
    if products is MeasuredProducts.WITHOUT_EXPERTS:
        reasons |= {name: NO_ROOM for name in importance if EXPERT_PART in name}
    return WeightCalibration(importance, products_of, foldings, reasons=reasons)


def _without_latent(measured: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values for name, values in measured.items() if layer_part(name)[1] not in (KEYS, VALUES)}


def _products_with_room(checkpoint: "Checkpoint", wanted: bool) -> MeasuredProducts:
    """Return of which matrices the sums of products fit in memory beside the model. Raises CapacityError where the
    model, or the least that GPTQ needs, has no room."""
    matrices = {name: info.shape for name, info in checkpoint.tensors.items() if len(info.shape) > 1}
    least = count = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    for name, shape in matrices.items() if wanted else ():  # at most: matrices with the same input share their products
        part = layer_part(name)[1]
        is_of_experts = EXPERT_PART in name
        parts = int(checkpoint.config["experts"]) if is_of_experts and not without_expert(name)[1] else 1
        parts = int(checkpoint.config["heads"]) if part in (KEYS, VALUES) else parts
        count += parts * shape[-1] ** 2
        least += 0 if is_of_experts else parts * shape[-1] ** 2
    free = detect().memory_available
    if free is not None and 4 * least > free:
        remedy = "Quantise without --calibrate, which needs no more memory than a piece of a tensor."
        if wanted:
            remedy = f"Use --method importance, which holds no products of columns. {remedy}"
        raise CapacityError("calibrating, which holds the model in float32,", 4 * least, free, "bytes", remedy)
    if not wanted:
        return MeasuredProducts.NONE
    return MeasuredProducts.ALL if free is None or 4 * count <= free else MeasuredProducts.WITHOUT_EXPERTS


def _foldings(program: "Program") -> tuple[Folding, ...]:
    """Matrices that alone read the result of a norm, and those that alone read the product of two others (SwiGLU);
    both within a layer."""
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
        # What is outside the layers has readers that this Program does not show: vectors of texts are the rows of the
        # last norm, and the layer that guesses further tokens shares the head.
        inner = all(name.startswith("layers.") for name in (*divided, *products))
        if inner and divided and scalable([*products, *instr.weights]):
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
