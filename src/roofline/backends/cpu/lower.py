"""Program -> the flat list of numbers that the C++ core runs: a record for each instruction.

native/records.h says which numbers operations have and in which order the fields of a record lie; both are read from
the native module.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import roofline._native as _native
from roofline.backends.cpu.layout import ImageLayout
from roofline.backends.cpu.lowered import Attention, Lowered
from roofline.backends.cpu.state_records import Ref, check_state, state_fields
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import registry
from roofline.ops.experts import routes_by_logits
from roofline.ops.symbol import Q_BYTES, Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program
from roofline.program.passes.plan import plan

# Op -> the core's operation for it; native/records.h has what each computes.
_OPERATIONS = {
    "embed": "embed",
    "rms_norm": "norm",
    "norm_quantize": "norm_quantise",
    "qk_norm": "qk_norm",
    "layer_norm": "layer_norm",
    "layer_norm_quantize": "layer_norm_quantise",
    "quantize_rows": "quantise",
    "linear": "linear",
    "linear_add": "linear",
    "linear_silu_mul": "linear_gated",
    "rope_kv_write": "rope_write",
    "qkv_write": "rope_write",  # without a table nothing is rotated
    "attend": "attend",
    "silu_mul": "gated",
    "silu_mul_quantize": "gated_quantise",
    "clamped_swiglu": "clamped_swiglu",
    "silu": "silu",
    "silu_quantize": "silu_quantise",
    "gelu_mul": "gelu_gated",
    "gelu_mul_quantize": "gelu_gated_quantise",
    "gelu": "gelu",
    "gelu_quantize": "gelu_quantise",
    "relu": "relu",
    "relu_quantize": "relu_quantise",
    "add": "add",
    "scale": "scale",
    "scale_by_position": "scale_by_position",
    "scale_columns": "scale_columns",
    "soft_cap": "soft_cap",
    "above_spread": "above_spread",
    "like_norm": "like_norm",
    "take_rows": "take_rows",
    "route": "route",
    "expert_linear": "expert_linear",
    "expert_bias": "expert_bias",
    "expert_scale": "expert_scale",
    "expert_linear_silu_mul": "expert_linear_gated",
    "combine": "combine",
    "sigmoid_scale": "sigmoid_scale",
    "mul": "mul",
    "mul_quantize": "mul_quantise",
    "sigmoid_mul": "sigmoid_gated",
    "sigmoid_mul_quantize": "sigmoid_gated_quantise",
    "causal_conv": "causal_conv",
    "delta_rule": "delta_rule",
    "selective_scan": "selective_scan",
    "cut_heads": "cut_heads",
    "join_heads": "join_heads",
    "adapter_down": "adapter_down",
    "adapter_up": "adapter_up",
    "all_reduce": "exchange",
    "all_gather": "exchange",
}
# Operation -> an attribute, and the operation where that is set.
_FORMS = {
    "gelu": ("tanh", "gelu_tanh"),
    "gelu_quantise": ("tanh", "gelu_tanh_quantise"),
    "gelu_gated": ("tanh", "gelu_tanh_gated"),
    "gelu_gated_quantise": ("tanh", "gelu_tanh_gated_quantise"),
    "gelu_apart": ("tanh", "gelu_tanh_apart"),
    "gelu_apart_quantise": ("tanh", "gelu_tanh_apart_quantise"),
    "relu": ("squared", "relu_squared"),
    "relu_quantise": ("squared", "relu_squared_quantise"),
    "rope_write": ("beta", "rope_write_scaled"),
}
# The same with gate and up as two values, with silu of the result, of heads by themselves, without a weight, or of
# heads that go round.
_APART = {"gated": "silu_apart", "gated_quantise": "silu_apart_quantise"}
_APART |= {"sigmoid_gated": "sigmoid_mul", "sigmoid_gated_quantise": "sigmoid_mul_quantise"}
_APART |= {"gelu_gated": "gelu_apart", "gelu_gated_quantise": "gelu_apart_quantise"}
_SILU = {"causal_conv": "causal_conv_silu"}
_BY_HEAD = {"norm": "norm_heads", "norm_quantise": "norm_heads_quantise"}
_BY_PART = {"norm_heads": "norm_parts", "norm_heads_quantise": "norm_parts_quantise"}
_BARE = {"norm": "norm_bare", "norm_quantise": "norm_bare_quantise", "norm_heads": "norm_heads_bare"}
_BARE |= {"norm_heads_quantise": "norm_heads_bare_quantise"}
_TILED = {"delta_rule": "delta_rule_tiled"}
# Op -> the attribute that its number is.
_FACTORS = {"scale": "factor", "soft_cap": "cap", "attend": "soft_cap", "clamped_swiglu": "limit", "above_spread": "z"}
# Queries are stored in 16 bits, filled up to a multiple of 16, where their float32 have a place.
_LEAST_HEAD, _MOST_HEAD = 8, 512
NONE: Ref = (-1, 0, 0, 0)
NO_KERNEL = (
    "the cpu backend has no kernel for it, and no pass rewrites it into ops that have one (docs/how-to/extending.md)"
)


def keep_operands(program: Program) -> Program:
    """The Program planned anew with some operands alive for longer than their last reader.

    Rows that are alone in their segment are rotated and written by the attention item that reads them, without a
    barrier in between: their q|k|v must not be overwritten by attend's own result. And a few rows are quantised by each
    thread for itself, again without a barrier: what they are made from must outlast the next instruction that has one.
    """
    source = {i.output.name: i.inputs[0] for i in program.body if _writes_pages(i)}
    body = []
    without_barrier: list[str] = []
    for instr in program.body:
        rotated = [source[name] for name in instr.inputs[:1] if instr.op == "attend" and name in source]  # see `check`
        body.append(replace(instr, inputs=(*instr.inputs, *rotated, *without_barrier)))
        without_barrier = [*without_barrier, *instr.inputs] if instr.makes_integers else []
    planned = plan(replace(program, body=tuple(body), plan=None))
    return replace(program, plan=planned.plan)


def _writes_pages(instr: Instr) -> bool:
    return any(value.type.dtype == "cache" for value in instr.outputs)


def check(program: Program) -> None:
    """Raises UnsupportedError on an instruction or attribute that the core does not compute."""
    if program.share.stages > 1:
        reason = "the cpu backend has no place for what a stage goes on from"
        raise UnsupportedError("a stage of a pipeline", reason, ["tensor_parallel", "backend=reference"])
    types, integers = program.types(), ""
    previous: Instr | None = None
    for instr in program.body:
        if instr.op not in _OPERATIONS:
            raise UnsupportedError(f"op {instr.op!r}", NO_KERNEL, sorted(_OPERATIONS))
        if instr.op == "attend":
            if instr.attr("soft_cap") and instr.attr("alibi"):
                raise UnsupportedError("attend with soft_cap and alibi", "the cpu backend has no kernel for both")
            if previous is None or not _writes_pages(previous):
                reason = "the cpu backend runs the two together"
                raise UnsupportedError("attend without rope_kv_write or qkv_write before it", reason)
        if instr.op == "embed" and instr.inputs[0] not in ("ids", "positions"):
            raise UnsupportedError(f"embed of {instr.inputs[0]}", "the cpu backend looks up ids and positions alone")
        if instr.has(Trait.GATED) and len(instr.inputs) != 1 and _OPERATIONS[instr.op] not in _APART:
            raise UnsupportedError(f"{instr.op} on two values", "the cpu backend takes gate and up side by side")
        check_state(program, instr)
        if instr.has(Trait.EXPERTS):
            pieces = program.weights[instr.weights[0]].pieces
            if len({(piece.stop - piece.start, piece.format) for piece in pieces}) > 1:
                raise UnsupportedError(
                    f"{instr.weights[0]}", "experts of a layer must be of one format on the cpu backend"
                )
        for name in instr.inputs:
            # A few rows are quantised by each thread for itself, into one place: the next that are made take it.
            if types[name].dtype in Q_BYTES and name != integers:
                reason = "the cpu backend keeps integer rows until the next ones are made"
                raise UnsupportedError(f"{instr.op} on {name} after {integers}", reason, ["quantize_rows once more"])
        if instr.makes_integers:
            integers = instr.output.name
        previous = instr


def lower(program: Program, layout: ImageLayout) -> Lowered:
    """A Program planned by `keep_operands`, for an image of that layout. Raises UnsupportedError as `check` does."""
    check(program)
    _check_positions(program, layout)
    assert program.plan is not None
    places, types = program.plan.places, program.types()
    offsets = ((name, place.offset) for name, place in places.items())
    refs = {name: (number, at.const, at.tokens, at.rows) for number, (name, at) in enumerate(offsets)}
    arena, record, tables = program.plan.arena, np.zeros(1, _record_type()), list(program.tables)
    return Lowered(
        code=np.concatenate([_record(program, instr, record, types, layout, refs, tables) for instr in program.body]),
        logits=refs[program.logits],
        arena=(arena.const, arena.tokens, arena.rows),
        attention=_attention(program),
        vocab=types[program.logits].width,
        table=layout.table,
        positions=layout.positions,
        matrix_bytes=layout.matrix_bytes,
        nbytes=layout.nbytes,
        exchanges=any(instr.exchanges for instr in program.body),
    )


def _check_positions(program: Program, layout: ImageLayout) -> None:
    """Raises ConfigError where a table of learned positions is shorter than what is to be served."""
    for instr in program.body:
        if instr.op == "embed" and instr.inputs[0] == "positions":
            rows = program.weights[instr.weights[0]].shape[0] + (instr.attr("first") or 0)
            if layout.positions > rows:
                what = f"{layout.positions:,} positions cannot be served: {instr.weights[0]} has {rows:,}"
                raise ConfigError(f"{what}; lower max_model_len")


def _operation(program: Program, instr: Instr, types: Mapping[str, Type], columns: int) -> str:
    """columns: of its matrix; an input of experts that is wider has a part for each of a row's."""
    if instr.op == "embed" and instr.inputs[0] == "positions":
        return "embed_positions"
    if instr.op == "embed" and instr.attr("one_row"):
        return "embed_one_row"
    if instr.op == "scale_columns" and program.weights[instr.weights[0]].shape == (1,):
        return "scale_weight"
    if instr.op == "attend" and not instr.attr("causal"):
        return "attend_both_ways"
    if instr.op == "attend" and instr.weights:
        return "attend_sinks"
    if instr.op == "rope_kv_write" and instr.attr("norm_last"):
        return "rope_write_normed"
    name = _OPERATIONS[instr.op]
    if instr.op == "join_heads" and instr.attr("shared"):
        return "join_heads_sharing"
    if instr.op == "route":
        return _routing(instr)
    if instr.op == "expert_linear" and types[instr.inputs[0]].width != columns:
        return "expert_linear_ranked"
    if name in _APART and len(instr.inputs) == 2:
        name = _APART[name]
    if name in _BY_HEAD:
        return _norm(program, instr, types, name)
    if name in _SILU and instr.attr("silu"):
        return _SILU[name]
    if instr.op == "selective_scan" and len(program.weights[instr.weights[0]].shape) == 2:
        return "selective_scan_rates"
    if name in _TILED and instr.attr("tiled"):
        return _TILED[name]
    attribute, form = _FORMS.get(name, ("", ""))
    return form if attribute and instr.attr(attribute) else name


