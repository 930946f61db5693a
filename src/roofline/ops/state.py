"""causal_conv and delta_rule: the ops whose layers keep recurrent state of each sequence beside the pages of attention.

A state store, for the references, is any object with
    stretches: (start, stop) of rows, ascending, of which each is of one sequence; the store begins or keeps a state at
        the edges of stretches alone;
    read(layer, part, start) -> Tensor: float32, of the part's shape: what the layer keeps of the sequence of row
        `start`, which begins a stretch, behind all tokens before it; zeros where there are none;
    write(layer, part, stop, value) -> store: the result holds `value` as the part behind row `stop - 1`, which ends a
        stretch; the argument stays valid.

All state is float32, whatever the activations are: storing it must not round, or results would depend on how a sequence
is cut into steps.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.registry import Call, op
from roofline.ops.state_rows import StateRows, conv_rows, delta_rows
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor

StateParts = tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each tensor that a layer keeps of a sequence
COLUMNS, MATRIX = "columns", "matrix"  # the parts of causal_conv and of delta_rule


class StateStore(Protocol):
    """What ops with state need of a store."""

    @property
    def stretches(self) -> Sequence[tuple[int, int]]: ...

    def read(self, layer: int, part: str, start: int) -> "Tensor": ...

    def write(self, layer: int, part: str, stop: int, value: "Tensor") -> "StateStore": ...


def state_values(parts: StateParts) -> int:
    """How many float32 values a layer with these parts keeps of a sequence."""
    return sum(math.prod(shape) for _, shape in parts)


def through(
    store: StateStore, layer: int, part: str, step: "Callable[[int, int, Tensor], tuple[Tensor, Tensor]]"
) -> "tuple[Tensor, StateStore]":
    """Rows of all stretches, one behind the other, and the store behind them.

    step(start, stop, state) -> (rows of start..stop, state behind them).
    """
    import torch

    rows = []
    for start, stop in store.stretches:
        part_rows, state = step(start, stop, store.read(layer, part, start))
        store = store.write(layer, part, stop, state)
        rows.append(part_rows)
    return torch.cat(rows), store


def sigmoid(x: "Tensor") -> "Tensor":
    """1 / (1 + exp(-x)), whose bits of an element do not depend on where it lies in its tensor, as torch's own do."""
    import torch

    return 1 / (1 + torch.exp(-x.clamp(min=-80.0)))


def softplus(x: "Tensor") -> "Tensor":
    """log(1 + exp(x)), likewise; x itself above 20."""
    import torch

    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def _conv_type(call: Call) -> tuple[Type, Type]:
    if len(call.w.shape) != 2 or call.w.shape[0] != call.x.width or call.w.shape[1] < 2:
        raise ConfigError(f"causal_conv: weight of shape {call.w.shape} for {call.x.width} channels")
    if call.bias is not None and call.bias.shape != (call.x.width,):
        raise ConfigError(f"causal_conv: bias of shape {call.bias.shape} for {call.x.width} channels")
    if call.state.dtype != "state" or call.state.width < call.x.width * (call.w.shape[1] - 1):
        raise ConfigError(f"causal_conv: {call.state} does not hold the last columns of {call.x.width} channels")
    return Type("f32", call.x.leading, call.x.trailing), call.state


def _conv_flops(call: Call) -> Affine:
    return Affine.per(call.x.leading, (2 * call.w.shape[1] + (8 if call.silu else 0)) * call.x.width)


def _conv_bytes(call: Call) -> Affine:
    """The columns of each sequence, read and written once a step; counted for each logit row, of which one has one."""
    return Affine(rows=2 * 4 * call.x.width * (call.w.shape[1] - 1))


_STATE = (Trait.WHOLE_VALUES, Trait.READS_WIDE)


@op(
    values=("x", "state"),
    weights=("w", "bias"),
    infer=_conv_type,
    traits=(*_STATE, Trait.ROUNDED),
    flops=_conv_flops,
    kv_bytes=_conv_bytes,
)
def causal_conv(
    x: "Tensor",
    state: "StateStore | StateRows",
    w: "Tensor",
    bias: "Tensor | None" = None,
    *,
    layer: int,
    silu: bool = False,
) -> "tuple[Tensor, StateStore | StateRows]":
    """A sum over the last tokens of each channel by itself: (y, store), y float32 as x [tokens, channels].

    y[t, c] = sum over j of w[c, j] * x[t - taps + 1 + j, c], with w [channels, taps], + bias[c]; silu: y / (1 +
    exp(-y)) of that. Before the first token of a sequence x is 0. layer: among those with state. The state keeps the
    last taps - 1 rows of x, the oldest first.
    """
    import torch

    if isinstance(state, StateRows):
        return conv_rows(x, state, w, bias, silu), state
    taps, wide = w.shape[1], x.float()

    def step(start: int, stop: int, columns: "Tensor") -> "tuple[Tensor, Tensor]":
        rows = torch.cat([columns, wide[start:stop]])  # [taps - 1 + tokens, channels]
        length = stop - start
        total = sum((rows[j : j + length] * w[:, j].float() for j in range(taps)), torch.zeros(()))
        total = total if bias is None else total + bias.float()
        return total, rows[len(rows) - taps + 1 :]

    out, store = through(state, layer, COLUMNS, step)
    return out * sigmoid(out) if silu else out, store


