"""fuse_queries: norm, rope and factors of queries over keys that another layer wrote -> rope_queries.

Where a layer writes keys of its own, `rope_kv_write` has its queries, too. Backends take what stands before `attend` as
one instruction, so a layer without such a write gets one that does the same to its queries alone.
"""

from dataclasses import replace

from roofline.program.ir import Instr, Program, Value, kv_group_of
from roofline.program.passes.rewrite import makers, readers, without_dead

# What queries go through, from `attend` back, and the op that it is; each may be missing.
_STEPS = {"scaled": "scale_by_position", "norm_last": "rms_norm", "rope": "rope", "norm": "rms_norm"}


def fuse_queries(program: Program) -> Program:
    """The Program with a rope_queries right before each attend of a layer that writes no keys."""
    maker_of, read = makers(program.body), readers(program, program.body)
    before: dict[str, Instr] = {}  # result of an attend -> what makes its queries
    read_places: set[tuple[str, int]] = set()  # group and layer of caches that the layer which wrote them has read
    for instr in program.body:
        if instr.op != "attend":
            continue
        place = kv_group_of(instr.inputs[1]), instr.attr("layer")
        if place in read_places and instr.inputs[0] in maker_of:
            dim = program.types()[instr.inputs[1]].trailing[1]
            steps = _steps(program, instr, dim, maker_of, read)
            before[instr.output.name] = _fused(instr.inputs[0], instr.attr("heads"), steps, maker_of)
        read_places.add(place)
    if not before:
        return program
    body: list[Instr] = []
    fused = {value.name for instr in before.values() for value in instr.outputs}
    for instr in program.body:
        if instr.output.name in before:
            queries = before[instr.output.name]
            body += [queries, replace(instr, inputs=(queries.output.name, *instr.inputs[1:]))]
        elif instr.output.name not in fused:
            body.append(instr)
    return without_dead(program, body)


def _steps(
    program: Program, attend: Instr, head_dim: int, maker_of: dict[str, Instr], read: dict[str, int]
) -> dict[str, Instr]:
    """The instructions before an attend's queries, the last one first, by their names in _STEPS."""
    steps: dict[str, Instr] = {}
    name, heads = attend.inputs[0], attend.attr("heads")
    for step_name, op in _STEPS.items():
        maker = maker_of.get(name)
        if maker is None or maker.op != op or read[name] != 1:
            continue
        if op == "rms_norm":
            by_head = maker.attr("heads") == heads and program.weights[maker.weights[0]].shape == (head_dim,)
            if not by_head or any(step.op == op for step in steps.values()):
                continue
        if any(
            step.inputs[1:] != maker.inputs[1:] for step in steps.values() if len(step.inputs) > 1 < len(maker.inputs)
        ):
            continue
        steps[step_name] = maker
        name = maker.inputs[0]
    return steps


def _fused(name: str, heads: int, steps: dict[str, Instr], maker_of: dict[str, Instr]) -> Instr:
    """What makes an attend's queries of `name`: in one instruction, what its steps do."""
    output, attrs = maker_of[name].output, {"heads": heads}
    positions: tuple[str, ...] = ()
    if not steps:
        return Instr("rope_queries", (name,), (), attrs, (Value(f"{name}.queries", output.type),))
    scaled, last, rope = (steps.get(step) for step in ("scaled", "norm_last", "rope"))
    norm = last or steps.get("norm")
    weights = norm.weights if norm else ()
    if norm is not None:
        attrs |= {key: norm.attrs[key] for key in ("eps", "order") if key in norm.attrs}
    if rope is not None:
        attrs["table"], positions = rope.attr("table"), rope.inputs[1:]
        attrs |= {"norm_last": True} if last else {}
    if scaled is not None:
        attrs |= {key: scaled.attrs[key] for key in ("beta", "context", "offset") if key in scaled.attrs}
        positions = scaled.inputs[1:]
    source = list(steps.values())[-1].inputs[0]
    return Instr("rope_queries", (source, *positions), weights, attrs, (output,))