def _routing(instr: Instr) -> str:
    """The operation of a route."""
    over_all = "" if instr.attr("renormalise") else "_all"
    if routes_by_logits(instr.attr("score"), instr.attr("groups"), instr.attr("scale"), bool(instr.weights)):
        return f"route{over_all}"
    if instr.attr("score") == "sigmoid" and instr.attr("groups") > 1 and instr.attr("group_score") == "best":
        reason = "groups of sigmoids are scored by their best two"
        raise UnsupportedError("groups of experts scored by their best sigmoid", reason, ["backend=reference"])
    by_best = instr.attr("groups") > 1 and instr.attr("group_score") == "best"
    return f"route_{'sigmoid' if instr.attr('score') == 'sigmoid' else 'scores'}{'_best' * by_best}{over_all}"


def _norm(program: Program, instr: Instr, types: Mapping[str, Type], name: str) -> str:
    """The operation of a norm: of the row or of heads, with a weight of one head, of the whole row, or without."""
    name = _BY_HEAD[name] if instr.attr("heads") != 1 else name
    if not instr.weights:
        return _BARE[name]
    of_row = program.weights[instr.weights[0]].shape == (types[instr.inputs[0]].width,)
    return _BY_PART.get(name, name) if of_row else name


def _attention(program: Program) -> Attention:
    (group,) = program.kv_groups.values()
    tables = list(program.tables.values())
    if group.layers == 0:  # a model of recurrent state alone
        none = dict.fromkeys(("layers", "heads", "kv_heads", "head_dim", "tables", "rotated"), 0)
        return Attention(**none, interleaved=False, q_scale=0.0, eps=0.0)
    if not _LEAST_HEAD <= group.head_dim <= _MOST_HEAD:
        reason = f"the cpu backend has attention over heads of {_LEAST_HEAD} to {_MOST_HEAD}"
        raise UnsupportedError(f"head_dim {group.head_dim}", reason, ["backend=reference"])
    if len({(table.style, table.dim) for table in tables}) > 1:
        raise UnsupportedError(
            "rope tables of several styles or widths", "the cpu backend has one of each for all layers"
        )
    writes = [i for i in program.body if i.op == "rope_kv_write" or (i.op == "qkv_write" and i.weights)]
    attends = [i for i in program.body if i.op == "attend"]
    return Attention(
        layers=group.layers,
        heads=_shared(attends, "heads"),
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        tables=len(tables),
        rotated=tables[0].dim if tables else 0,
        interleaved=bool(tables) and tables[0].style == "interleaved",
        q_scale=float(np.float32(_shared(attends, "scale") * math.log2(math.e))),
        eps=float(_shared(writes, "eps")) if writes else 0.0,
    )


