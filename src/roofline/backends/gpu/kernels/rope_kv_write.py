"""q, k, v of a step's tokens: heads normalised and turned, q to where attend reads it, k and v into the paged cache.

Or q and a compressed row, where the cache holds such rows alone.

float32 from the load to the one rounding at the store. RoPE: Su et al. 2021; norms of single heads: Qwen3.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips.chips import Chip
from roofline.ops.batch import PAGE_TOKENS

NAME = "rope_kv_write"
FP8 = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}


@triton.jit
def _write(q, k, v, q_at, k_at, v_at, value, column, q_mask, k_mask, v_mask, FP8_MAX: tl.constexpr):
    """A tile [heads, columns] to the three places; each head goes to one of them."""
    tl.store(q + q_at + column, value.to(q.dtype.element_ty), mask=q_mask)
    if FP8_MAX > 0:  # saturate; comparisons leave NaN as it is
        value = tl.where(value > FP8_MAX, FP8_MAX, tl.where(value < -FP8_MAX, -FP8_MAX, value))
    tl.store(k + k_at + column, value.to(k.dtype.element_ty), mask=k_mask)
    tl.store(v + v_at + column, value.to(v.dtype.element_ty), mask=v_mask)


@triton.jit
def _norm_weight(q_norm, k_norm, column, mask, is_q, is_v):
    of_q = tl.load(q_norm + column, mask=mask, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + column, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_v, 1.0, tl.where(is_q, of_q, of_k))


@triton.jit(do_not_specialize=["first_head", "heads", "kv_heads"])
def _rope_kv_write(
    qkv, positions, slots, cos, sin, q_norm, k_norm, factors, q, k, v,
    qkv_stride, q_stride, page_stride, first_head, heads, kv_heads, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
    SCALED: tl.constexpr, VALUES: tl.constexpr,
    FP8_MAX: tl.constexpr, PAGE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """VALUES: whether v follows k, in what is read and in the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = (first_head + tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]  # q's, then k's, then v's
    inside = head < heads + (2 if VALUES else 1) * kv_heads
    is_q, is_k = head < heads, (head >= heads) & (head < heads + kv_heads)
    is_v = (head >= heads + kv_heads) & inside
    slot = tl.load(slots + token)
    place = slot // PAGE * page_stride + slot % PAGE * HEAD_DIM  # of kv head 0
    q_at = token * q_stride + head * HEAD_DIM
    k_at = place + (head - heads) * (PAGE * HEAD_DIM)
    v_at = place + (head - heads - kv_heads) * (PAGE * HEAD_DIM)
    source = qkv + token * qkv_stride + head * HEAD_DIM

    squares = tl.zeros((HEADS, 1), tl.float32)
    if HALF > 0:  # the dimensions that turn, as pairs (a, b)
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        paired = pair < HALF
        columns = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        a_at, b_at = pair, pair + HALF
        if INTERLEAVED:
            a_at, b_at = 2 * pair, 2 * pair + 1
            turned = tl.load(source + columns, mask=inside & (columns < 2 * HALF), other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(turned, (HEADS, HALF_BLOCK, 2)))
        else:
            a = tl.load(source + a_at, mask=inside & paired, other=0.0).to(tl.float32)
            b = tl.load(source + b_at, mask=inside & paired, other=0.0).to(tl.float32)
        squares += tl.sum(a * a + b * b, axis=1)[:, None]
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        resting = rest < HEAD_DIM
        rest_values = tl.load(source + rest, mask=inside & resting, other=0.0).to(tl.float32)
        squares += tl.sum(rest_values * rest_values, axis=1)[:, None]

    if NORM:
        scale = tl.where(is_v, 1.0, tl.math.rsqrt(squares / HEAD_DIM + eps))
    if SCALED:
        factor = tl.where(is_q, tl.load(factors + tl.load(positions + token)), 1.0)
    if HALF > 0:
        if NORM:
            of_a = _norm_weight(q_norm, k_norm, a_at, paired, is_q, is_v)
            of_b = _norm_weight(q_norm, k_norm, b_at, paired, is_q, is_v)
            a *= scale if NORM_LAST else scale * of_a  # a rotation leaves the sum of squares as it is
            b *= scale if NORM_LAST else scale * of_b
        angle = tl.load(positions + token).to(tl.int64) * HALF + pair
        c = tl.where(is_v, 1.0, tl.load(cos + angle, mask=paired, other=1.0))
        s = tl.where(is_v, 0.0, tl.load(sin + angle, mask=paired, other=0.0))
        turned_a, turned_b = tl.where(is_v, a, a * c - b * s), tl.where(is_v, b, b * c + a * s)
        if NORM_LAST:
            turned_a *= of_a
            turned_b *= of_b
        if SCALED:
            turned_a, turned_b = turned_a * factor, turned_b * factor
        if INTERLEAVED:
            out, mask = tl.reshape(tl.join(turned_a, turned_b), (HEADS, 2 * HALF_BLOCK)), columns < 2 * HALF
            _write(q, k, v, q_at, k_at, v_at, out, columns, is_q & mask, is_k & mask, is_v & mask, FP8_MAX)
        else:
            _write(q, k, v, q_at, k_at, v_at, turned_a, a_at, is_q & paired, is_k & paired, is_v & paired, FP8_MAX)
            _write(q, k, v, q_at, k_at, v_at, turned_b, b_at, is_q & paired, is_k & paired, is_v & paired, FP8_MAX)
    if 2 * HALF < HEAD_DIM:
        if NORM:
            rest_values *= scale * _norm_weight(q_norm, k_norm, rest, resting, is_q, is_v)
        if SCALED:
            rest_values *= factor
        _write(q, k, v, q_at, k_at, v_at, rest_values, rest, is_q & resting, is_k & resting, is_v & resting, FP8_MAX)


