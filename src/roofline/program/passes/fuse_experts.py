"""fuse_experts, a part of fuse: an expert's gate and up become one matrix, and SwiGLU between them one instruction.

Merging the two as linears are merged would put all gates above all ups; here each expert's up lies below its own gate,
so that both are read, and a row's products with both are at hand, in one place.
"""

from roofline.program.ir import Instr, Program, Recipe
from roofline.program.passes.rewrite import makers, readers, without_dead


def fuse_experts(program: Program) -> Program:
    """The Program with expert_linear_silu_mul where gate and up are of one format throughout and nobody else reads
    what they give."""
    maker_of, read = makers(program.body), readers(program, program.body)
    weights, body = dict(program.weights), []
    for instr in program.body:
        parts = [maker_of.get(name) for name in instr.inputs] if instr.op == "silu_mul" else []
        gate, up = parts if len(parts) == 2 else (None, None)
        if gate is None or up is None or not _pair(program, gate, up) or any(read[n] != 1 for n in instr.inputs):
            body.append(instr)
            continue
        name, recipe = _interleaved(program, gate, up)
        weights[name] = recipe
        gate_order = {"gate_order": instr.attr("order")} if instr.attr("order") else {}
        body.append(Instr("expert_linear_silu_mul", gate.inputs, (name,), {**gate.attrs, **gate_order}, instr.outputs))
    if len(weights) == len(program.weights):
        return program
    return without_dead(Program(**{**vars(program), "weights": weights}), body)


def _pair(program: Program, gate: Instr, up: Instr) -> bool:
    """Whether these are products of one value with the matrices of the same experts, of one shape and format."""
    if gate.op != "expert_linear" or up.op != "expert_linear":
        return False
    if gate.inputs != up.inputs or gate.attrs != up.attrs:
        return False
    recipes = [program.weights[instr.weights[0]] for instr in (gate, up)]
    pieces = [piece for recipe in recipes for piece in recipe.pieces]
    return (
        len({(piece.stop - piece.start, piece.format) for piece in pieces}) == 1
        and len({recipe.layout for recipe in recipes}) == 1
        and all(len(recipe.pieces) == gate.attr("experts") for recipe in recipes)
    )


def _interleaved(program: Program, gate: Instr, up: Instr) -> tuple[str, Recipe]:
    """Name and recipe of a matrix of both: of each expert its gate, and below it its up."""
    (first,), (second,) = gate.weights, up.weights
    one, other = program.weights[first], program.weights[second]
    pieces = tuple(piece for pair in zip(one.pieces, other.pieces, strict=True) for piece in pair)
    stem, _, kind = first.rpartition(".")
    name = f"{stem}+{second.rpartition('.')[0].rpartition('.')[2]}.{kind}"
    return name, Recipe((one.shape[0] + other.shape[0], one.columns), pieces, one.layout)
