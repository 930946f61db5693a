"""The CPU's orders of ops with recurrent state, written the slow way (see orders.py)."""

from typing import TYPE_CHECKING

from roofline.backends.reference.orders import LANES, silu_exp2, tree16
from roofline.ops.exp2 import LOG2E, exp2_falling, exp2_signed, fma, polynomial
from roofline.ops.state import COLUMNS, MATRIX, StateStore, through

if TYPE_CHECKING:
    from torch import Tensor

# log(1 + m) = m - m^2 / 2 + m^3 * p(m) for m in [sqrt(1/2) - 1, sqrt(2) - 1] (Cephes), constant term of p first.
_LOG = (
    *(3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1),
    *(-1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2),
)
_LOG2_LOW, _LOG2_HIGH = -2.12194440e-4, 0.693359375  # log(2) as their sum
_HALF_ROOT = 0.707106781186547524


def log_cephes(x: "Tensor") -> "Tensor":
    """Natural logarithm of positive normal float32."""
    import torch

    def full(value: float) -> "Tensor":
        return torch.full_like(x, value)

    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).float()
    m = ((bits & 0x007FFFFF) + 0x3F000000).view(torch.float32)  # [0.5, 1)
    low = m < torch.tensor(_HALF_ROOT, dtype=torch.float32)
    exponent = torch.where(low, exponent - 1.0, exponent)
    m = torch.where(low, m + m, m) - 1.0
    z = m * m
    y = polynomial(m, [float(torch.tensor(c, dtype=torch.float32)) for c in _LOG]) * m * z
    y = fma(exponent, full(_LOG2_LOW), y)
    y = fma(z, full(-0.5), y)
    return fma(exponent, full(_LOG2_HIGH), m + y)


def sigmoid_exp2(x: "Tensor") -> "Tensor":
    """1 / (1 + 2^(-x * log2 e))."""
    return 1.0 / (1.0 + exp2_signed(-x * LOG2E))


def sigmoid_mul_exp2(gate: "Tensor", up: "Tensor") -> "Tensor":
    """Order "exp2": (1 / (1 + 2^(-gate * log2 e))) * up."""
    return sigmoid_exp2(gate) * up


def softplus_exp2(x: "Tensor") -> "Tensor":
    """max(x, 0) + (log(w) + (t - (w - 1)) / w) with t = 2^(-|x| * log2 e) and w = 1 + t."""
    t = exp2_falling(-x.abs() * LOG2E)
    w = 1.0 + t
    return x.clamp(min=0.0) + (log_cephes(w) + (t - (w - 1.0)) / w)


def decay_exp2(a_log: "Tensor", steps: "Tensor") -> "Tensor":
    """2^(-(2^(a_log * log2 e) * steps) * log2 e)."""
    power = -(exp2_signed(a_log * LOG2E) * steps) * LOG2E
    return power.where(power.isnan(), exp2_falling(power))


def causal_conv_taps(
    x: "Tensor", state: StateStore, w: "Tensor", bias: "Tensor | None", layer: int, silu: bool
) -> "tuple[Tensor, StateStore]":
    """Order "taps": acc = fma(w[:, tap], x[tap], acc) from 0, the oldest row first, then + bias, then silu's "exp2"."""
    import torch

    taps = w.shape[1]

    def step(start: int, stop: int, columns: "Tensor") -> "tuple[Tensor, Tensor]":
        rows = torch.cat([columns, x[start:stop]])
        total = torch.zeros(stop - start, x.shape[1])
        for tap in range(taps):
            total = fma(w[None, :, tap].expand_as(total), rows[tap : tap + stop - start], total)
        total = total if bias is None else total + bias
        return silu_exp2(total) if silu else total, rows[len(rows) - taps + 1 :]

    return through(state, layer, COLUMNS, step)


def unit_heads(x: "Tensor", eps: float, factor: float) -> "Tensor":
    """x * (factor * (1 / sqrt(sum + eps))) of each head, the last dimension: squares go to lane (index mod 16) by FMA,
    lanes are added as a tree."""
    import torch

    lanes = torch.zeros(*x.shape[:-1], LANES)
    for chunk in torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES)).split(LANES, dim=-1):
        lanes = fma(chunk, chunk, lanes)
    total = tree16(lanes) + torch.tensor(eps, dtype=torch.float32)
    inverse = 1.0 / torch.sqrt(total.double()).float()
    return x * (torch.tensor(factor, dtype=torch.float32) * inverse)[..., None]