def rope_kv_write(
    chip: Chip, qkv: Tensor, positions: Tensor, slots: Tensor, turns: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None, eps: float, *, interleaved: bool, q: Tensor | None, k: Tensor,
    v: Tensor | None, factors: Tensor | None = None, norm_last: bool = False,
) -> None:  # fmt: skip
    """q [tokens, heads * head_dim] and this layer's pages k, v [pages, kv_heads, 16, head_dim] from qkv.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim], rows may lie apart: q, k, v side by side. positions int32 [tokens];
    those of rows beyond the step must lie in the tables too, as zeros and stale ones do. slots int64 [tokens]: of
    kernels/slots.py. turns: cos and sin, float32 [positions, dim / 2], dim <= head_dim (the other dimensions pass
    through), or None: no rope. norms: weights [head_dim] of an RMS norm over each head of q and k, before rope or,
    norm_last, behind it. interleaved: pairs are (2i, 2i + 1) instead of (i, i + dim / 2). q None: only k and v are
    written, q is read in qkv. v None: qkv has none, and the cache holds k alone (`ops.rope_latent_write`). k and v may
    be 8-bit floats of the chip's flavour; values beyond their largest become it.
    Raises UnsupportedError for another flavour.
    """
    tokens, kv_heads, head_dim = qkv.shape[0], k.shape[1], k.shape[3]
    stored = kv_heads if v is None else 2 * kv_heads
    heads = qkv.shape[1] // head_dim - stored
    assert v is None or k.stride() == v.stride(), "pages of k and v lie differently"
    assert k.stride()[1:] == (PAGE_TOKENS * head_dim, head_dim, 1), "a page lies apart"
    if FP8.get(k.dtype, chip.fp8) != chip.fp8:
        dtypes = ("bf16", "f16", chip.fp8) if chip.fp8 else ("bf16", "f16")
        raise UnsupportedError(f"a cache of {FP8[k.dtype]} on {chip.name}", "its instructions do not read it", dtypes)
    half = turns[0].shape[1] if turns else 0
    cos, sin = turns or (slots, slots)
    q_norm, k_norm = norms or (slots, slots)
    constants = _constants(
        head_dim, half, interleaved, norms is not None, factors is not None, k.dtype, norm_last, v is not None
    )
    tile = tiles.choose(NAME, chip, head_dim=head_dim)
    first = heads if q is None else 0
    groups = cdiv(heads + stored - first, tile.sizes["HEADS"])
    _rope_kv_write[(tokens, groups)](
        qkv, positions, slots, cos, sin, q_norm, k_norm, slots if factors is None else factors,
        qkv if q is None else q, k, k if v is None else v,
        qkv.stride(0), 0 if q is None else q.stride(0), k.stride(0), first, heads, kv_heads, eps,
        **constants, **tile.launch(),
    )  # fmt: skip


def _constants(
    head_dim: int,
    half: int,
    interleaved: bool,
    norm: bool,
    scaled: bool,
    cache: torch.dtype,
    norm_last: bool = False,
    values: bool = True,
) -> dict[str, object]:
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "NORM": norm,
        "NORM_LAST": norm and norm_last,
        "SCALED": scaled,
        "VALUES": values,
        "FP8_MAX": torch.finfo(cache).max if cache in FP8 else 0.0,
        "PAGE": PAGE_TOKENS,
        "HALF_BLOCK": next_power_of_2(max(half, 1)),
        "REST_BLOCK": next_power_of_2(max(head_dim - 2 * half, 1)),
    }


def cost(tokens: int, heads: int, kv_heads: int, head_dim: int, cache_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch with rope, in 16 bits; cache_bytes: of one cached element."""
    turned = tokens * (heads + kv_heads) * head_dim
    values = 2 * tokens * kv_heads * head_dim
    return 3 * turned, 2 * (tokens * heads * head_dim + values) + 2 * tokens * heads * head_dim + cache_bytes * values


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Both styles, the heads of models we know, with norms, partial and no rope, factors by position, and the chip's
    8-bit cache."""
    bf16, dtypes = torch.bfloat16, {name: dtype for dtype, name in FP8.items()}
    cases = [(64, 32, False, "", bf16), (128, 64, False, "", bf16), (128, 64, False, "norm", bf16)]
    cases += [(128, 64, True, "", bf16), (80, 16, False, "", bf16), (128, 0, False, "", bf16)]
    cases += [(128, 64, False, "scaled", bf16), (576, 32, True, "rows", bf16)]
    if chip.fp8:
        cases.append((128, 64, False, "", dtypes[chip.fp8]))
    for head_dim, half, interleaved, form, cache in cases:
        norm, scaled, rows = form == "norm", form == "scaled", form == "rows"
        tile = tiles.choose(NAME, chip, head_dim=head_dim)
        stored = FP8.get(cache, "bf16")
        types = pointers(
            qkv="bf16", positions="i32", slots="i64", **dict.fromkeys(("cos", "sin"), "f32" if half else "i64"),
            **dict.fromkeys(("q_norm", "k_norm"), "f32" if norm else "i64"),  # slots stand for what is not there
            factors="f32" if scaled else "i64",
            q="bf16", k=stored, v=stored,
        )  # fmt: skip
        case = f"head_dim={head_dim} dim={2 * half} interleaved={interleaved} norm={norm} cache={stored}"
        case += " scaled" if scaled else " rows" if rows else ""
        yield Compilation(
            kernel=NAME,
            case=case,
            function=_rope_kv_write,
            signature=types | {"eps": "fp32"},
            constants=_constants(head_dim, half, interleaved, norm, scaled, cache, values=not rows),
            tile=tile,
            aligned=("qkv_stride", "q_stride", "page_stride"),
            large=("k", "v"),
        )