def _shared(instrs: list[Instr], name: str) -> Any:
    """The attribute of instructions that must agree on it."""
    values = {instr.attr(name) for instr in instrs}
    if len(values) > 1:
        raise UnsupportedError(f"layers with different {name} of attention", "the cpu backend has one for all of them")
    return values.pop()


def _record_type() -> np.dtype[np.void]:
    """The layout of a record. numpy would read the shape in a format like "(4,)<i8" with `ast`, which fails in Python
    3.11 when two threads do so at once."""
    formats = [(name, *text.rpartition(")")[::2]) for name, text in _native.record_fields()]
    return np.dtype([(name, number, (4,) if shape else ()) for name, shape, number in formats])


def _record(
    program: Program,
    instr: Instr,
    empty: np.ndarray,
    types: Mapping[str, Type],
    layout: ImageLayout,
    refs: Mapping[str, Ref],
    tables: Sequence[str],
) -> np.ndarray:
    """int64: the instruction's record, a filled copy of `empty`, and its matrix's pieces (native/records.h).

    tables: names of the rope tables, in the order of the image.
    """
    first = instr.weights[0] if instr.weights else ""
    pieces = layout.matrices.get(first, ())
    columns = pieces[0].columns if pieces else 0
    operation, out = _operation(program, instr, types, columns), types[instr.output.name]
    product, writes = instr.has(Trait.PRODUCT, Trait.EXPERTS), _writes_pages(instr)
    adapts = "group" in instr.attrs and operation.startswith("adapter")
    inputs = types[instr.inputs[0]].width if product or writes or adapts else out.width
    fields: dict[str, object] = {
        "operation": _native.operations().index(operation),
        "over_rows": out.leading == "rows",
        "digits": Q_BYTES.get((types[instr.inputs[0]] if product else out).dtype, 1),
        "x": refs.get(instr.inputs[0], NONE),
        "y": refs[instr.output.name],
        "residual": next((refs[name] for name in instr.inputs[1:] if name in refs), NONE),
        "width": inputs,
        "stride": inputs if writes else out.width,
        "weight": _table(instr, layout),
        "bias": -1,
        "layer": instr.attrs.get("first" if instr.op == "embed" else "group" if adapts else "layer") or 0,
        "q_norm": -1,
        "k_norm": -1,
        "pieces": len(pieces),
    }
    fields |= _expert_fields(instr, types, columns, refs) | _head_fields(instr, types)
    fields |= state_fields(program, instr, types, refs)
    if operation == "exchange":  # the core needs no scratch for such rows
        fields |= {"width": 0, "stride": 0}
    if instr.op in _FACTORS:
        fields["eps"] = instr.attr(_FACTORS[instr.op])
    fields |= _weight_fields(instr, layout, tables)
    record = empty.copy()
    for name, value in fields.items():
        record[name] = value
    numbers = [getattr(piece, name) for piece in pieces for name, _ in _native.piece_fields()]
    return np.concatenate([record.view(np.int64), np.array(numbers, np.int64)])


