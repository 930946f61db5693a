"""Which matrix products a Program runs, from its text alone: what there is to tune before anything has run."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from roofline.program.ir import Program

LINEARS = ("linear", "linear_add", "linear_silu_mul")


@dataclass(frozen=True)
class Gemm:
    """x [rows, width] @ w [out, width].T (+ bias); format: the weight's, several joined by "+"; bias: added within."""

    rows: int
    out: int
    width: int
    format: str
    bias: bool


def gemms(program: Program, steps: Iterable[tuple[int, int]], ops: Collection[str] = LINEARS) -> dict[Gemm, int]:
    """The products of steps of so many (tokens, logit rows), and how often one such step runs each; in order of use.

    Args:
        steps: the bucket plan: one entry for each size of step that is run. ops: those among them that count.
    """
    found: dict[Gemm, int] = {}
    for tokens, rows in steps:
        mine: dict[Gemm, int] = {}
        for instr in program.body:
            if instr.op not in ops:
                continue
            recipe = program.weights[instr.weights[0]]
            form = "+".join(dict.fromkeys(piece.format for piece in recipe.pieces))
            leading = rows if instr.output.type.leading == "rows" else tokens
            gemm = Gemm(leading, recipe.shape[0], recipe.columns, form, len(instr.weights) > 1)
            mine[gemm] = mine.get(gemm, 0) + 1
        for gemm, times in mine.items():
            found[gemm] = max(times, found.get(gemm, 0))
    return found


def bucket_plan(batches: Sequence[int], prompt: int) -> list[tuple[int, int]]:
    """(tokens, logit rows) of decoding `batches` sequences, and of their prompts of `prompt` tokens in one step."""
    return list(dict.fromkeys([*((n, n) for n in batches), *((n * prompt, n) for n in batches)]))
