"""The attentions of a Program: what layers that attend alike share, and which of them an instruction is of."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roofline.backends.cpu.lowered import AttentionKind, TurnedTable
from roofline.common.errors import UnsupportedError
from roofline.program.ir import Instr, KvGroup, Program, kv_group_of

# Queries are stored in 16 bits, filled up to a multiple of 16, where their float32 have a place.
_LEAST_HEAD, _MOST_HEAD = 8, 576


@dataclass(frozen=True)
class Attentions:
    """kinds: in the order of the first layer of each; numbers: result of an instruction -> the number of its attention,
    from 1; tables: names of the rope tables, in the order of the image; ropes: what these turn."""

    kinds: tuple[AttentionKind, ...]
    numbers: Mapping[str, int]
    tables: tuple[str, ...]
    ropes: tuple[TurnedTable, ...]


def attentions_of(program: Program) -> Attentions:
    """The attentions of a Program in which `lower.check` finds nothing to refuse.

    Raises UnsupportedError: heads that there are no kernels for.
    """
    for group in program.kv_groups.values():
        if group.layers and not _LEAST_HEAD <= group.head_dim <= _MOST_HEAD:
            reason = f"the cpu backend has attention over heads of {_LEAST_HEAD} to {_MOST_HEAD}"
            raise UnsupportedError(f"head_dim {group.head_dim}", reason, ["backend=reference"])
    pairs = [(before, attend) for before, attend in itertools.pairwise(program.body) if attend.op == "attend"]
    norms: dict[tuple[str, int, float], list[float]] = {}  # eps of the norms of heads in such attentions
    for before, attend in pairs:
        if before.weights:
            norms.setdefault(_sizes(attend), []).append(float(before.attr("eps")))
    kinds: list[AttentionKind] = []
    numbers: dict[str, int] = {}
    for before, attend in pairs:
        of_norm = norms.get(_sizes(attend), [0.0])  # where nothing is normed, any will do
        kind = _kind(program, attend, float(before.attr("eps")) if before.weights else of_norm[0])
        if kind not in kinds:
            kinds.append(kind)
        numbers |= dict.fromkeys((before.output.name, attend.output.name), kinds.index(kind) + 1)
    for instr in program.body:
        if instr.op == "qk_norm":
            numbers[instr.output.name] = _of_widths(program, instr, kinds)
    tables = program.tables.values()
    ropes = tuple(TurnedTable(table.dim, table.style == "interleaved") for table in tables)
    return Attentions(tuple(kinds), numbers, tuple(program.tables), ropes)


def _sizes(attend: Instr) -> tuple[str, int, float]:
    return kv_group_of(attend.inputs[1]), int(attend.attr("heads")), float(attend.attr("scale"))


def _kind(program: Program, attend: Instr, eps: float) -> AttentionKind:
    name, heads, scale = _sizes(attend)
    group: KvGroup = program.kv_groups[name]
    return AttentionKind(
        group=list(program.kv_groups).index(name),
        layers=group.layers,
        heads=heads,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        value_dim=group.value_dim,
        q_scale=float(np.float32(scale * math.log2(math.e))),
        eps=eps,
    )


def _of_widths(program: Program, norm: Instr, kinds: list[AttentionKind]) -> int:
    """The number of an attention that has as many columns of q and of k as a norm over all of them."""
    widths = [program.weights[name].shape[0] for name in norm.weights]
    sizes = [[kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim] for kind in kinds]
    return sizes.index(widths) + 1
