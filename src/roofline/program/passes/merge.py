"""merge: linears that read the same value become one (q, k, v; gate, up), their weights stacked piece by piece.

Pieces keep their own formats. Gated activations then take gate and up side by side, without a copy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from roofline.ops.symbol import Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, Recipe, Value
from roofline.program.passes.rewrite import makers, without_dead


def merge(program: Program) -> Program:
    """The Program with fewer, larger linears."""
    readers = Counter(name for instr in program.body for name in instr.weights)
    alone = {name for instr in program.body if instr.has(Trait.WHOLE_VALUES) for name in instr.inputs}
    alone = _scaled_to(alone | _lone_gates(program), program)
    groups: dict[tuple[tuple[str, ...], str, int], list[Instr]] = {}
    for instr in program.body:
        # A weight with another reader (the head that embed gathers from) stays as it is.
        if instr.op != "linear" or instr.output.name in alone:
            continue
        if all(readers[name] == 1 for name in instr.weights):
            groups.setdefault((instr.inputs, str(instr.attrs), len(instr.weights)), []).append(instr)
    weights = dict(program.weights)
    first: dict[str, list[Instr]] = {}  # result of a group's first linear -> what stands in its place
    merged: set[str] = set()
    for group in groups.values():
        if len(group) > 1:
            first[group[0].output.name] = _stack(group, weights)
            merged |= {instr.output.name for instr in group[1:]}
    body: list[Instr] = []
    for instr in program.body:
        if instr.output.name in first:
            body += first[instr.output.name]
        elif instr.output.name not in merged:
            body.append(instr)
    maker_of = makers(body)
    body = [_side_by_side(instr, maker_of) if instr.has(Trait.GATED) else instr for instr in body]
    return without_dead(replace(program, weights=weights), body)


def _lone_gates(program: Program) -> set[str]:
    """Gates, and what they are for, that no two linears of one value make: beside others they would be copied out."""
    maker_of, lone = makers(program.body), set[str]()
    for instr in program.body:
        if instr.has(Trait.GATED) and len(instr.inputs) == 2:
            gate, up = (maker_of.get(name) for name in instr.inputs)
            if gate is None or up is None or gate.op != up.op or gate.inputs != up.inputs:
                lone |= {*instr.inputs}
    return lone


def _scaled_to(names: set[str], program: Program) -> set[str]:
    """The values, and those that they are made of by ops on each element, as factors are."""
    for instr in reversed(program.body):
        if instr.output.name in names and instr.has(Trait.BY_COLUMN) and len(instr.inputs) == 1:
            names = {*names, *instr.inputs}
    return names


def _stack(group: list[Instr], weights: dict[str, Recipe]) -> list[Instr]:
    """One linear over the stacked weights, and a view for each old result."""
    stacked = []
    for names in zip(*(instr.weights for instr in group), strict=True):
        recipes = [weights[name] for name in names]
        rows = sum(recipe.shape[0] for recipe in recipes)
        pieces = tuple(piece for recipe in recipes for piece in recipe.pieces)
        name = _joined(names)
        weights[name] = Recipe((rows, *recipes[0].shape[1:]), pieces, recipes[0].layout)
        stacked.append(name)
    old = [instr.output for instr in group]
    kind = old[0].type
    total = Value("+".join(v.name for v in old), Type(kind.dtype, kind.leading, (sum(v.type.width for v in old),)))
    instrs = [replace(group[0], weights=tuple(stacked), outputs=(total,))]
    start = 0
    for value in old:
        stop = start + value.type.width
        instrs.append(Instr("split", (total.name,), (), {"start": start, "stop": stop}, (value,)))
        start = stop
    return instrs


def _joined(names: tuple[str, ...]) -> str:
    """layers.0.attn.{q,k,v}.weight -> layers.0.attn.q+k+v.weight"""
    parts = [name.split(".") for name in names]
    head = _shared(parts)
    tails = [part[head:] for part in parts]
    tail = _shared([part[::-1] for part in tails])
    middle = "+".join(".".join(part[: len(part) - tail]) for part in tails)
    return ".".join([*parts[0][:head], middle, *tails[0][len(tails[0]) - tail :]])


def _shared(parts: list[list[str]]) -> int:
    """How many leading steps all have in common, at least one step left over."""
    max_head = min(len(part) for part in parts) - 1
    return next((i for i in range(max_head) if len({part[i] for part in parts}) > 1), max_head)


def _side_by_side(instr: Instr, maker_of: Mapping[str, Instr]) -> Instr:
    if len(instr.inputs) != 2:
        return instr
    gate, up = (maker_of.get(name) for name in instr.inputs)
    if gate is None or up is None or gate.op != "split" or up.op != "split" or gate.inputs != up.inputs:
        return instr
    full_width = maker_of[gate.inputs[0]].output.type.width
    if (gate.attr("start"), gate.attr("stop"), up.attr("stop")) != (0, up.attr("start"), full_width):
        return instr
    return replace(instr, inputs=gate.inputs)
