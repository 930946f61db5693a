"""Program -> the flat list of numbers that the C++ core runs.

Each operation is one record: code, leading symbol, references to values in the arena, sizes, places of weights in the
image (-1: none). The order of the fields is `Executable::parse` in native/executable.cpp.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum

import numpy as np

from roofline.backends.cpu.layout import Layout
from roofline.backends.cpu.lowered import Attention, Lowered
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops.registry import Trait
from roofline.ops.symbol import Q_BYTES, Type
from roofline.program.ir import Instr, Program
from roofline.program.passes.plan import plan


class Code(IntEnum):
    """Operations of the core (enum class Code in native/executable.h)."""

    EMBED = 0
    NORM = 1
    NORM_QUANTISE = 2
    QUANTISE = 3
    LINEAR = 4
    ROPE_WRITE = 5
    ATTEND = 6
    GATED = 7
    GATED_QUANTISE = 8
    TAKE_ROWS = 9
    LINEAR_GATED = 10
    EMBED_POSITIONS = 11
    ADD = 12
    LAYER_NORM = 13
    LAYER_NORM_QUANTISE = 14
    GELU = 15
    GELU_QUANTISE = 16
    GELU_TANH = 17
    GELU_TANH_QUANTISE = 18
    EXCHANGE = 19


CODES = {
    "embed": Code.EMBED,
    "rms_norm": Code.NORM,
    "norm_quantize": Code.NORM_QUANTISE,
    "layer_norm": Code.LAYER_NORM,
    "layer_norm_quantize": Code.LAYER_NORM_QUANTISE,
    "quantize_rows": Code.QUANTISE,
    "linear": Code.LINEAR,
    "linear_add": Code.LINEAR,
    "linear_silu_mul": Code.LINEAR_GATED,
    "rope_kv_write": Code.ROPE_WRITE,
    "qkv_write": Code.ROPE_WRITE,  # without a table nothing is rotated
    "attend": Code.ATTEND,
    "silu_mul": Code.GATED,
    "silu_mul_quantize": Code.GATED_QUANTISE,
    "gelu": Code.GELU,
    "gelu_quantize": Code.GELU_QUANTISE,
    "add": Code.ADD,
    "take_rows": Code.TAKE_ROWS,
    "all_reduce": Code.EXCHANGE,
    "all_gather": Code.EXCHANGE,
}
TANH = {Code.GELU: Code.GELU_TANH, Code.GELU_QUANTISE: Code.GELU_TANH_QUANTISE}
NONE = (-1, 0, 0, 0)
NO_KERNEL = (
    "the cpu backend has no kernel for it, and no pass rewrites it into ops that have one (docs/how-to/extending.md)"
)


def keep_operands(program: Program) -> Program:
    """The Program planned anew with some operands alive for longer than their last reader.

    Rows that are alone in their segment are rotated and written by the attention item that reads them, without a
    barrier in between: their q|k|v must not be overwritten by attend's own result. And a few rows are quantised by each
    thread for itself, again without a barrier: what they are made from must outlast the next instruction that has one.
    """
    source = {i.output.name: i.inputs[0] for i in program.body if i.writes_cache}
    body = []
    without_barrier: list[str] = []
    for instr in program.body:
        kept = [source[instr.inputs[0]]] if instr.op == "attend" else []
        body.append(replace(instr, inputs=(*instr.inputs, *kept, *without_barrier)))
        without_barrier = [*without_barrier, instr.inputs[0]] if instr.makes_integers else []
    planned = plan(replace(program, body=tuple(body), plan=None))
    return replace(program, plan=planned.plan)


def check(program: Program) -> None:
    """Raises UnsupportedError on an instruction or attribute that the core does not compute."""
    if program.share.stages > 1:
        reason = "the cpu backend has no place for what a stage goes on from"
        raise UnsupportedError("a stage of a pipeline", reason, ["tensor_parallel", "backend=reference"])
    types, integers = program.types(), ""
    previous: Instr | None = None
    for instr in program.body:
        if instr.op not in CODES:
            raise UnsupportedError(f"op {instr.op!r}", NO_KERNEL, sorted(CODES))
        if instr.op == "attend":
            if instr.attr("soft_cap"):
                raise UnsupportedError("attend with soft_cap", "the cpu backend has no kernel for it")
            if previous is None or not previous.writes_cache:
                reason = "the cpu backend runs the two together"
                raise UnsupportedError("attend without rope_kv_write or qkv_write before it", reason)
        if instr.op == "embed" and instr.inputs[0] not in ("ids", "positions"):
            raise UnsupportedError(f"embed of {instr.inputs[0]}", "the cpu backend looks up ids and positions alone")
        if instr.has(Trait.GATED) and len(instr.inputs) != 1:
            raise UnsupportedError(f"{instr.op} on two values", "the cpu backend takes gate and up side by side")
        for name in instr.inputs:
            # A few rows are quantised by each thread for itself, into one place: the next that are made take it.
            if types[name].dtype in Q_BYTES and name != integers:
                reason = "the cpu backend keeps integer rows until the next ones are made"
                raise UnsupportedError(f"{instr.op} on {name} after {integers}", reason, ["quantize_rows once more"])
        if types[instr.output.name].dtype in Q_BYTES:
            integers = instr.output.name
        previous = instr


def lower(program: Program, layout: Layout) -> Lowered:
    """A Program planned by `keep_operands`, for an image of that layout. Raises UnsupportedError as `check` does."""
    check(program)
    _check_positions(program, layout)
    assert program.plan is not None
    places, types = program.plan.places, program.types()
    ids = {name: number for number, name in enumerate(places)}
    code: list[int] = []

    def ref(name: str) -> tuple[int, int, int, int]:
        offset = places[name].offset
        return ids[name], offset.const, offset.tokens, offset.rows

    for instr in program.body:
        over_rows = types[instr.output.name].leading == "rows"
        code += [_code(instr), int(over_rows), _digits(instr, types)]
        code += ref(instr.inputs[0]) if instr.op != "embed" else NONE
        code += ref(instr.output.name)
        code += next((ref(name) for name in instr.inputs[1:] if name in places), NONE)  # what is added
        code += _sizes(instr, types)
        code += _weights(instr, layout)
    arena = program.plan.arena
    return Lowered(
        code=np.array(code, np.int64),
        logits=ref(program.logits),
        arena=(arena.const, arena.tokens, arena.rows),
        attention=_attention(program),
        vocab=types[program.logits].width,
        table=layout.table,
        positions=layout.positions,
        matrix_bytes=layout.matrix_bytes,
        nbytes=layout.nbytes,
    )


def _check_positions(program: Program, layout: Layout) -> None:
    """Raises ConfigError where a table of learned positions is shorter than what is to be served."""
    for instr in program.body:
        if instr.op == "embed" and instr.inputs[0] == "positions":
            rows = program.weights[instr.weights[0]].shape[0]
            if layout.positions > rows:
                what = f"{layout.positions:,} positions cannot be served: {instr.weights[0]} has {rows:,}"
                raise ConfigError(f"{what}; lower max_model_len")


def _code(instr: Instr) -> Code:
    code = CODES[instr.op]
    if instr.op == "embed" and instr.inputs[0] == "positions":
        return Code.EMBED_POSITIONS
    return TANH[code] if code in TANH and instr.attr("tanh") else code


def _attention(program: Program) -> Attention:
    (group,) = program.kv_groups.values()
    table = next(iter(program.tables.values()), None)
    if group.head_dim % 16 or group.head_dim > 512:
        raise UnsupportedError(f"head_dim {group.head_dim}", "the cpu backend needs a multiple of 16 up to 512")
    write = next(i for i in program.body if i.writes_cache)
    attend = next(i for i in program.body if i.op == "attend")
    return Attention(
        layers=group.layers,
        heads=int(attend.attr("heads")),
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        window=int(group.window),
        interleaved=table is not None and table.style == "interleaved",
        q_scale=float(np.float32(attend.attr("scale") * math.log2(math.e))),
        eps=float(write.attr("eps")) if write.op == "rope_kv_write" else 0.0,
    )


def _digits(instr: Instr, types: Mapping[str, Type]) -> int:
    """Bytes an integer activation has, in what the instruction reads or makes."""
    read = instr.inputs[0] if instr.has(Trait.PRODUCT) else instr.output.name
    return Q_BYTES.get(types[read].dtype, 1)


def _sizes(instr: Instr, types: Mapping[str, Type]) -> list[int]:
    """width (inputs of a row) and stride (columns of the result, or of q|k|v)."""
    out = types[instr.output.name].width
    if CODES[instr.op] == Code.EXCHANGE:  # the core needs no scratch for such rows
        return [0, 0]
    if instr.has(Trait.PRODUCT) or instr.writes_cache:
        inputs = types[instr.inputs[0]].width
        return [inputs, inputs if instr.writes_cache else out]
    return [out, out]


def _weights(instr: Instr, layout: Layout) -> list[int]:
    """norm weight (or attention's slopes), bias, eps, layer (or an embedding's first id), q_norm, k_norm, pieces of a
    matrix."""
    matrix = bool(instr.weights) and instr.weights[0] in layout.matrices
    norms = bool(instr.weights) and not matrix and not instr.writes_cache
    norm = layout.vectors[instr.weights[0]] if norms else -1
    if instr.op == "attend" and instr.attr("alibi"):
        norm = layout.slopes
    bias = layout.vectors[instr.weights[1]] if (matrix or norms) and len(instr.weights) > 1 else -1
    eps = float(instr.attr("eps")) if norms else 0.0
    layer = int(instr.attrs.get("first") or 0) if instr.op == "embed" else int(instr.attrs.get("layer", 0))
    q_norm, k_norm = -1, -1
    if instr.op == "rope_kv_write" and instr.weights:
        q_norm, k_norm = (layout.vectors[name] for name in instr.weights)
    pieces = layout.matrices[instr.weights[0]] if matrix else ()
    numbers = [norm, bias, struct.unpack("<q", struct.pack("<d", eps))[0], layer, q_norm, k_norm, len(pieces)]
    for piece in pieces:
        numbers += [piece.format, piece.address, piece.rows, piece.columns, piece.start]
    return numbers
