"""stage: some of a Program's layers, for pipelines: each stage computes its own and hands its rows to the next.

Values that cross a cut become outputs of one stage and inputs of the next. Every instruction stays what it was, so the
last stage's logits are those of the whole Program, to the bit.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace

from roofline.common.errors import CapacityError, UnsupportedError
from roofline.program.ir import Instr, Program, Value, kv_group_of
from roofline.program.passes.divide import evenly


def stage(program: Program, number: int, stages: int) -> Program:
    """Stage `number` of a Program as traced (or sharded): its layers in order, in parts that differ by one at most; the
    first has what is before them, the last what is after. A layer that reads the keys and values of another one stays
    with it, and with what is between them: such parts may differ by more.

    Its caches hold its own layers, counted from 0; weights keep their names.

    Raises CapacityError: more stages than layers, or than parts that they can be cut into; UnsupportedError: more than
    one value would cross a cut.
    """
    if stages == 1:
        return program
    layers = program.layers
    if stages > layers:
        what = f"pipeline_parallel={stages}"
        raise CapacityError(what, stages, layers, "layers", f"Lower it to at most {layers}.")
    numbers = _layers(program)
    edges = [0, *(numbers.index(first) for first in _first_layers(program, numbers, stages)[1:]), len(numbers)]
    body = program.body[edges[number] : edges[number + 1]]
    names = _store_names(program, body)
    carried = _crossing(program, edges[number]) if number else []
    results = _crossing(program, edges[number + 1]) if number + 1 < stages else [program.logits]
    numbered = {group: _store_layers(program, body, group) for group in (*program.kv_groups, *program.state_groups)}
    body = tuple(_renumbered(instr, numbered, names) for instr in body)
    read, types = {name for instr in body for name in instr.inputs}, program.types()
    used = {name for instr in body for name in instr.weights}
    inputs = tuple(v for v in program.inputs if v.name in read or v.type.stored)
    groups = {name: replace(group, layers=len(numbered[name])) for name, group in program.kv_groups.items()}
    states = {name: replace(group, layers=len(numbered[name])) for name, group in program.state_groups.items()}
    last = {group: f"{group}.0" for group in numbered}
    last |= {kv_group_of(v.name): v.name for instr in body for v in instr.outputs if v.type.stored}
    tables = {instr.attrs["table"] for instr in body if "table" in instr.attrs}
    return replace(
        program,
        inputs=(*inputs, *(Value(name, types[name]) for name in carried)),
        outputs=(*results, *last.values()),
        weights={name: recipe for name, recipe in program.weights.items() if name in used},
        body=body,
        kv_groups=groups,
        state_groups=states,
        tables={name: table for name, table in program.tables.items() if name in tables},
        share=replace(program.share, stage=number, stages=stages),
    )


def _layers(program: Program) -> list[int]:
    """The layer of each instruction; one that does not say belongs to the one before it."""
    return list(itertools.accumulate((instr.layer or 0 for instr in program.body), max))


def _first_layers(program: Program, numbers: Sequence[int], stages: int) -> list[int]:
    """The first layer of each stage. numbers: the layer of each instruction."""
    joined = _joined(program, numbers)
    firsts = [layer for layer in range(program.layers) if layer not in joined]  # where the layers can be cut
    if not joined:
        return [first for first, _ in evenly(program.layers, stages)]
    if stages > len(firsts):
        remedy = f"Lower it to at most {len(firsts)}."
        units = "parts that share no keys and values"
        raise CapacityError(f"pipeline_parallel={stages}", stages, len(firsts), units, remedy)
    ends = [*firsts[1:], program.layers]
    for limit in range(1, program.layers):  # layers of a stage
        chosen = [0]
        for first, end in zip(firsts, ends, strict=True):
            if end - chosen[-1] > limit:
                chosen.append(first)
        if len(chosen) <= stages and max(map(operator.sub, [*chosen[1:], program.layers], chosen)) <= limit:
            break
    spare = sorted(set(firsts) - set(chosen))
    return sorted([*chosen, *spare[: stages - len(chosen)]])


def _joined(program: Program, numbers: Sequence[int]) -> set[int]:
    """The layers before which there can be no cut: they, or later ones, read what a layer before the cut wrote."""
    written: dict[tuple[str, int], int] = {}
    joined: set[int] = set()
    types = program.types()
    for instr, number in zip(program.body, numbers, strict=True):
        caches = [name for name in instr.inputs if types[name].dtype == "cache"]
        if caches:
            source = written.setdefault((kv_group_of(caches[0]), instr.attr("layer")), number)
            joined |= set(range(source + 1, number + 1))
    return joined


def _crossing(program: Program, edge: int) -> list[str]:
    """The value made before an edge of the body and read after it."""
    written = {v.name for instr in program.body[:edge] for v in instr.outputs if not v.type.stored}
    read = {name for instr in program.body[edge:] for name in instr.inputs}
    crossing = sorted(written & read)
    if len(crossing) != 1:
        reason = f"{len(crossing)} values cross a cut between layers: {', '.join(crossing)}"
        raise UnsupportedError(f"pipeline stages of {program.name}", reason, ["pipeline_parallel=1"])
    return crossing


def _store_names(program: Program, body: Iterable[Instr]) -> dict[str, str]:
    """The stores that instructions read and write, counted from 0 in each group."""
    types, names = program.types(), {}
    counts = dict.fromkeys((*program.kv_groups, *program.state_groups), 0)
    for instr in body:
        for name in (*instr.inputs, *(v.name for v in instr.outputs)):
            if types[name].stored and name not in names:
                group = kv_group_of(name)
                names[name] = f"{group}.{counts[group]}"
                counts[group] += 1
    return names


def _store_layers(program: Program, body: Iterable[Instr], group: str) -> dict[int, int]:
    """The layers of a group's store that instructions write, and their numbers counted from 0."""
    layers = {instr.attr("layer") for instr in body if any(kv_group_of(v.name) == group for v in instr.outputs)}
    return {layer: number for number, layer in enumerate(sorted(layers))}


def _renumbered(instr: Instr, numbered: dict[str, dict[int, int]], names: dict[str, str]) -> Instr:
    attrs = instr.attrs
    if "layer" in attrs:
        group = next(kv_group_of(name) for name in instr.inputs if name in names)
        attrs = {**attrs, "layer": numbered[group][instr.attr("layer")]}
    inputs = tuple(names.get(name, name) for name in instr.inputs)
    outputs = tuple(Value(names.get(v.name, v.name), v.type) for v in instr.outputs)
    return replace(instr, inputs=inputs, outputs=outputs, attrs=attrs)
