"""Program -> the flat list of numbers that the C++ core runs: a record for each instruction.

native/records.h says which numbers operations have and in which order the fields of a record lie; both are read from
the native module.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

import roofline._native as _native
from roofline.backends.cpu.attentions import Attentions, attentions_of
from roofline.backends.cpu.layout import ImageLayout
from roofline.backends.cpu.lowered import Lowered
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import registry
from roofline.ops.experts import routes_by_logits
from roofline.ops.state import COLUMNS, MATRIX
from roofline.ops.symbol import Q_BYTES, Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, kv_group_of
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
    "rope_latent_write": "rope_write",  # the attention says that there are no values
    "qkv_write": "rope_write",  # without a table nothing is rotated
    "rope_queries": "rope_queries",
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
    "soft_cap": "soft_cap",
    "take_rows": "take_rows",
    "route": "route",
    "expert_linear": "expert_linear",
    "head_linear": "head_linear",
    "expert_bias": "expert_bias",
    "expert_linear_silu_mul": "expert_linear_gated",
    "combine": "combine",
    "sigmoid_scale": "sigmoid_scale",
    "mul": "mul",
    "mul_quantize": "mul_quantise",
    "sigmoid_mul": "sigmoid_gated",
    "sigmoid_mul_quantize": "sigmoid_gated_quantise",
    "causal_conv": "causal_conv",
    "delta_rule": "delta_rule",
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
    "relu": ("squared", "relu_squared"),
    "relu_quantise": ("squared", "relu_squared_quantise"),
    "rope_write": ("beta", "rope_write_scaled"),
    "rope_queries": ("beta", "rope_queries_scaled"),
}
# The same with gate and up as two values, with silu of the result, of heads by themselves or that go round.
_APART = {"gated": "silu_apart", "gated_quantise": "silu_apart_quantise"}
_APART |= {"sigmoid_gated": "sigmoid_mul", "sigmoid_gated_quantise": "sigmoid_mul_quantise"}
_SILU = {"causal_conv": "causal_conv_silu"}
_BY_HEAD = {"norm": "norm_heads", "norm_quantise": "norm_heads_quantise"}
_TILED = {"delta_rule": "delta_rule_tiled"}
# Op -> the attribute that its number is.
_FACTORS = {"scale": "factor", "soft_cap": "cap", "attend": "soft_cap", "clamped_swiglu": "limit"}
# Op -> the part of its layer's state that it reads and writes.
_PARTS = {"causal_conv": COLUMNS, "delta_rule": MATRIX}
_MOST_TAPS, _MOST_STATE_HEADS = 16, 1 << 14
Ref = tuple[int, int, int, int]
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
    source = {i.output.name: i.inputs[0] for i in program.body if _makes_queries(i)}
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


def _makes_queries(instr: Instr) -> bool:
    """Whether the attend behind an instruction reads its result as the core stores queries."""
    return _writes_pages(instr) or instr.op == "rope_queries"


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
            if previous is None or not _makes_queries(previous):
                reason = "the cpu backend runs the two together"
                raise UnsupportedError("attend without rope_kv_write or qkv_write before it", reason)
        if instr.op == "embed" and instr.inputs[0] not in ("ids", "positions"):
            raise UnsupportedError(f"embed of {instr.inputs[0]}", "the cpu backend looks up ids and positions alone")
        if instr.has(Trait.GATED) and len(instr.inputs) != 1 and _OPERATIONS[instr.op] not in _APART:
            raise UnsupportedError(f"{instr.op} on two values", "the cpu backend takes gate and up side by side")
        _check_state(program, instr)
        if instr.has(Trait.EXPERTS, Trait.HEAD_PRODUCT):
            pieces = program.weights[instr.weights[0]].pieces
            if len({(piece.stop - piece.start, piece.format) for piece in pieces}) > 1:
                raise UnsupportedError(
                    f"{instr.weights[0]}", "experts and heads of a layer must be of one format on the cpu backend"
                )
        for name in instr.inputs:
            # A few rows are quantised by each thread for itself, into one place: the next that are made take it.
            if types[name].dtype in Q_BYTES and name != integers:
                reason = "the cpu backend keeps integer rows until the next ones are made"
                raise UnsupportedError(f"{instr.op} on {name} after {integers}", reason, ["quantize_rows once more"])
        if instr.makes_integers:
            integers = instr.output.name
        previous = instr


def _check_state(program: Program, instr: Instr) -> None:
    """Raises UnsupportedError on an op with state of a size that has no kernel."""
    if instr.op == "causal_conv" and program.weights[instr.weights[0]].shape[1] > _MOST_TAPS:
        taps = program.weights[instr.weights[0]].shape[1]
        raise UnsupportedError(
            f"causal_conv over {taps} tokens", f"the cpu backend has kernels for {_MOST_TAPS} at most"
        )
    if instr.op == "delta_rule" and instr.attr("value_heads") > _MOST_STATE_HEADS:
        reason = f"the cpu backend has kernels for {_MOST_STATE_HEADS} at most"
        raise UnsupportedError(f"delta_rule with {instr.attr('value_heads')} heads", reason)


def lower(program: Program, layout: ImageLayout) -> Lowered:
    """A Program planned by `keep_operands`, for an image of that layout. Raises UnsupportedError as `check` does."""
    check(program)
    _check_positions(program, layout)
    assert program.plan is not None
    places, types = program.plan.places, program.types()
    offsets = ((name, place.offset) for name, place in places.items())
    refs = {name: (number, at.const, at.tokens, at.rows) for number, (name, at) in enumerate(offsets)}
    arena, record, attentions = program.plan.arena, np.zeros(1, _record_type()), attentions_of(program)
    records = [_record(program, instr, record, types, layout, refs, attentions) for instr in program.body]
    return Lowered(
        code=np.concatenate(records),
        logits=refs[program.logits],
        arena=(arena.const, arena.tokens, arena.rows),
        attentions=attentions.kinds,
        tables=attentions.ropes,
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


def _operation(instr: Instr, types: Mapping[str, Type], columns: int) -> str:
    """columns: of its matrix; an input of experts that is wider has a part for each of a row's."""
    if instr.op == "embed" and instr.inputs[0] == "positions":
        return "embed_positions"
    if instr.op == "embed" and instr.attr("one_row"):
        return "embed_one_row"
    if instr.op == "attend" and not instr.attr("causal"):
        return "attend_both_ways"
    if instr.op == "attend" and instr.weights:
        return "attend_sinks"
    name = _OPERATIONS[instr.op]
    if instr.attrs.get("norm_last"):
        return f"{name}_normed"
    if instr.op == "join_heads" and instr.attr("shared"):
        return "join_heads_sharing"
    if instr.op == "route":
        return _routing(instr)
    if instr.op == "expert_linear" and types[instr.inputs[0]].width != columns:
        return "expert_linear_ranked"
    if name in _APART and len(instr.inputs) == 2:
        return _APART[name]
    if name in _BY_HEAD and instr.attr("heads") != 1:
        return _BY_HEAD[name]
    if name in _SILU and instr.attr("silu"):
        return _SILU[name]
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
    attentions: Attentions,
) -> np.ndarray:
    """int64: the instruction's record, a filled copy of `empty`, and its matrix's pieces (native/records.h)."""
    first = instr.weights[0] if instr.weights else ""
    pieces = layout.matrices.get(first, ())
    columns = pieces[0].columns if pieces else 0
    operation, out = _operation(instr, types, columns), types[instr.output.name]
    product, writes = instr.has(Trait.PRODUCT, Trait.EXPERTS, Trait.HEAD_PRODUCT), _makes_queries(instr)
    adapts = "group" in instr.attrs and operation.startswith("adapter")
    inputs = types[instr.inputs[0]].width if product or writes or adapts else out.width
    fields: dict[str, object] = {
        "operation": _native.operations().index(operation),
        "over_rows": out.leading == "rows",
        "digits": attentions.numbers.get(
            instr.output.name, Q_BYTES.get((types[instr.inputs[0]] if product else out).dtype, 1)
        ),
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
    fields |= _expert_fields(instr, types, columns, refs) | _head_fields(instr, types, columns)
    fields |= _state_fields(program, instr, types, refs)
    if operation == "exchange":  # the core needs no scratch for such rows
        fields |= {"width": 0, "stride": 0}
    if instr.op in _FACTORS:
        fields["eps"] = instr.attr(_FACTORS[instr.op])
    fields |= _weight_fields(instr, layout, attentions.tables)
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
    if _makes_queries(instr):
        table = instr.attrs.get("table")
        norms = dict(zip(("q_norm", "k_norm"), places, strict=False))
        return {"width": -1 if table is None else tables.index(table), **norms}
    fields: dict[str, object] = dict(zip(("weight", "bias"), places, strict=False))
    if instr.weights and instr.weights[0] not in layout.matrices and "eps" in registry.get(instr.op).attributes:
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
    if instr.op == "expert_bias":
        top, experts = types[instr.inputs[1]].width, instr.attr("experts")
        return {"layer": top, "width": types[instr.output.name].width // top, "stride": experts}
    return {"layer": types[instr.inputs[1]].width, "width": columns} if instr.has(Trait.EXPERTS) else {}


def _head_fields(instr: Instr, types: Mapping[str, Type], columns: int) -> dict[str, object]:
    """What operations on heads have in fields of other names; others have none. columns: of each head's matrix."""
    if _OPERATIONS[instr.op] in _BY_HEAD:
        return {"layer": instr.attr("heads")} if instr.attr("heads") != 1 else {}
    if instr.op == "head_linear":
        return {"layer": instr.attr("heads"), "width": columns}
    moves = {"stride": types[instr.inputs[0]].width, "layer": instr.attrs.get("heads")}
    if instr.op == "cut_heads":
        return {**moves, "digits": instr.attr("start")}
    return moves if instr.op == "join_heads" else {}


def _state_fields(
    program: Program, instr: Instr, types: Mapping[str, Type], refs: Mapping[str, Ref]
) -> dict[str, object]:
    """What operations with recurrent state have in fields of other names; others have none."""
    if instr.op not in _PARTS:
        return {}
    place = _place_of(program, instr, _PARTS[instr.op])
    if instr.op == "causal_conv":
        return {"layer": place, "stride": program.weights[instr.weights[0]].shape[1]}
    _, base, per_token, per_row = refs[instr.inputs[2]]
    assert per_row == 0, "values of tokens lie before those of rows"
    heads = instr.attr("key_heads") << 16 | instr.attr("value_heads")
    places = {"q_norm": base, "k_norm": per_token}  # of b
    return {"layer": place, "digits": heads, "stride": types[instr.inputs[0]].width, **places}


def _place_of(program: Program, instr: Instr, name: str) -> int:
    """Floats before a part of the instruction's layer in a slot of its store."""
    group = program.state_groups[kv_group_of(next(v.name for v in instr.outputs if v.type.stored))]
    at = instr.attr("layer") * group.layer_values
    for part, shape in group.parts:
        if part == name:
            return at
        at += math.prod(shape)
    raise UnsupportedError(f"{instr.op} without a part {name!r} of its state", "its layers keep other parts")
