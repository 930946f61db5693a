"""keep_hidden: what the head reads, of all tokens and not only of those whose logits are wanted, is a result too.

A layer that guesses further tokens goes on from these rows; itself it needs of its own those of the wanted rows alone
(`keep_rows`). Each row of logits is computed as before, to the bit.
"""

from dataclasses import replace

from roofline.common.errors import UnsupportedError
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.rewrite import makers


def keep_rows(program: Program) -> Program:
    """The Program, as it was traced, with what its last product reads as its last output, of the wanted rows alone."""
    return replace(program, outputs=(*program.outputs, makers(program.body)[program.logits].inputs[0]))


def keep_hidden(program: Program) -> Program:
    """The Program, as it was traced, with take_rows moved down to its last product, whose rows before are its last
    output.

    Raises UnsupportedError where the logits are not a product of rows that are made one by one.
    """
    makers_of = makers(program.body)
    head = makers_of[program.logits]
    above: list[Instr] = []  # from the product up to take_rows
    at = makers_of.get(head.inputs[0]) if head.op == "linear" else None
    while at is not None and at.op != "take_rows" and at.has(Trait.ROW_WISE):
        above.append(at)
        at = makers_of.get(at.inputs[0])
    if at is None or at.op != "take_rows":
        feature = f"hidden rows of {program.name} beside its logits"
        raise UnsupportedError(feature, "its head is not a product of normed rows", ("speculate='ngram'",))
    take, renamed = at, {at.output.name: at.inputs[0]}
    body: list[Instr] = []
    for instr in program.body:
        if instr is take:
            continue
        if any(instr is other for other in above):
            inputs = tuple(renamed.get(name, name) for name in instr.inputs)
            outputs = tuple(Value(v.name, replace(v.type, leading="tokens")) for v in instr.outputs)
            instr = replace(instr, inputs=inputs, outputs=outputs)
        elif instr is head:
            name = renamed.get(head.inputs[0], head.inputs[0])
            body.append(replace(take, inputs=(name, *take.inputs[1:])))
            instr = replace(head, inputs=(take.output.name, *head.inputs[1:]))
        body.append(instr)
    hidden = renamed.get(head.inputs[0], head.inputs[0])
    return replace(program, body=tuple(body), outputs=(*program.outputs, hidden))
