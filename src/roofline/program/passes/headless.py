"""headless: the model without its head, for hidden states: a trace of its own, as a Program has no branches."""

from dataclasses import replace

from roofline.common.errors import UnsupportedError
from roofline.ops.registry import fusions, get
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.rewrite import makers, without_dead


def headless(program: Program) -> Program:
    """A Program whose first output is what its last product reads: the normed residual rows [rows, width].

    program: as it was traced, or as a backend runs it, whose rows may be integers there: then those that the integers
    were made of. The result of a planned Program has no Plan.

    Raises UnsupportedError where the logits are not a product's result, or one that is scaled or capped.
    """
    makers_of = makers(program.body)
    head = makers_of[program.logits]
    while head.has(Trait.BY_COLUMN) and len(head.inputs) == 1 and head.inputs[0] in makers_of:
        head = makers_of[head.inputs[0]]
    if head.op != "linear":
        raise UnsupportedError(f"hidden states of {program.name}", f"its logits are made by {head.op}", ("logits",))
    rows = makers_of[head.inputs[0]]
    body, name = program.body, head.inputs[0]
    if rows.op == "quantize_rows":
        name = rows.inputs[0]
    elif rows.makes_integers:
        plain = _without_quantizing(rows, program)
        body, name = tuple(plain if instr is rows else instr for instr in body), plain.output.name
    return without_dead(replace(program, body=body, outputs=(name, *program.outputs[1:]), plan=None), body)


def _without_quantizing(instr: Instr, program: Program) -> Instr:
    """The first of the two ops that one stands for, whose second is quantize_rows."""
    first = next(part for part, fused in fusions("quantize_rows").items() if fused == instr.op)
    attrs = {name: value for name, value in instr.attrs.items() if name in get(first).attributes}
    rows = program.types()[instr.inputs[0]]
    kind = Type(rows.dtype, rows.leading, (instr.output.type.width,))
    return Instr(first, instr.inputs, instr.weights, attrs, (Value(f"{instr.output.name}.plain", kind),))
