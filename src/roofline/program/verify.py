"""The rules every Program keeps, checked after each pass: what a pass may not break."""

import itertools
import re
from collections.abc import Mapping

from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.symbol import Type
from roofline.program.ir import Program, kv_group_of
from roofline.program.text import NAME
from roofline.program.trace import TensorInfo


def verify(program: Program, tensors: Mapping[str, TensorInfo] | None = None) -> Program:
    """The Program itself when it is sound, else ConfigError.

    Checked: names are assigned once and before use; results have the types their ops infer; each cache value is
    written from at most once and nothing reads it after that; weights and tables exist and are used; pieces of a file
    tensor do not overlap and, when `tensors` is given, cover each tensor exactly once.
    """
    types = _verify_body(program)
    for name in program.outputs:
        if name not in types:
            raise ConfigError(f"output {name} is never assigned")
    _verify_weights(program)
    _verify_pieces(program, tensors)
    for name in (program.name, *types, *program.weights):
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"{name!r} cannot stand in a Program's text")
    return program


def _verify_body(program: Program) -> dict[str, Type]:
    types: dict[str, Type] = {}
    spent: set[str] = set()  # caches that have a successor
    for value in program.inputs:
        _assign(types, value.name, value.type, "input")
    for instr in program.body:
        op = registry.get(instr.op)
        for name in instr.inputs:
            if name not in types:
                raise ConfigError(f"{instr.op} reads {name} before it is assigned")
            if name in spent:
                raise ConfigError(f"{instr.op} reads {name} after it was written to")
        for name in instr.weights:
            if name not in program.weights:
                raise ConfigError(f"{instr.op} uses the unknown weight {name}")
        if "table" in instr.attrs and instr.attrs["table"] not in program.tables:
            raise ConfigError(f"{instr.op} uses the unknown table {instr.attrs['table']}")
        held = (program.weights[name].type for name in instr.weights)
        inferred = op.types(op.call((types[name] for name in instr.inputs), held, instr.attrs))
        if inferred != tuple(value.type for value in instr.outputs):
            raise ConfigError(f"{instr.op}: results {instr.outputs} should be of types {inferred}")
        for value in instr.outputs:
            _assign(types, value.name, value.type, instr.op)
            if value.type.dtype == "cache":
                if kv_group_of(value.name) not in program.kv_groups:
                    raise ConfigError(f"{value.name} belongs to no kv group")
                spent |= {name for name in instr.inputs if types[name].dtype == "cache"}
    return types


def _assign(types: dict[str, Type], name: str, kind: Type, by: str) -> None:
    if name in types:
        raise ConfigError(f"{name} is assigned twice, the second time by {by}")
    types[name] = kind


def _verify_weights(program: Program) -> None:
    used = {name for instr in program.body for name in instr.weights}
    if unused := sorted(set(program.weights) - used):
        raise ConfigError(f"weights no instruction uses: {', '.join(unused)}")
    for name, recipe in program.weights.items():
        if sum(piece.stop - piece.start for piece in recipe.pieces) != recipe.shape[0]:
            raise ConfigError(f"the pieces of {name} do not add up to its {recipe.shape[0]} rows")


def _verify_pieces(program: Program, tensors: Mapping[str, TensorInfo] | None) -> None:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for recipe in program.weights.values():
        for piece in recipe.pieces:
            ranges.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    for name, spans in ranges.items():
        spans.sort()
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            raise ConfigError(f"rows of the file tensor {name} are used twice: {spans}")
        if tensors is not None:
            gaps = spans[0][0] != 0 or any(a[1] != b[0] for a, b in itertools.pairwise(spans))
            if name not in tensors or gaps or spans[-1][1] != tensors[name].shape[0]:
                raise ConfigError(f"rows of the file tensor {name} are not used exactly once: {spans}")
    if tensors is not None and (spare := sorted(set(tensors) - set(ranges))):
        raise ConfigError(f"file tensors no weight is made of: {', '.join(spare)}")
