"""stage: some of a Program's layers, for pipelines: each stage computes its own and hands its rows to the next.

Values that cross a cut become outputs of one stage and inputs of the next. Every instruction stays what it was, so the
last stage's logits are those of the whole Program, to the bit.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

from roofline.common.errors import CapacityError, UnsupportedError
from roofline.program.ir import Instr, Program, Value, kv_group_of
from roofline.program.passes.divide import evenly


def stage(program: Program, number: int, stages: int) -> Program:
    """Stage `number` of a Program as traced (or sharded): its layers in order, in parts that differ by one at most; the
    first has what is before them, the last what is after.

    Its caches hold its own layers, counted from 0; weights keep their names.

    Raises CapacityError: more stages than layers; UnsupportedError: more than one value would cross a cut.
    """
    if stages == 1:
        return program
    layers = sum(group.layers for group in program.kv_groups.values())
    if stages > layers:
        what = f"pipeline_parallel={stages}"
        raise CapacityError(what, stages, layers, "layers", f"Lower it to at most {layers}.")
    parts = evenly(layers, stages)
    numbers = _layers(program)
    edges = [0, *(numbers.index(first) for first, _ in parts[1:]), len(numbers)]
    body = program.body[edges[number] : edges[number + 1]]
    first, last = parts[number]
    names = _cache_names(program, body)
    carried = _crossing(program, edges[number]) if number else []
    results = _crossing(program, edges[number + 1]) if number + 1 < stages else [program.logits]
    body = tuple(_renumbered(instr, first, names) for instr in body)
    read, types = {name for instr in body for name in instr.inputs}, program.types()
    used = {name for instr in body for name in instr.weights}
    inputs = tuple(v for v in program.inputs if v.name in read or v.type.dtype == "cache")
    groups = {name: replace(group, layers=last - first) for name, group in program.kv_groups.items()}
    last_cache = {kv_group_of(v.name): v.name for instr in body for v in instr.outputs if v.type.dtype == "cache"}
    tables = {instr.attrs["table"] for instr in body if "table" in instr.attrs}
    return replace(
        program,
        inputs=(*inputs, *(Value(name, types[name]) for name in carried)),
        outputs=(*results, *(last_cache[group] for group in groups)),
        weights={name: recipe for name, recipe in program.weights.items() if name in used},
        body=body,
        kv_groups=groups,
        tables={name: table for name, table in program.tables.items() if name in tables},
        share=replace(program.share, stage=number, stages=stages),
    )


def _layers(program: Program) -> list[int]:
    """The layer of each instruction; one that does not say belongs to the one before it."""
    return list(itertools.accumulate((instr.layer or 0 for instr in program.body), max))


def _crossing(program: Program, edge: int) -> list[str]:
    """The value made before an edge of the body and read after it."""
    written = {v.name for instr in program.body[:edge] for v in instr.outputs if v.type.dtype != "cache"}
    read = {name for instr in program.body[edge:] for name in instr.inputs}
    crossing = sorted(written & read)
    if len(crossing) != 1:
        reason = f"{len(crossing)} values cross a cut between layers: {', '.join(crossing)}"
        raise UnsupportedError(f"pipeline stages of {program.name}", reason, ["pipeline_parallel=1"])
    return crossing


def _cache_names(program: Program, body: Iterable[Instr]) -> dict[str, str]:
    """The caches that instructions read and write, counted from 0 in each group."""
    types, names, counts = program.types(), {}, dict.fromkeys(program.kv_groups, 0)
    for instr in body:
        for name in (*instr.inputs, *(v.name for v in instr.outputs)):
            if types[name].dtype == "cache" and name not in names:
                group = kv_group_of(name)
                names[name] = f"{group}.{counts[group]}"
                counts[group] += 1
    return names


def _renumbered(instr: Instr, first: int, names: dict[str, str]) -> Instr:
    attrs = {**instr.attrs, "layer": instr.attr("layer") - first} if "layer" in instr.attrs else instr.attrs
    inputs = tuple(names.get(name, name) for name in instr.inputs)
    outputs = tuple(Value(names.get(v.name, v.name), v.type) for v in instr.outputs)
    return replace(instr, inputs=inputs, outputs=outputs, attrs=attrs)
