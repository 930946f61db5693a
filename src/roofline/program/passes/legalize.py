"""legalize: make a target's numeric choices visible, so that the reference computes the same arithmetic.

Linears, and those of experts and of heads, on quantised weights get integer rows from `quantize_rows` (once for each
value, however many linears read it); every op with more than one possible rounding gets its order; attend and kv_write
get the dtypes they round to.
"""

from dataclasses import replace
from typing import NoReturn

from roofline.common.errors import UnsupportedError
from roofline.ops.registry import get
from roofline.ops.symbol import Q8_GROUP, Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, KvGroup, Program, Recipe, Value
from roofline.program.passes.rewrite import makers
from roofline.program.target import Target

_NAMED = 4  # tensors that an error names


def legalize(program: Program, target: Target) -> Program:
    """The Program in the target's arithmetic. Raises UnsupportedError on a weight that mixes float and quantised."""
    program = _rounded(program, target.activations)
    types, logits = program.types(), _towards_logits(program)
    rows_of: dict[tuple[str, str], Value] = {}  # (value, order) -> its integer rows
    body: list[Instr] = []
    for instr in program.body:
        order = target.logits_order if instr.output.name in logits else target.quantised_order
        product = _is_product(instr)
        if product and _quantised(program, instr) and order is not None:
            source = instr.inputs[0]
            if (source, order) not in rows_of:
                kind, bits = types[source], int(order[1:].partition("g")[0])
                rows = Value(f"{source}.q{bits}", Type(order, kind.leading, kind.trailing))
                width = {"group": Q8_GROUP} | ({} if bits == 8 else {"bits": bits})
                body.append(Instr("quantize_rows", (source,), (), width, (rows,)))
                rows_of[source, order] = rows
            attrs = {**instr.attrs, "order": order}
            body.append(replace(instr, inputs=(rows_of[source, order].name, *instr.inputs[1:]), attrs=attrs))
        else:
            rows8 = target.rows8 if instr.op == "linear" and _float8(program, instr) else ""
            body.append(replace(instr, attrs=_choices(instr, target) | ({"x_dtype": rows8} if rows8 else {})))
    matrices = {name for instr in program.body if instr.has(Trait.SPLITS) for name in instr.weights}
    weights = {
        name: replace(recipe, layout=_layout(recipe, target, name in matrices))
        for name, recipe in program.weights.items()
    }
    groups = _groups(program, target)
    return replace(program, body=tuple(body), weights=weights, kv_groups=groups, target=target.name)


def _is_product(instr: Instr) -> bool:
    """Whether it reads the rows that a target's products take."""
    return instr.op == "linear" or instr.has(Trait.EXPERTS, Trait.HEAD_PRODUCT)


def _layout(recipe: Recipe, target: Target, is_matrix: bool) -> str:
    """is_matrix: something multiplies with the weight, or looks rows of it up."""
    return target.matrix_layout if is_matrix and len(recipe.shape) == 2 else target.vector_layout


def _rounded(program: Program, activations: str) -> Program:
    """Rows between linears in 16 bits, where the target has them so: what a linear reads and writes, but the logits.

    Sums of layers stay float32, and so does what goes from one norm or rope straight into another.
    """
    if activations == "f32":
        return program
    logits = _towards_logits(program)
    read_narrow = {name for i in program.body if not i.has(Trait.READS_WIDE) for name in i.inputs}
    types = {value.name: value.type for value in program.inputs}
    body: list[Instr] = []
    for instr in program.body:
        name, attrs = instr.output.name, dict(instr.attrs)
        product = _is_product(instr)
        rounded = product or name in read_narrow
        if instr.has(Trait.ROUNDED) and name not in logits and rounded:
            attrs["out"] = activations
        for place, dtype in _casts(instr, [types[value] for value in instr.inputs], activations):
            instr, cast = _cast_before(instr, place, types[instr.inputs[place]], dtype)
            if cast.output.name not in types:
                types[cast.output.name] = cast.output.type
                body.append(cast)
        kinds = get(instr.op).results((types[i] for i in instr.inputs), program.weight_types(instr), attrs)
        outputs = tuple(Value(v.name, kind) for v, kind in zip(instr.outputs, kinds, strict=True))
        types |= {value.name: value.type for value in outputs}
        body.append(replace(instr, attrs=attrs, outputs=outputs))
    return replace(program, body=tuple(body))