def delta_rule_tokens(
    qkv: "Tensor",
    gates: "tuple[Tensor, Tensor, Tensor, Tensor]",
    state: StateStore,
    layer: int,
    heads: tuple[int, int],
    key_dim: int,
    eps: float,
    tiled: bool = False,
) -> "tuple[Tensor, StateStore]":
    """Order "tokens": one token after the other. gates: a, b, a_log, dt_bias; heads: of keys, of values.

    q and k are `unit_heads`, q times 1 / sqrt(key_dim). rate = 2^(a_log * log2 e), e = 2^(-(rate * softplus(a +
    dt_bias)) * log2 e), beta = sigmoid(b). m is a chain of FMAs of k with S over ascending keys, from 0;
    u = beta * fma(-e, m, v), S = fma(k, u, e * S), and o a chain of q with the new S.
    """
    import torch

    (key_heads, value_heads), (a, b, a_log, dt_bias) = heads, gates
    width, group = key_heads * key_dim, value_heads // key_heads
    q, k = (qkv[:, i * width : (i + 1) * width].unflatten(1, (key_heads, key_dim)) for i in range(2))
    q, k = unit_heads(q, eps, float(key_dim) ** -0.5), unit_heads(k, eps, 1.0)
    q, k = (t.repeat(1, group, 1) if tiled else t.repeat_interleave(group, 1) for t in (q, k))
    v = qkv[:, 2 * width :].unflatten(1, (value_heads, -1))
    decay = decay_exp2(a_log, softplus_exp2(a + dt_bias))
    beta = sigmoid_exp2(b)

    def chain(row: "Tensor", matrix: "Tensor") -> "Tensor":
        """[heads, columns] of row [heads, keys] and matrix [heads, keys, columns]."""
        total = torch.zeros(matrix.shape[0], matrix.shape[2])
        for key in range(key_dim):
            total = fma(matrix[:, key], row[:, key, None].expand_as(total), total)
        return total

    def step(start: int, stop: int, matrix: "Tensor") -> "tuple[Tensor, Tensor]":
        rows = []
        for t in range(start, stop):
            e = decay[t, :, None]
            u = beta[t, :, None] * fma(-e, chain(k[t], matrix), v[t])
            matrix = fma(k[t, :, :, None], u[:, None, :], e[..., None] * matrix)
            rows.append(chain(q[t], matrix).flatten())
        return torch.stack(rows), matrix

    return through(state, layer, MATRIX, step)


def selective_scan_tokens(
    xbc: "Tensor",
    dt: "Tensor",
    weights: "tuple[Tensor, Tensor, Tensor]",
    state: StateStore,
    layer: int,
    shape: tuple[int, int],
    limits: tuple[float, float],
) -> "tuple[Tensor, StateStore]":
    """Order "tokens": one token after the other. weights: a_log, dt_bias, d; shape: states, groups.

    s = softplus(dt + dt_bias), max(s, least), then min(s, most); e is `decay_exp2` of a_log and s. h = fma(B, s * x,
    e * h), y a chain of FMAs of h with C over ascending states, from 0, then fma(d, x, y).
    """
    import torch

    (a_log, dt_bias, d), (states, groups) = weights, shape
    heads, count = dt.shape[1], groups * states
    width = xbc.shape[1] - 2 * count
    x = xbc[:, :width].unflatten(1, (heads, -1))
    b, c = (xbc[:, width + i * count :][:, :count].unflatten(1, (groups, states)) for i in range(2))
    s = softplus_exp2(dt + dt_bias).clamp(*limits)
    # [tokens, heads or one, states, channels]
    if a_log.dim() == 1:
        b, c = (t.repeat_interleave(heads // groups, 1)[..., None] for t in (b, c))
        decay, u, skip = decay_exp2(a_log, s)[:, :, None, None], (s[..., None] * x)[:, :, None], d[:, None]
    else:
        x = x.transpose(1, 2)  # one head of all channels
        b, c = b[..., None], c[..., None]
        decay, u, skip = decay_exp2(a_log.T, s[:, None, :])[:, None], s[:, None, None, :] * x[:, :, None], d

    def step(start: int, stop: int, h: "Tensor") -> "tuple[Tensor, Tensor]":
        rows, kept = [], h.shape
        h = h.view(-1, *h.shape[-2:])
        for t in range(start, stop):
            h = fma(b[t].expand_as(h), u[t].expand_as(h), decay[t] * h)
            total = torch.zeros_like(h[:, 0])
            for at in range(states):
                total = fma(h[:, at], c[t, :, at].expand_as(total), total)
            rows.append(fma(skip.expand_as(total), x[t], total).flatten())
        return torch.stack(rows), h.view(kept)

    return through(state, layer, MATRIX, step)
