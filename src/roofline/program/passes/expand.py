"""expand: an op becomes the ops that a rule calls in its place; what passes from outside are mostly made of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.symbol import Symbol, TracedParameter, Type
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.rewrite import rename, without_dead
from roofline.program.trace import NamingRecorder

Rule = Callable[..., Any]


def expand(program: Program, op: str, rule: Rule) -> Program:
    """The Program with every `op` replaced by what `rule` records.

    Args:
        rule: called with the op's values, weights and attributes by name, as its reference is; calls other ops on them
            and returns their result, or as many results as the op has.

    Raises ConfigError where the results are not of the op's types. An op with a cache among its results stays what it
    is: kv_write and attend are what the passes after this one know.
    """
    declared, types = registry.get(op), program.types()
    body: list[Instr] = []
    for instr in program.body:
        if instr.op != op or any(value.type.stored for value in instr.outputs):
            body.append(instr)
            continue
        recorder = _Expansion(instr.output.name)
        arguments: dict[str, object] = dict.fromkeys((*declared.values, *declared.weights))
        for name, value in zip(declared.values, instr.inputs, strict=False):
            arguments[name] = Symbol(value, types[value], recorder)
        for name, weight in zip(declared.weights, instr.weights, strict=False):
            arguments[name] = TracedParameter(weight, program.weights[weight].type)
        arguments |= {name: instr.attr(name) for name in declared.attributes if name not in ("order", "out")}
        results = rule(**arguments)
        body += _renamed(recorder.body, results if isinstance(results, tuple) else (results,), instr)
    return program if body == list(program.body) else without_dead(program, body)


class _Expansion(NamingRecorder):
    """Names the values of one expansion after the result that it is for."""

    def __init__(self, stem: str) -> None:
        super().__init__()
        self.stem = stem

    def name(self, kind: Type, source: str) -> str:
        self.count += 1
        return f"{self.stem}.{self.count}"


def _renamed(body: list[Instr], results: tuple[Symbol, ...], instr: Instr) -> list[Instr]:
    """The recorded instructions with the old names of the results."""
    recorded = {value.name for step in body for value in step.outputs}
    types = [r.type if isinstance(r, Symbol) and r.name in recorded else None for r in results]
    expected = [value.type for value in instr.outputs]
    if types != expected:
        raise ConfigError(f"expanding {instr.op} gave {types}, not new values of types {expected}")
    names = {old.name: value.name for old, value in zip(results, instr.outputs, strict=True)}
    return [
        replace(rename(step, names), outputs=tuple(Value(names.get(v.name, v.name), v.type) for v in step.outputs))
        for step in body
    ]