def _casts(instr: Instr, kinds: list[Type], activations: str) -> list[tuple[int, str]]:
    """(place among its values, dtype) of what is cast for an instruction: rows for a product, and of values that go
    side by side the narrow ones where another one is wide."""
    if _is_product(instr):
        return [(0, activations)] if kinds[0].dtype == "f32" else []
    wide = instr.has(Trait.HEAD_MOVE) and any(kind.dtype == "f32" for kind in kinds)
    return [(place, "f32") for place, kind in enumerate(kinds) if wide and kind.dtype != "f32"]


def _cast_before(instr: Instr, place: int, kind: Type, dtype: str) -> tuple[Instr, Instr]:
    """The instruction reading `x.bf16` in the place of x, and the cast that makes it of x."""
    source = instr.inputs[place]
    value = Value(f"{source}.{dtype}", replace(kind, dtype=dtype))
    cast = Instr("cast", (source,), (), {"dtype": dtype}, (value,))
    return replace(instr, inputs=(*instr.inputs[:place], value.name, *instr.inputs[place + 1 :])), cast


def recast_cache(program: Program, target: Target) -> Program:
    """A Program after any pass, with the KV cache as `target` has it: what legalising for that target would have made.

    Nothing else in a Program depends on the cache's format, so a bundle serves all of them.
    """
    body = []
    for instr in program.body:
        attrs = dict(instr.attrs)
        if "kv_dtype" in attrs:
            attrs["kv_dtype"] = target.attend_dtypes["kv_dtype"]
        if instr.op == "attend":
            attrs["order"] = target.orders["attend"]
        body.append(replace(instr, attrs=attrs))
    return replace(program, body=tuple(body), kv_groups=_groups(program, target))


def _towards_logits(program: Program) -> set[str]:
    """Return the value that the linear of the logits makes, what caps or scales make of it, and, on one of several
    ranks, what all parts make together."""
    maker_of, name = makers(program.body), program.logits
    names = {name}
    while (maker := maker_of[name]).op == "all_gather" or (maker.has(Trait.BY_COLUMN) and len(maker.inputs) == 1):
        name = maker.inputs[0]
        names.add(name)
    return names


def _groups(program: Program, target: Target) -> dict[str, KvGroup]:
    format = target.attend_dtypes.get("kv_dtype", "f32")
    return {name: replace(group, format=format) for name, group in program.kv_groups.items()}


def _quantised(program: Program, instr: Instr) -> bool:
    recipe = program.weights[instr.weights[0]]
    if recipe.type.mixed:
        _refuse_mixed(instr.weights[0], recipe)
    return recipe.type.quantised


def _refuse_mixed(weight: str, recipe: Recipe) -> NoReturn:
    """Raise the UnsupportedError that names the tensors of the format that fewer of them have."""
    tensors: dict[str, list[str]] = {}
    for piece in recipe.pieces:
        tensors.setdefault(piece.format, []).append(piece.tensor)
    (rare, names), (usual, _) = sorted(tensors.items(), key=lambda entry: len(entry[1]))[:2]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    reason = f"{', '.join(names[:_NAMED])}{more} are in {rare}, what is multiplied with them in {usual}"
    alternatives = ("a file with all of them in one format", "the model in 16 bits, and `roofline quantize`")
    raise UnsupportedError(f"{weight} in {' and '.join(tensors)}", reason, alternatives)


def _float8(program: Program, instr: Instr) -> bool:
    """Whether a linear's weight is 8-bit floats throughout."""
    return set(program.weights[instr.weights[0]].type.formats) == {"E4M3"}


def _choices(instr: Instr, target: Target) -> dict[str, object]:
    attrs = dict(instr.attrs)
    attrs |= {name: dtype for name, dtype in target.attend_dtypes.items() if name in get(instr.op).attributes}
    order = target.float_order if _is_product(instr) else target.orders.get(instr.op)
    return attrs | ({"order": order} if order else {})