def _weight_fields(instr: Instr, layout: ImageLayout, tables: Sequence[str]) -> dict[str, object]:
    """Where weights that are no matrices lie, and the numbers that belong to them."""
    places = [layout.vectors.get(name, -1) for name in instr.weights]
    if instr.op == "attend":
        return {"width": instr.attr("window"), "bias": places[0] if places else -1}
    if _writes_pages(instr):
        table = instr.attrs.get("table")
        norms = dict(zip(("q_norm", "k_norm"), places, strict=False))
        return {"width": -1 if table is None else tables.index(table), **norms}
    fields: dict[str, object] = dict(zip(("weight", "bias", "q_norm"), places, strict=False))
    first = instr.weights[0] if instr.weights else ""
    if first not in layout.matrices and "eps" in registry.get(instr.op).attributes:
        fields["eps"] = instr.attr("eps")
    return fields


def _table(instr: Instr, layout: ImageLayout) -> int:
    """The place of what an instruction reads by head or by position, -1: none."""
    if instr.op == "attend" and instr.attr("alibi"):
        return layout.slopes
    return layout.factors if instr.attrs.get("beta") else -1


def _expert_fields(instr: Instr, types: Mapping[str, Type], columns: int, refs: Mapping[str, Ref]) -> dict[str, object]:
    """What operations of experts have in fields of other names, how many a row goes to and which; others have none."""
    if instr.op == "route":
        top = types[instr.outputs[0].name].width
        fields: dict[str, object] = {"width": types[instr.inputs[0]].width, "layer": top}
        fields["residual"] = refs[instr.outputs[1].name]
        if _routing(instr) not in ("route", "route_all"):
            fields |= {"digits": instr.attr("kept_groups"), "stride": instr.attr("groups"), "eps": instr.attr("scale")}
        return fields
    if instr.op == "combine":
        return {"layer": types[instr.inputs[1]].width}
    if instr.op == "expert_scale":
        return {"layer": types[instr.inputs[1]].width, "stride": instr.attr("experts")}
    if instr.op == "expert_bias":
        top, experts = types[instr.inputs[1]].width, instr.attr("experts")
        return {"layer": top, "width": types[instr.output.name].width // top, "stride": experts}
    return {"layer": types[instr.inputs[1]].width, "width": columns} if instr.has(Trait.EXPERTS) else {}


def _head_fields(instr: Instr, types: Mapping[str, Type]) -> dict[str, object]:
    """What operations on heads have in fields of other names; others have none."""
    if _OPERATIONS[instr.op] in _BY_HEAD:
        return {"layer": instr.attr("heads")} if instr.attr("heads") != 1 else {}
    moves = {"stride": types[instr.inputs[0]].width, "layer": instr.attrs.get("heads")}
    if instr.op == "cut_heads":
        return {**moves, "digits": instr.attr("start")}
    return moves if instr.op == "join_heads" else {}
