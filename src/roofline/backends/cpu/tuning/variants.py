"""Which variants an op of the core has in each regime: what `tune` may choose from. All of one op are bit-equal.

A name is a few words that native/variant.h describes; each candidate here changes one thing against the default, and
`combined` joins the words of several.
"""

from dataclasses import dataclass, replace

from roofline.backends.cpu.select import DEFAULT
from roofline.ops.symbol import Q_BYTES
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, kv_group_of

FEW_ROWS = 32


def regime_of(rows: int) -> int:
    """Index into REGIMES of an op over that many rows."""
    return 0 if rows <= 1 else 1 if rows <= FEW_ROWS else 2


@dataclass(frozen=True)
class OpGroup:
    """Ops of one kind and shape, which share their choice.

    kind: "linear", "float_linear", "rows" or "attend"; shape: what they compute, as text; ops: indices into the
    Program; over_rows: whether the rows of each are the step's logit rows and not its tokens (the last layer's are,
    behind its attention); digits: of integer activations; gated: a gate and an up matrix together.
    """

    kind: str
    shape: str
    ops: tuple[int, ...]
    over_rows: tuple[bool, ...]
    digits: int = 1
    gated: bool = False


def groups(program: Program) -> list[OpGroup]:
    """The Program's ops that have variants, those of equal shape together, in the order of their first."""
    types = program.types()
    by_shape: dict[tuple[str, str], OpGroup] = {}
    for index, instr in enumerate(program.body):
        described = _describe(instr, program)
        if described is None:
            continue
        kind, shape = described
        read = instr.inputs[0] if instr.has(Trait.PRODUCT) else instr.output.name
        digits = Q_BYTES.get(types[read].dtype, 1)
        shape = f"{shape} two digits" if digits == 2 else shape
        group = by_shape.get(
            (kind, shape),
            OpGroup(kind=kind, shape=shape, ops=(), over_rows=(), digits=digits, gated=instr.op == "linear_silu_mul"),
        )
        over_rows = types[instr.output.name].leading == "rows"
        ops, leads = (*group.ops, index), (*group.over_rows, over_rows)
        by_shape[kind, shape] = replace(group, ops=ops, over_rows=leads)
    return list(by_shape.values())


def _describe(instr: Instr, program: Program) -> tuple[str, str] | None:
    types = program.types()
    if instr.has(Trait.PRODUCT):
        recipe = program.weights[instr.weights[0]]
        formats = "+".join(dict.fromkeys(piece.format for piece in recipe.pieces))
        kind = "linear" if recipe.type.quantised else "float_linear"
        return kind, f"{instr.op} {recipe.shape[1]}x{recipe.shape[0]} {formats}"
    if instr.makes_integers:
        out = types[instr.output.name]
        return "rows", f"{instr.op} {out.width} {out.dtype}"
    if instr.op == "attend":
        group = program.kv_groups[kv_group_of(instr.inputs[1])]
        suffix = f" window {instr.attr('window')}" if instr.attr("window") else ""
        suffix += " capped" if instr.attr("soft_cap") else ""
        suffix += " alibi" if instr.attr("alibi") else ""
        return "attend", f"attend {instr.attr('heads')}/{group.kv_heads}x{group.head_dim}{suffix}"
    return None


def candidates(group: OpGroup, regime: int, isa: str, threads: int) -> list[str]:
    """Names worth measuring beside the default; each differs from it in one thing."""
    if group.kind == "attend":
        return [[], [], ["queries=8", "queries=32", "queries=64"]][regime]  # few rows need no such items
    if group.kind == "rows":
        return [["private=0"], ["private=0", "private=4", "private=8"], []][regime] if threads > 1 else []
    claims = [f"claim={us}" for us in (5, 10, 40, 80)] if threads > 1 else []
    if group.kind == "float_linear":
        return claims
    one_row = ["1x1" if group.gated else "2x1", "fetch=off", "fetch=2048", "fetch=4096", "fetch=16384", "fetch=next"]
    more_rows = [*blocks(isa, group), "greedy", "fetch=off", "fetch=4096"]
    return (one_row if regime == 0 else more_rows) + claims


def blocks(isa: str, group: OpGroup) -> list[str]:
    """Blocks of row tiles x tokens that the instruction set has code for, the small ones that cannot win left out."""
    from roofline import _native

    block_tokens = _native.kernels.block_tokens(isa)[group.digits - 1]
    names = []
    for tiles in (1, 2):
        names += [
            f"{tiles}x{tokens}" for tokens in range(max(1, block_tokens[tiles - 1] // 2), block_tokens[tiles - 1] + 1)
        ]
    return names


def combined(names: list[str]) -> str:
    """One name with the words of all; of two words about one thing the first counts."""
    words: dict[str, str] = {}
    for name in names:
        for word in name.split():
            if word != DEFAULT:
                words.setdefault("block" if word[0].isdigit() else word.partition("=")[0], word)
    return " ".join(words.values()) or DEFAULT
