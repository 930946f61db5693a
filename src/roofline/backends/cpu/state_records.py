"""What records of operations with recurrent state hold, and which sizes have kernels (native/records.h)."""

import math
import struct
from collections.abc import Mapping

from roofline.common.errors import UnsupportedError
from roofline.ops.state import COLUMNS, MATRIX
from roofline.ops.symbol import Type
from roofline.program.ir import Instr, Program, kv_group_of

# Op -> the part of its layer's state that it reads and writes.
_PARTS = {"causal_conv": COLUMNS, "delta_rule": MATRIX, "selective_scan": MATRIX}
_MOST_TAPS, _MOST_STATE_HEADS, _MOST_SCAN_HEADS = 16, 1 << 14, (1 << 15) - 1
Ref = tuple[int, int, int, int]


def check_state(program: Program, instr: Instr) -> None:
    """Raises UnsupportedError on an op with state of a size that has no kernel."""
    if instr.op == "causal_conv" and program.weights[instr.weights[0]].shape[1] > _MOST_TAPS:
        taps = program.weights[instr.weights[0]].shape[1]
        raise UnsupportedError(
            f"causal_conv over {taps} tokens", f"the cpu backend has kernels for {_MOST_TAPS} at most"
        )
    if instr.op == "delta_rule" and instr.attr("value_heads") > _MOST_STATE_HEADS:
        reason = f"the cpu backend has kernels for {_MOST_STATE_HEADS} at most"
        raise UnsupportedError(f"delta_rule with {instr.attr('value_heads')} heads", reason)
    if instr.op == "selective_scan":
        (heads,) = program.weights[instr.weights[1]].shape
        if heads > _MOST_SCAN_HEADS:
            reason = f"the cpu backend has kernels for {_MOST_SCAN_HEADS} at most"
            raise UnsupportedError(f"selective_scan with {heads} heads", reason)


def state_fields(
    program: Program, instr: Instr, types: Mapping[str, Type], refs: Mapping[str, Ref]
) -> dict[str, object]:
    """What operations with recurrent state have in fields of other names; others have none."""
    if instr.op not in _PARTS:
        return {}
    place = _place_of(program, instr, _PARTS[instr.op])
    if instr.op == "causal_conv":
        return {"layer": place, "stride": program.weights[instr.weights[0]].shape[1]}
    stride = types[instr.inputs[0]].width
    if instr.op == "selective_scan":
        heads, limits = types[instr.inputs[1]].width, struct.pack(">ff", instr.attr("least"), instr.attr("most"))
        bounds = int.from_bytes(limits, "big")
        return {"layer": place, "stride": stride, "digits": heads << 16 | instr.attr("groups"), "k_norm": bounds}
    _, base, per_token, per_row = refs[instr.inputs[2]]
    assert per_row == 0, "values of tokens lie before those of rows"
    heads = instr.attr("key_heads") << 16 | instr.attr("value_heads")
    places = {"q_norm": base, "k_norm": per_token}  # of b
    return {"layer": place, "digits": heads, "stride": stride, **places}


def _place_of(program: Program, instr: Instr, name: str) -> int:
    """Floats before a part of the instruction's layer in a slot of its store."""
    group = program.state_groups[kv_group_of(next(v.name for v in instr.outputs if v.type.stored))]
    at = instr.attr("layer") * group.layer_values
    for part, shape in group.parts:
        if part == name:
            return at
        at += math.prod(shape)
    raise UnsupportedError(f"{instr.op} without a part {name!r} of its state", "its layers keep other parts")
