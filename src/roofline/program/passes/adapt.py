"""adapt: every matrix of the layers gets a place where the adapters of a step's rows add what they change.

It runs after all other passes, on what they made: where a fused instruction has what an adapter reads or changes inside
of it, its parts are written out again. They round where it rounded, so rows without an adapter keep their bits; on GPUs
the fused product adds up in another order, so there they do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roofline.common.errors import UnsupportedError
from roofline.ops import registry
from roofline.ops.adapters import ROWS
from roofline.ops.symbol import Type
from roofline.program.ir import WHOLE, Instr, Program, Value
from roofline.program.passes.plan import plan
from roofline.program.passes.rewrite import makers, rename
from roofline.program.verify import verify

ADAPTERS = "adapters"  # the input: each token's slot, 0 for none
_ORDERS = {"cpu": ("lanes16", "ranks")}  # of adapter_down and adapter_up, by target; others compute as torch does


@dataclass(frozen=True)
class Site:
    """A matrix [outputs, inputs] that adapters may change: of its group the `part`-th matrix, its results in columns
    from `column` on. again: further groups that it is all of alone, where a layer multiplies with it more than once."""

    group: int
    part: int
    column: int
    outputs: int
    inputs: int
    again: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        return (self.group, *self.again)


def adapt(program: Program, rank: int) -> Program:
    """The Program, planned anew, with adapters of up to `rank` on all matrices of its layers.

    Raises UnsupportedError for one rank's part of a model, and where the rows of a matrix are floats of 8 bits.
    """
    if program.share != WHOLE:
        raise UnsupportedError("adapters on several ranks", "only a whole matrix is adapted", ("tensor_parallel=1",))
    body = _written_out(program)
    types = program.types() | {v.name: v.type for instr in body for v in instr.outputs}
    sources = {i.output.name: i.inputs[0] for i in body if i.op == "quantize_rows"}
    renamed: dict[str, str] = {}
    adapted: list[Instr] = []
    order_down, order_up = _ORDERS.get(program.target, ("", ""))
    group = 0
    for instr in body:
        instr = rename(instr, renamed)
        adapted.append(instr)
        if not _is_site(program, instr):
            continue
        x, y = sources.get(instr.inputs[0], instr.inputs[0]), instr.output
        if types[x].dtype not in ROWS or y.type.dtype not in ROWS:
            what = f"adapters where rows are {types[x].dtype}"
            raise UnsupportedError(what, "they are computed from floats of 16 bits or more", ("activations=auto",))
        ranks = rank * len(program.weights[instr.weights[0]].pieces)
        t = Value(f"{y.name}.ranks", Type(types[x].dtype, y.type.leading, (ranks,)))
        result = Value(f"{y.name}.adapted", y.type)
        down = {"group": group, "ranks": ranks} | ({"order": order_down} if order_down else {})
        up = {"group": group} | ({"order": order_up} if order_up else {})
        down |= {"out": t.type.dtype} if t.type.dtype != "f32" else {}
        up |= {"out": y.type.dtype} if y.type.dtype != "f32" else {}
        adapted.append(Instr("adapter_down", (renamed.get(x, x), ADAPTERS), (), down, (t,)))
        adapted.append(Instr("adapter_up", (t.name, y.name, ADAPTERS), (), up, (result,)))
        renamed[y.name] = result.name
        types[result.name] = result.type  # which the next matrix may read
        group += 1
    inputs = (*program.inputs, Value(ADAPTERS, Type("i32", "tokens")))
    return plan(verify(replace(program, inputs=inputs, body=tuple(adapted), plan=None)))


def sites(program: Program) -> Mapping[str, Site]:
    """The matrices that `adapt` gave adapters to, by the name of their tensor."""
    maker_of = makers(program.body)
    result: dict[str, Site] = {}
    for instr in program.body:
        if instr.op == "adapter_up":
            recipe = program.weights[maker_of[instr.inputs[1]].weights[0]]
            column = 0
            for part, piece in enumerate(recipe.pieces):
                size = piece.stop - piece.start
                group, before = int(instr.attr("group")), result.get(piece.tensor)
                if before is None:
                    result[piece.tensor] = Site(group, part, column, size, recipe.columns)
                else:
                    assert len(recipe.pieces) == 1, "what is multiplied with again stands alone"
                    result[piece.tensor] = replace(before, again=(*before.again, group))
                column += size
    return result


def _is_site(program: Program, instr: Instr) -> bool:
    """Whether an instruction multiplies with matrices of a layer."""
    names = [piece.tensor for weight in instr.weights[:1] for piece in program.weights[weight].pieces]
    return instr.op == "linear" and all(name.startswith("layers.") for name in names)


def _written_out(program: Program) -> list[Instr]:
    """The body with those fused instructions as their parts that hold what an adapter reads or changes."""
    types = program.types()
    body = [part for instr in program.body for part in _parts(program, instr, types)]
    read = {i.inputs[0] for i in body if _is_site(program, i)}
    written: list[Instr] = []
    for instr in body:
        fuses = registry.get(instr.op).fuses
        if fuses[1:] != ("quantize_rows",) or instr.output.name not in read:
            written.append(instr)
            continue
        first, out = registry.get(fuses[0]), instr.output
        attrs = {key: value for key, value in instr.attrs.items() if key in first.attributes}
        attributes = {key: value for key, value in instr.attrs.items() if key in ("group", "bits")}
        rows = Value(f"{out.name}.rows", Type("f32", out.type.leading, out.type.trailing))
        written.append(Instr(fuses[0], instr.inputs, instr.weights, attrs, (rows,)))
        written.append(Instr("quantize_rows", (rows.name,), (), attributes, (out,)))
    return written


def _parts(program: Program, instr: Instr, types: Mapping[str, Type]) -> list[Instr]:
    """What stands for a linear of a layer and its successor as these two; any other instruction as it is."""
    fuses = registry.get(instr.op).fuses
    linear = replace(instr, op="linear", inputs=instr.inputs[:1])
    if fuses[:1] != ("linear",) or not _is_site(program, linear):
        return [instr]
    out = instr.output
    product = Value(f"{out.name}.product", Type("f32", out.type.leading, (program.weights[instr.weights[0]].shape[0],)))
    attrs = {key: value for key, value in instr.attrs.items() if key not in ("gate_order", "out")}
    linear = replace(linear, attrs=attrs, outputs=(product,))
    if fuses[1] == "add":
        return [linear, Instr(fuses[1], (instr.inputs[1], product.name), (), {}, instr.outputs)]
    attributes = {"order": instr.attr("gate_order")} if instr.attr("gate_order") else {}
    attributes |= {"out": instr.attr("out")} if instr.attr("out") else {}
    return [linear, Instr(fuses[1], (product.name,), (), attributes, instr.outputs)]
