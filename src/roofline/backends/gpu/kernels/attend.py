"""Paged attention: what is launched for a step, what it costs, and what of it is compiled ahead.

The kernels are in attend_kernels.py. One serves decoding, verification and chunks of prompts: a program takes some
tokens x the heads that share one kv head, and finds its segment by itself. Where that makes few programs, they get an
axis of splits over the keys, and a second kernel merges those. A step of decodes and chunks of prompts is two launches:
a decode would waste most of a chunk's tile, and the chunk's programs, which are many, would leave its keys unsplit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from roofline.backends.gpu.kernels.attend_kernels import attend_kernel, merge_kernel
from roofline.backends.gpu.kernels.attend_launches import MERGE, NAME, Launch, prepare, state_start, workspace_floats
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

WIDE = 2**31  # elements of a cache: from here on their places need 64 bits


def _factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """The kernel's `scale` and `cap`, with the constants of 2^x and tanh in them."""
    log2e = math.log2(math.e)
    return (2 * log2e * scale / soft_cap, soft_cap * log2e) if soft_cap else (scale * log2e, 0.0)


def attend(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, seg_start: Tensor, context_len: Tensor, page_start: Tensor,
    pages: Tensor, *, scale: float, soft_cap: float = 0.0, slopes: Tensor | None = None,
    sinks: Tensor | None = None, workspace: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    """`ops.attend` over a paged cache that holds this step's keys already.

    q [tokens, heads * head_dim], its rows may be apart; k, v [pages, kv_heads, 16, head_dim], each page contiguous, in
    q's dtype or the chip's float8; seg_start, page_start int32 [segments + 1], context_len int32 [segments], pages
    int32: fields of ops/batch.py, whole whatever segments are the launch's, the last of which may be empty; slopes
    float32 [heads], of ALiBi: `ops.attention.log2_slopes`; sinks float32 [heads]: a score of each head that has no
    value, merged behind all keys; workspace float32 [workspace_floats]; out [tokens, heads * head_dim], contiguous, in
    q's dtype: rows of no segment of the launch stay as they were.
    """
    splits = launch.splits
    partial, state = out, out
    if splits > 1:
        assert workspace is not None
        assert workspace.numel() >= workspace_floats(launch), "a workspace for another launch"
        stop = state_start(launch)
        partial, state = workspace[:stop], workspace[stop:]
    assert k.stride() == v.stride(), "pages of k and v lie differently"
    counts = launch.first_segment, launch.segments - launch.first_segment, launch.kv_heads, splits
    wide = k.shape[0] * k.stride(0) >= WIDE
    slope_values, sink_values = (q if values is None else values for values in (slopes, sinks))  # q stands for none
    bends = {"capped": soft_cap > 0, "alibi": slopes is not None, "sinks": sinks is not None}
    attend_kernel[(launch.blocks, launch.head_blocks, splits)](
        q, k, v, out, partial, state, slope_values, sink_values, seg_start, context_len, page_start, pages,
        *counts, q.stride(0), k.stride(0), *_factors(scale, soft_cap),
        **launch.attend_constants(**bends, wide=wide), **launch.tile.compiler(),
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(launch.blocks, launch.heads, min(launch.max_query, launch.queries))](
            out, partial, state, sink_values, seg_start, context_len, *counts,
            **launch.merge_constants(sinks is not None), **launch.merge_tile.compiler(),
        )  # fmt: skip


def cost(
    segments: Iterable[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int = 0,
    element_bytes: int = 2,
    cache_bytes: int = 2,
) -> tuple[int, int]:
    """(FLOPs, bytes) of one step of segments (queries, context): pairs that are seen, keys read once a kv head."""
    pairs = keys = rows = 0
    for queries, context in segments:
        visible = min(window, context) if window else context
        growing = max(0, queries - (context - visible))  # the first queries, which see fewer keys than the last
        pairs += queries * visible - growing * (growing - 1) // 2
        keys += min(context, visible + queries - 1)
        rows += queries
    io = 2 * rows * heads * head_dim * element_bytes
    return 4 * pairs * heads * head_dim, 2 * keys * kv_heads * head_dim * cache_bytes + io


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Decoding and chunks of prompts for the usual heads, one of each further kind, and the merge."""
    shapes = [(dim, group) for dim in (64, 128) for group in (1, 4, 8)]
    for head_dim, group in shapes:
        yield _compilation(chip, head_dim, group, "decode")
        yield _compilation(chip, head_dim, group, "prefill")
    for head_dim in (80, 256):
        yield _compilation(chip, head_dim, 4, "decode")
    for regime in ("verify", "exact"):
        yield _compilation(chip, 128, 4, regime)
    if chip.fp8:
        for regime in ("decode", "verify", "prefill", "exact"):
            yield _compilation(chip, 128, 4, regime, cache=chip.fp8)
    for regime in ("decode", "prefill"):
        yield _compilation(chip, 128, 4, regime, dtype="f16")
        yield _compilation(chip, 128, 4, regime, window=4096)
        yield _compilation(chip, 128, 4, regime, capped=True)
        yield _compilation(chip, 128, 1, regime, alibi=True)
        yield _compilation(chip, 128, 4, regime, wide=True)
    for regime, window in (("decode", 0), ("prefill", 0), ("prefill", 128), ("exact", 128)):
        yield _compilation(chip, 64, 8, regime, window=window, sinks=True)
    for exact in (False, True):
        for sinks in (False, True):
            yield _merge_compilation(chip, exact, sinks)


def _prepared(chip: Chip, head_dim: int, group: int, regime: str, window: int, cache_bytes: int = 2) -> Launch:
    tokens, max_query, programs = {
        "decode": (8, 1, 4096), "verify": (40, max(1, 32 // group), 4096), "exact": (2048, 2048, 512),
        "prefill": (2048, 2048, 512),
    }[regime]  # fmt: skip
    return prepare(
        chip, tokens=tokens, segments=8, max_query=max_query, max_context=4096, heads=8 * group, kv_heads=8,
        head_dim=head_dim, window=window, exact=regime == "exact", cache_bytes=cache_bytes, programs=programs,
    )  # fmt: skip


def _compilation(
    chip: Chip, head_dim: int, group: int, regime: str, *, dtype: str = "bf16", cache: str = "", window: int = 0,
    capped: bool = False, alibi: bool = False, sinks: bool = False, wide: bool = False,
) -> Compilation:  # fmt: skip
    launch = _prepared(chip, head_dim, group, regime, window, 1 if cache else 2)
    launch = replace(launch, splits=1) if sinks else launch  # with splits, the merge alone knows of them
    kinds = [f" cache={cache}"] * bool(cache) + [f" window={window}"] * bool(window)
    kinds += [" soft_cap"] * capped + [" alibi"] * alibi + [" sinks"] * sinks + [" wide"] * wide
    constants = launch.attend_constants(capped=capped, alibi=alibi, sinks=sinks, wide=wide)
    partial = "f32" if constants["PARTIAL"] else dtype  # out and q stand for what is not there
    signature = {
        **pointers(q=dtype, k=cache or dtype, v=cache or dtype, out=dtype, partial=partial, state=partial),
        **pointers(slopes="f32" if alibi else dtype, sinks="f32" if sinks else dtype),
        **pointers(seg_start="i32", context_len="i32", page_start="i32", pages="i32"),
        "scale": "fp32", "cap": "fp32",
    }  # fmt: skip
    return Compilation(
        kernel=NAME,
        case=f"{regime} head_dim={head_dim} group={group} {dtype}{''.join(kinds)}",
        function=attend_kernel,
        signature=signature,
        constants=constants,
        tile=launch.tile,
        dots=True,
        aligned=("q_row", "page_stride"),
        large=("k", "v"),
    )


def _merge_compilation(chip: Chip, exact: bool, sinks: bool) -> Compilation:
    launch = replace(_prepared(chip, 128, 4, "exact" if exact else "decode", 0), splits=2)
    types = pointers(out="bf16", partial="f32", state="f32", sinks="f32" if sinks else "bf16")
    types |= pointers(seg_start="i32", context_len="i32")
    case = f"head_dim=128 exact={exact}{' sinks' * sinks}"
    return Compilation(
        kernel=MERGE,
        case=case,
        function=merge_kernel,
        signature=types,
        constants=launch.merge_constants(sinks),
        tile=launch.merge_tile,
    )
