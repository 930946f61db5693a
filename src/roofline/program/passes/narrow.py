"""narrow: rows whose logits nobody wants are left out from where they last matter, not only before the head.

After the last layer's attention every row is on its own, so a prompt's other rows need no output projection and no
mlp there. Each remaining row is computed as before, to the bit. What works on these rows alone comes behind all that
works on tokens: where a backend keeps integer rows only until the next are made, each has the readers of its own.
"""

from dataclasses import replace

from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, Value


def narrow(program: Program) -> Program:
    """The Program with take_rows moved towards its inputs through instructions that work row by row."""
    for at, instr in enumerate(program.body):
        if instr.op == "take_rows":
            return _narrow_above(program, at)
    return program


def _narrow_above(program: Program, at: int) -> Program:
    take = program.body[at]
    source, rows = take.inputs
    inside = _only_for(program, at)
    if not inside:
        return program
    types = program.types()
    narrowed: dict[str, str] = {}  # value -> its rows that are wanted
    body: list[Instr] = []
    behind: list[Instr] = []

    def narrow_value(name: str) -> str:
        if name not in narrowed and types[name].leading == "tokens":
            value = Value(f"{name}.rows", replace(types[name], leading="rows"))
            behind.append(Instr("take_rows", (name, rows), (), {}, (value,)))
            narrowed[name] = value.name
        return narrowed.get(name, name)

    for number, instr in enumerate(program.body):
        if number in inside:
            inputs = tuple(narrow_value(name) for name in instr.inputs)
            outputs = tuple(Value(v.name, replace(v.type, leading="rows")) for v in instr.outputs)
            narrowed |= {v.name: v.name for v in outputs}
            behind.append(replace(instr, inputs=inputs, outputs=outputs))
        elif number != at:
            (body if number < at else behind).append(instr)
    renamed = {take.output.name: source}
    body = [replace(i, inputs=tuple(renamed.get(name, name) for name in i.inputs)) for i in (*body, *behind)]
    return replace(program, body=tuple(body), outputs=tuple(renamed.get(name, name) for name in program.outputs))


def _only_for(program: Program, at: int) -> set[int]:
    """Numbers of the instructions before `at` that work row by row and are read by it, directly or through such; but
    for those that read ids or positions, which backends have of all tokens alone."""
    of_all_tokens = {value.name for value in program.inputs if value.type.dtype == "i32"}
    readers: dict[str, set[int]] = {}
    for number, instr in enumerate(program.body):
        for name in instr.inputs:
            readers.setdefault(name, set()).add(number)
    inside: set[int] = set()
    for number in range(at - 1, -1, -1):
        instr = program.body[number]
        if not instr.has(Trait.ROW_WISE) or not of_all_tokens.isdisjoint(instr.inputs):
            continue
        used = set().union(*(readers.get(v.name, set()) for v in instr.outputs))
        escapes = any(v.name in program.outputs for v in instr.outputs)
        if used and used <= inside | {at} and not escapes:
            inside.add(number)
    return inside
