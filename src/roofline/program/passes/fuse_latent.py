"""fuse_latent: q and k of attention over compressed rows, which are made apart, side by side into rope_latent_write.

Backends take the two as columns of one value, as they take q, k and v where a cache holds both of the latter.
"""

from collections.abc import Mapping

from roofline.ops.symbol import Type
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.rewrite import makers, readers, without_dead

_SCALED = "scale_by_position"  # of q, behind its rope


def fuse_latent(program: Program) -> Program:
    """The Program with a join_heads and a rope_latent_write for each latent_write whose q and k are turned alike."""
    maker_of, read = makers(program.body), readers(program, program.body)
    queries = {instr.inputs[1]: instr.inputs[0] for instr in program.body if instr.op == "attend"}
    fused_at: dict[str, list[Instr]] = {}  # cache that a latent_write makes -> what takes its place
    replaced: set[str] = set()  # what a fused instruction makes now
    for write in program.body:
        if write.op != "latent_write" or write.output.name not in queries:
            continue
        fused = _fused(write, queries[write.output.name], maker_of, read)
        if fused:
            fused_at[write.output.name] = fused
            replaced.add(fused[-1].output.name)
    if not fused_at:
        return program
    body: list[Instr] = []
    for instr in program.body:
        if instr.output.name in fused_at:
            body += fused_at[instr.output.name]
        elif instr.output.name not in replaced:
            body.append(instr)
    return without_dead(program, body)


def _fused(write: Instr, q_name: str, maker_of: Mapping[str, Instr], read: Mapping[str, int]) -> list[Instr]:
    """What takes the place of a write, empty where q and k are not turned alike, or read by others, too."""
    last, k = maker_of[q_name], maker_of[write.inputs[1]]
    scaled = last if last.op == _SCALED else None
    q = maker_of[last.inputs[0]] if scaled else last
    turned = q.op == k.op == "rope" and q.inputs[1:] == k.inputs[1:] and q.attr("table") == k.attr("table")
    if not turned or (scaled and scaled.inputs[1:] != q.inputs[1:]):
        return []
    if any(read[step.output.name] != 1 for step in (last, q, k)):
        return []
    sources, kind = (q.inputs[0], k.inputs[0]), q.output.type
    width = kind.width + k.output.type.width
    joined = Value("+".join(sources), Type(kind.dtype, kind.leading, (width,)))
    attrs = {"table": q.attr("table"), "heads": q.attr("heads"), **write.attrs}
    if scaled:
        attrs |= {name: scaled.attrs[name] for name in ("beta", "context", "offset") if name in scaled.attrs}
    inputs = (joined.name, q.inputs[1], write.inputs[0])
    write_both = Instr("rope_latent_write", inputs, (), attrs, (last.output, *write.outputs))
    return [Instr("join_heads", sources, (), {"heads": 1}, (joined,)), write_both]
