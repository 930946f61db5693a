"""Rows of one length side by side, as training has them: a state store that keeps nothing, and the ops with gradients.

The only fast torch forms of `causal_conv`, `delta_rule` and `selective_scan`; tests set them beside the references.
Results have the type of what comes in, as layers in 16 bits expect; what is computed in between is float32.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 64  # tokens whose steps become products of matrices


@dataclass(frozen=True)
class StateRows:
    """A store whose sequences begin in it and are not gone on with.

    count rows of `length` tokens; places: int [count, length], of each token its place in its document, where each
    document begins anew; None: a row is one.
    """

    count: int
    length: int
    places: "Tensor | None" = None


def conv_rows(x: "Tensor", rows: StateRows, w: "Tensor", bias: "Tensor | None", silu: bool) -> "Tensor":
    """`causal_conv` on StateRows."""
    from torch.nn import functional

    taps, wide = w.shape[1], x.float().view(rows.count, rows.length, -1)
    total = wide * w[:, taps - 1].float()
    for back in range(1, min(taps, rows.length)):
        shifted = functional.pad(wide[:, : rows.length - back], (0, 0, back, 0))  # the tokens so far back
        if rows.places is not None:
            shifted = shifted.masked_fill((rows.places < back)[..., None], 0.0)
        total = total + shifted * w[:, taps - 1 - back].float()
    total = total if bias is None else total + bias.float()
    return (functional.silu(total) if silu else total).view(x.shape).to(x.dtype)


def scan_rows(u: "Tensor", s: "Tensor", b: "Tensor", c: "Tensor", rate: "Tensor", rows: StateRows) -> "Tensor":
    """`selective_scan` on StateRows where each channel has a rate for each of its states, token after token.

    u [tokens, channels, 1]: steps times x; s [tokens, channels]: steps; b, c [tokens, 1, states]; rate [channels,
    states], below 0. Returns float32 [tokens, channels, 1].
    """
    import torch

    u, s, b, c = (t.reshape(rows.count, rows.length, -1) for t in (u, s, b, c))
    state, out = u.new_zeros(rows.count, *rate.shape), []
    for t in range(rows.length):
        decay = torch.exp(s[:, t, :, None] * rate)
        if rows.places is not None:
            decay = decay * (rows.places[:, t] > 0)[:, None, None]
        state = decay * state + u[:, t, :, None] * b[:, t, None, :]
        out.append((state * c[:, t, None, :]).sum(-1))
    return torch.stack(out, 1).reshape(-1, rate.shape[0], 1)


def delta_rows(q: "Tensor", k: "Tensor", v: "Tensor", log_decay: "Tensor", beta: "Tensor", rows: StateRows) -> "Tensor":
    """The gated delta rule in chunks. Source: Yang et al. 2024, section 3.3.

    q, k, v: float32 [tokens, heads, dim], q and k normed and scaled, as many heads as those of values; log_decay, beta
    [tokens, heads]. Returns float32 [tokens, heads, value_dim].
    """
    return decayed_rows(q, k, v, log_decay, rows, beta)


def decayed_rows(
    q: "Tensor", k: "Tensor", v: "Tensor", log_decay: "Tensor", rows: StateRows, beta: "Tensor | None" = None
) -> "Tensor":
    """Linear attention whose state decays, in chunks; with beta it is the gated delta rule, see delta_rows.

    Without: S = exp(log_decay) * S + k v (outer product), o = q S.
    """
    import torch
    from torch.nn import functional

    chunk = min(CHUNK, rows.length)
    pad = -rows.length % chunk

    def chunks(x: "Tensor") -> "Tensor":
        """[tokens, heads, ...] as [rows, heads, chunks, chunk, ...], zeros behind the end."""
        x = x.reshape(rows.count, rows.length, *x.shape[1:])
        x = functional.pad(x, (0,) * (2 * (x.dim() - 2)) + (0, pad)).movedim(2, 1)
        return x.unflatten(2, (-1, chunk))

    q, k, v, log_decay = (chunks(x) for x in (q, k, v, log_decay))
    total = log_decay.cumsum(-1)  # [rows, heads, chunks, chunk]: of all decays from the chunk's begin
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    goes_on = None
    if rows.places is not None:
        # A token sees those of its document alone: the ones in its chunk that are no further back than its place, and
        # the state before the chunk where its document began before it.
        places = functional.pad(rows.places, (0, pad)).view(rows.count, 1, -1, chunk)
        at = torch.arange(chunk, device=q.device)
        earlier = earlier & (at[:, None] - at[None, :] <= places[..., None])
        goes_on = (places > at)[..., None]  # [rows, 1, chunks, chunk, 1]
    # Of a token's decays behind another one, added up by themselves: a difference of totals would have bits of what
    # lies before both, and documents would be told of each other.
    behind = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril(-1)
    sums = log_decay[..., :, None].expand(*log_decay.shape, chunk).masked_fill(~behind, 0.0).cumsum(-2)
    between = sums.masked_fill(~earlier, float("-inf")).exp()
    begin = total.exp()[..., None]
    lasting = begin if goes_on is None else begin * goes_on
    from_values, from_state = (v, None) if beta is None else _corrections(k, v, chunks(beta), between, lasting)
    scores = q @ k.mT * between
    reads = q * lasting
    writes = k * between[..., -1, :, None]
    keeps = lasting[..., -1:, :]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        u = from_values[:, :, i]
        if from_state is not None:
            u = u - from_state[:, :, i] @ state
        out.append(reads[:, :, i] @ state + scores[:, :, i] @ u)
        state = keeps[:, :, i] * state + writes[:, :, i].mT @ u
    rule = torch.stack(out, 2).flatten(2, 3)[:, :, : rows.length]  # [rows, heads, length, value_dim]
    return rule.transpose(1, 2).flatten(0, 1)


def _corrections(
    k: "Tensor", v: "Tensor", beta: "Tensor", between: "Tensor", lasting: "Tensor"
) -> "tuple[Tensor, Tensor]":
    """What each token writes for its key, [..., chunk, value_dim], and what it takes from that for the state before the
    chunk, [..., chunk, key_dim].

    What each token corrects depends on what those before it in the chunk have corrected: a triangular system. between:
    what stays of each token's writing at each later one; lasting: what stays of the state before the chunk.
    """
    import torch

    scaled = beta[..., None] * k
    system = (scaled @ k.mT * between).tril(-1)
    values, state = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (beta[..., None] * v, scaled * lasting)
    )
    return values, state
