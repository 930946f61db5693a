"""selective_scan: the recurrence of Mamba and Mamba-2, whose state lies in a state store (see ops/state.py)."""

import math
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.registry import Call, op
from roofline.ops.state import MATRIX, StateStore, softplus, through
from roofline.ops.state_rows import StateRows, decayed_rows, scan_rows
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def scan_state(width: int, heads: int, states: int, by_state: bool) -> tuple[int, ...]:
    """The shape of what selective_scan keeps of a sequence; by_state: a_log is a matrix."""
    return (states, width) if by_state else (heads, states, width // heads)


def _scan_type(call: Call) -> tuple[Type, Type]:
    heads, states, groups = call.dt.width, call.states, call.groups
    width = call.xbc.width - 2 * groups * states
    if width <= 0 or states < 1 or groups < 1 or width % heads or heads % groups:
        what = f"{heads} heads and B and C of {groups} groups of {states}"
        raise ConfigError(f"selective_scan: rows of width {call.xbc.width} are not those of {what}")
    by_state = len(call.a_log.shape) == 2
    if call.a_log.shape != ((heads, states) if by_state else (heads,)):
        raise ConfigError(f"selective_scan: a_log of shape {call.a_log.shape} for {heads} heads of {states} states")
    if by_state and (heads, groups) != (width, 1):
        raise ConfigError("selective_scan: a_log with a row a head takes heads of one channel, and one group")
    if any(weight.shape != (heads,) for weight in (call.dt_bias, call.d)):
        raise ConfigError(f"selective_scan: dt_bias and d have no value for each of {heads} heads")
    if not 0 <= call.least <= call.most:
        raise ConfigError(f"selective_scan: steps between {call.least} and {call.most}")
    if call.state.dtype != "state" or call.state.width < width * states:
        raise ConfigError(f"selective_scan: {call.state} does not hold {states} states of {width} channels")
    return Type("f32", call.xbc.leading, (width,)), call.state


def _scan_flops(call: Call) -> Affine:
    values = (call.xbc.width - 2 * call.groups * call.states) * call.states
    return Affine.per(call.xbc.leading, (14 if len(call.a_log.shape) == 2 else 5) * values)


def _scan_bytes(call: Call) -> Affine:
    values = (call.xbc.width - 2 * call.groups * call.states) * call.states
    return Affine(rows=2 * 4 * values)


@op(
    values=("xbc", "dt", "state"),
    weights=("a_log", "dt_bias", "d"),
    infer=_scan_type,
    traits=(Trait.WHOLE_VALUES, Trait.ROUNDED, Trait.READS_WIDE, Trait.LONG_SUM),
    flops=_scan_flops,
    kv_bytes=_scan_bytes,
)
def selective_scan(
    xbc: "Tensor",
    dt: "Tensor",
    state: "StateStore | StateRows",
    a_log: "Tensor",
    dt_bias: "Tensor",
    d: "Tensor",
    *,
    layer: int,
    states: int,
    groups: int = 1,
    least: float = 0.0,
    most: float = math.inf,
) -> "tuple[Tensor, StateStore | StateRows]":
    """The selective scan: (y, store), y float32 [tokens, width]. Sources: Gu and Dao 2023, Dao and Gu 2024.

    xbc [tokens, width + 2 * groups * states]: x, then B of all groups, then C of all groups; dt [tokens, heads], with
    heads that divide width and consecutive ones that share a group. a_log [heads], as Mamba-2 has it, or [heads,
    states], as Mamba has it, whose heads are of one channel; dt_bias, d [heads]. Token after token, of each channel,
    with its state h [states]:
        s = softplus(dt + dt_bias), no less than `least` and no more than `most`
        h = exp(-exp(a_log) * s) * h + (s * x) * B,  y = sum of C * h, + d * x.
    layer: among those with state. The state keeps h of each channel, in the shape of `scan_state`.
    """
    import torch

    heads, count = dt.shape[1], groups * states
    width = xbc.shape[1] - 2 * count
    wide = xbc.float()
    x = wide[:, :width].unflatten(1, (heads, -1))  # [tokens, heads, channels]
    b, c = (wide[:, width + i * count :][:, :count].unflatten(1, (groups, states)) for i in range(2))
    s = softplus(dt.float() + dt_bias.float()).clamp(least, most)
    rate = -a_log.float().exp()
    skip, u = d.float()[:, None] * x, s[..., None] * x
    if a_log.dim() == 1:
        b, c = (t.repeat_interleave(heads // groups, 1) for t in (b, c))  # [tokens, heads, states]
    if isinstance(state, StateRows):
        y = decayed_rows(c, b, u, s * rate, state) if a_log.dim() == 1 else scan_rows(u, s, b, c, rate, state)
        return (y + skip).flatten(1).to(xbc.dtype), state

    def step(start: int, stop: int, h: "Tensor") -> "tuple[Tensor, Tensor]":
        rows = []
        for t in range(start, stop):
            if a_log.dim() == 1:
                h = torch.exp(s[t] * rate)[:, None, None] * h + b[t, :, :, None] * u[t, :, None, :]
                rows.append(torch.einsum("hs,hsc->hc", c[t], h).flatten())
            else:  # [states, channels]
                h = torch.exp(s[t] * rate.T) * h + b[t, 0, :, None] * u[t, :, 0]
                rows.append(torch.einsum("s,sc->c", c[t, 0], h))
        return torch.stack(rows), h

    y, store = through(state, layer, MATRIX, step)
    return y + skip.flatten(1), store
