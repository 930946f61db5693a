"""What passes share: who makes and who reads each value, and removing what nobody reads."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from roofline.program.ir import Instr, Program


def makers(body: Iterable[Instr]) -> dict[str, Instr]:
    """Value name -> the instruction that makes it."""
    return {value.name: instr for instr in body for value in instr.outputs}


def readers(program: Program, body: Iterable[Instr]) -> dict[str, int]:
    """Value name -> how often it is read; outputs of the Program count as read."""
    counts: dict[str, int] = {}
    for name in (*(n for instr in body for n in instr.inputs), *program.outputs):
        counts[name] = counts.get(name, 0) + 1
    return counts


def rename(instr: Instr, names: Mapping[str, str]) -> Instr:
    """The instruction reading other values."""
    return replace(instr, inputs=tuple(names.get(n, n) for n in instr.inputs))


def without_dead(program: Program, body: Iterable[Instr]) -> Program:
    """The Program with this body less the instructions whose results nobody reads, its weights in the order of use."""
    live = set(program.outputs)
    instrs: list[Instr] = []
    for instr in reversed(list(body)):
        if any(value.name in live for value in instr.outputs):
            instrs.append(instr)
            live |= set(instr.inputs)
    instrs.reverse()
    weights = {name: program.weights[name] for instr in instrs for name in instr.weights}
    return replace(program, body=tuple(instrs), weights=weights)
