"""fuse_norms: split, rms_norm over all of q and the same of k -> qk_norm, and splits of its result.

The norms then stand before the split, so that rope and the write to the cache become one as they do without norms.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.rewrite import makers, readers


def fuse_norms(program: Program) -> Program:
    """The Program with qk_norm where all of q and all of k are normed, cut from one value that also has v."""
    body = list(program.body)
    maker_of, read = makers(body), readers(program, body)
    heads = {group.head_dim for group in program.kv_groups.values()}  # what covers one head goes with rope
    parts: dict[str, list[tuple[Instr, Instr]]] = {}  # value -> the split and the norm of each normed part
    for instr in body:
        weighted = instr.op == "rms_norm" and instr.weights
        over_all = weighted and program.weights[instr.weights[0]].shape[0] not in heads
        split = maker_of.get(instr.inputs[0]) if over_all else None
        if split is not None and split.op == "split" and read[split.output.name] == 1:
            parts.setdefault(split.inputs[0], []).append((split, instr))
    normed: dict[str, tuple[Instr, Value]] = {}
    for name, pairs in parts.items():
        (q, q_norm), *rest = sorted(pairs, key=lambda pair: pair[0].attr("start"))
        kind = maker_of[name].output.type
        alike = len(rest) == 1 and q_norm.attrs == rest[0][1].attrs and rest[0][0].attr("start") == q.attr("stop")
        if not alike or q.attr("start") or rest[0][0].attr("stop") * 2 - q.attr("stop") != kind.width:
            continue
        value = Value(f"{name}.normed", kind)
        weights = (*q_norm.weights, *rest[0][1].weights)
        normed[name] = Instr("qk_norm", (name,), weights, q_norm.attrs, (value,)), value
    return replace(program, body=tuple(_with_normed_parts(body, normed, maker_of))) if normed else program


def _with_normed_parts(
    body: list[Instr], normed: Mapping[str, tuple[Instr, Value]], maker_of: Mapping[str, Instr]
) -> Iterator[Instr]:
    """The body with each qk_norm behind the value that it reads, and splits that make what the norms made."""
    for instr in body:
        cut = maker_of.get(instr.inputs[0]) if instr.op == "rms_norm" and instr.inputs else None
        if cut is not None and cut.op == "split" and cut.inputs[0] in normed:
            yield replace(cut, inputs=(normed[cut.inputs[0]][1].name,), outputs=instr.outputs)
        elif instr.op == "split" and instr.inputs[0] in normed:
            yield replace(instr, inputs=(normed[instr.inputs[0]][1].name,))
        else:
            yield instr
        if instr.outputs and instr.output.name in normed:
            yield normed[instr.output.name][0]
