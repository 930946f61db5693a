"""Which matrix products a Program runs, from its text alone: what there is to tune before anything has run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roofline.ops.traits import Trait
from roofline.program.ir import Program


@dataclass(frozen=True)
class Gemm:
    """x [rows, width] @ w [out, width].T (+ bias); format: the weight's, several joined by "+"; bias: added within."""

    rows: int
    out: int
    width: int
    format: str
    bias: bool


def gemms(program: Program, steps: Iterable[tuple[int, int]], *, fused_gates: bool = True) -> dict[Gemm, int]:
    """The products of steps of so many (tokens, logit rows), and how often one such step runs each; in order of use.

    steps: the bucket plan: one entry for each size of step that is run; fused_gates: whether products that a gate is
    fused into count.
    """
    counts: Counter[Gemm] = Counter()
    for tokens, rows in steps:
        step: Counter[Gemm] = Counter()
        for instr in program.body:
            if not instr.has(Trait.PRODUCT) or (instr.op == "linear_silu_mul" and not fused_gates):
                continue
            recipe = program.weights[instr.weights[0]]
            form = "+".join(dict.fromkeys(piece.format for piece in recipe.pieces))
            leading = rows if instr.output.type.leading == "rows" else tokens
            step[Gemm(leading, recipe.shape[0], recipe.columns, form, len(instr.weights) > 1)] += 1
        counts |= step
    return counts


def bucket_plan(batches: Sequence[int], prompt: int) -> list[tuple[int, int]]:
    """(tokens, logit rows) of decoding `batches` sequences, and of their prompts of `prompt` tokens in one step."""
    return list(dict.fromkeys([*((n, n) for n in batches), *((n * prompt, n) for n in batches)]))
