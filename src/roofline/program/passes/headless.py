"""headless: the model without its head, for hidden states: a trace of its own, as a Program has no branches."""

from dataclasses import replace

from roofline.common.errors import UnsupportedError
from roofline.program.ir import Program
from roofline.program.passes.rewrite import makers, without_dead


def headless(program: Program) -> Program:
    """A traced Program whose first output is what its last product reads: the normed residual rows [rows, width].

    Raises UnsupportedError where the logits are not a product's result.
    """
    head = makers(program.body)[program.logits]
    if head.op != "linear":
        raise UnsupportedError(f"hidden states of {program.name}", f"its logits are made by {head.op}", ("logits",))
    outputs = (head.inputs[0], *program.outputs[1:])
    return without_dead(replace(program, outputs=outputs), program.body)