def of_value_heads(x: "Tensor", group: int, tiled: bool) -> "Tensor":
    """x [tokens, key heads, key_dim] as each value head has it: [tokens, group * key heads, key_dim]."""
    return x.repeat(1, group, 1) if tiled else x.repeat_interleave(group, 1)


def _delta_type(call: Call) -> tuple[Type, Type]:
    values = call.qkv.width - 2 * call.key_heads * call.key_dim
    if values <= 0 or values % call.value_heads or call.value_heads % call.key_heads:
        what = f"{call.key_heads} key heads of {call.key_dim} and {call.value_heads} value heads"
        raise ConfigError(f"delta_rule: rows of width {call.qkv.width} are not those of {what}")
    if (call.a.width, call.b.width) != (call.value_heads, call.value_heads):
        raise ConfigError(f"delta_rule: a {call.a} and b {call.b} for {call.value_heads} value heads")
    if any(weight.shape != (call.value_heads,) for weight in (call.a_log, call.dt_bias)):
        raise ConfigError(f"delta_rule: a_log and dt_bias have no value for each of {call.value_heads} value heads")
    if call.state.dtype != "state" or call.state.width < values * call.key_dim:
        raise ConfigError(f"delta_rule: {call.state} does not hold matrices of {call.key_dim} x {values}")
    return Type("f32", call.qkv.leading, (values,)), call.state


def _delta_flops(call: Call) -> Affine:
    values = call.qkv.width - 2 * call.key_heads * call.key_dim
    return Affine.per(call.qkv.leading, 7 * values * call.key_dim)


def _delta_bytes(call: Call) -> Affine:
    values = call.qkv.width - 2 * call.key_heads * call.key_dim
    return Affine(rows=2 * 4 * values * call.key_dim)


@op(
    values=("qkv", "a", "b", "state"),
    weights=("a_log", "dt_bias"),
    infer=_delta_type,
    traits=(*_STATE, Trait.LONG_SUM),
    flops=_delta_flops,
    kv_bytes=_delta_bytes,
)
def delta_rule(
    qkv: "Tensor",
    a: "Tensor",
    b: "Tensor",
    state: "StateStore | StateRows",
    a_log: "Tensor",
    dt_bias: "Tensor",
    *,
    layer: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    eps: float = 1e-6,
    tiled: bool = False,
) -> "tuple[Tensor, StateStore | StateRows]":
    """The gated delta rule: (o, store), o float32 [tokens, value_heads * value_dim]. Source: Yang et al. 2024.

    qkv [tokens, 2 * key_heads * key_dim + value_heads * value_dim]: q, then k, of all key heads, then v of all value
    heads; value_heads / key_heads consecutive ones share a key head; tiled: value head i has key head i % key_heads
    instead, as files of llama.cpp order them. Each head of q and k is divided by its length
    sqrt(sum of squares + eps), then q by sqrt(key_dim). a, b [tokens, value_heads]; a_log, dt_bias [value_heads].
    Of each value head, with its matrix S [key_dim, value_dim], token after token:
        e = exp(-exp(a_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
        u = beta * (v - e * (k S)),  S = e * S + k u (outer product),  o = q S.
    layer: among those with state. The state keeps S of each value head.
    """
    import torch

    group, width = value_heads // key_heads, key_heads * key_dim
    wide = qkv.float()
    q, k = (wide[:, i * width : (i + 1) * width].unflatten(1, (key_heads, key_dim)) for i in range(2))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps) for t in (q, k))
    q, k = (of_value_heads(t, group, tiled) for t in (q * key_dim**-0.5, k))  # [tokens, value_heads, key_dim]
    v = wide[:, 2 * width :].unflatten(1, (value_heads, -1))  # [tokens, value_heads, value_dim]
    log_decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())  # [tokens, value_heads]
    beta = sigmoid(b.float())
    if isinstance(state, StateRows):
        return delta_rows(q, k, v, log_decay, beta, state).flatten(1).to(qkv.dtype), state
    decay = torch.exp(log_decay)

    def step(start: int, stop: int, matrix: "Tensor") -> "tuple[Tensor, Tensor]":
        rows = []
        for t in range(start, stop):
            m = torch.einsum("hk,hkv->hv", k[t], matrix)
            u = beta[t, :, None] * (v[t] - decay[t, :, None] * m)
            matrix = decay[t, :, None, None] * matrix + k[t, :, :, None] * u[:, None, :]
            rows.append(torch.einsum("hk,hkv->hv", q[t], matrix).flatten())
        return torch.stack(rows), matrix

    return through(state, layer, MATRIX, step)
