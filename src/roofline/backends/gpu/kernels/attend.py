"""Paged attention: what is launched for a step, what it costs, and what of it is compiled ahead.

The kernels are in attend_kernels.py. One serves decoding, verification and chunks of prompts: a program takes some
tokens x the heads that share one kv head, and finds its segment by itself. Where that makes few programs, they get an
axis of splits over the keys, and a second kernel merges those.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.compilation import Compilation, pointers
from roofline.backends.gpu.kernels.attend_kernels import SPLIT, attend_kernel, merge_kernel
from roofline.backends.gpu.tiles import Tile
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import Chip

NAME, MERGE = "attend", "attend_merge"
LARGEST_HEAD = 256
REGIMES = (("decode", 16), ("verify", 32))  # rows of a segment at most; with more it is "prefill"
PROGRAMS = 512  # keep any device busy
WIDE = 2**31  # elements of a cache: from here on their places need 64 bits
PARTIAL_ROWS = 512  # of workspace for each of these programs, at most


@dataclass(frozen=True)
class Launch:
    """How steps are cut into programs; made by `prepare`.

    heads, kv_heads, head_dim, window, exact: of the layer; tile, merge_tile: of the two kernels; head_rows: rows of a
    block that hold one token; max_query: queries of a segment; blocks: an upper bound, over all segments; splits:
    programs that share the keys of one block, 1: none, and no merge.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    exact: bool
    tile: Tile
    merge_tile: Tile
    head_rows: int
    max_query: int
    blocks: int
    splits: int

    @property
    def queries(self) -> int:
        """Tokens of a block."""
        return self.tile.sizes["BLOCK_M"] // self.head_rows

    @property
    def head_blocks(self) -> int:
        """Programs that cover the heads of one token."""
        return self.kv_heads * -(-self.heads // self.kv_heads // self.head_rows)

    def constants(self) -> dict[str, Any]:
        """Constants that both kernels have."""
        return {
            "GROUP": self.heads // self.kv_heads, "HEAD_ROWS": self.head_rows, "DIM": self.head_dim,
            "BLOCK_D": _padded(self.head_dim), "BLOCK_M": self.tile.sizes["BLOCK_M"],
            "SINGLE": self.max_query <= self.queries, "WINDOW": self.window, "EXACT": self.exact,
        }  # fmt: skip

    def attend_constants(self, capped: bool, alibi: bool, wide: bool = False) -> dict[str, Any]:
        """All constants of the first kernel."""
        kinds = {"PARTIAL": self.splits > 1, "CAPPED": capped, "ALIBI": alibi, "WIDE": wide}
        return {**self.constants(), **self.tile.sizes, **kinds}


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def prepare(
    chip: Chip,
    *,
    tokens: int,
    segments: int,
    max_query: int,
    max_context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int = 0,
    exact: bool = False,
    element_bytes: int = 2,
    cache_bytes: int = 2,
    programs: int = PROGRAMS,
) -> Launch:
    """The launch of steps with at most these tokens, segments, queries of one segment, and keys of one segment.

    exact: a row's bits depend neither on its company nor on how its text was cut into steps. element_bytes: of q;
    cache_bytes: of k and v. programs: as many as keep the device busy; keys are split where there are not half as many,
    if `workspace_limit` allows. Nothing depends on what the step's fields hold, so that a launch can be captured in a
    graph. Raises UnsupportedError for a head_dim that is no multiple of 8, or above 256.
    """
    if head_dim % 8 or not 0 < head_dim <= LARGEST_HEAD:
        raise UnsupportedError(f"heads of {head_dim} dimensions", f"multiples of 8 up to {LARGEST_HEAD} are", ())
    rows = triton.next_power_of_2(heads // kv_heads)
    regime = next((name for name, limit in REGIMES if rows * max_query <= limit), "prefill")
    facts: dict[str, Any] = {"regime": "exact" if exact else regime, "dim": _padded(head_dim)}
    facts |= {"bytes": element_bytes, "cache": cache_bytes}
    tile, merge_tile = _tile(NAME, chip, exact, **facts), _tile(MERGE, chip, exact)
    launch = Launch(
        heads, kv_heads, head_dim, window, exact, tile, merge_tile,
        head_rows=min(rows, tile.sizes["BLOCK_M"]), max_query=max_query, blocks=segments, splits=1,
    )  # fmt: skip
    if max_query > launch.queries:
        launch = replace(launch, blocks=tokens // launch.queries + segments)
    split = replace(launch, splits=_splits(launch, max_context, programs))
    return split if workspace_floats(split, tokens) <= workspace_limit(head_dim, programs) else launch


def _tile(kernel: str, chip: Chip, exact: bool, **facts: Any) -> Tile:
    tile = tiles.choose(kernel, chip, **facts)
    return replace(tile, options={**tile.options, "enable_fp_fusion": False}) if exact else tile


def _splits(launch: Launch, max_context: int, programs: int) -> int:
    """As many as there are programs to spare for, or in the exact order all that there can be."""
    first = launch.window + launch.max_query - 1 + SPLIT.value - 1  # keys from the first split that a window reaches
    there = triton.cdiv(min(max_context, first) if launch.window else max_context, SPLIT.value)
    spare = min(there, programs // (launch.blocks * launch.head_blocks))
    return 1 if spare < 2 else there if launch.exact else spare


def workspace_floats(launch: Launch, tokens: int) -> int:
    """float32 elements that a launch over `tokens` rows needs as workspace; 0 without splits."""
    return tokens * launch.heads * launch.splits * (launch.head_dim + 2) if launch.splits > 1 else 0


def workspace_limit(head_dim: int, programs: int = PROGRAMS) -> int:
    """The most that any launch needs."""
    return programs * PARTIAL_ROWS * (head_dim + 2)


def _factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """The kernel's `scale` and `cap`, with the constants of 2^x and tanh in them."""
    log2e = math.log2(math.e)
    return (2 * log2e * scale / soft_cap, soft_cap * log2e) if soft_cap else (scale * log2e, 0.0)


def attend(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seg_start: Tensor,
    context_len: Tensor,
    page_start: Tensor,
    pages: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    slopes: Tensor | None = None,
    workspace: Tensor | None = None,
    out: Tensor,
) -> None:
    """`ops.attend` over a paged cache that holds this step's keys already.

    q [tokens, heads * head_dim], its rows may be apart; k, v [pages, kv_heads, 16, head_dim], each page contiguous, in
    q's dtype or the chip's float8; seg_start, page_start int32 [segments + 1], context_len int32 [segments], pages
    int32: fields of ops/batch.py, where the last segments may be empty; slopes float32 [heads], of ALiBi:
    `ops.attention.log2_slopes`; workspace float32 [workspace_floats]; out [tokens, heads * head_dim], contiguous, in
    q's dtype: rows of no segment stay as they were.
    """
    tokens, splits = q.shape[0], launch.splits
    partial, state = out, out
    if splits > 1:
        assert workspace is not None
        assert workspace.numel() >= workspace_floats(launch, tokens), "a workspace for another launch"
        stop = tokens * launch.heads * splits * launch.head_dim
        partial, state = workspace[:stop], workspace[stop:]
    assert k.stride() == v.stride(), "pages of k and v lie differently"
    segments, kv_heads = context_len.shape[0], launch.kv_heads
    wide = k.shape[0] * k.stride(0) >= WIDE
    attend_kernel[(launch.blocks, launch.head_blocks, splits)](
        q, k, v, out, partial, state, q if slopes is None else slopes, seg_start, context_len, page_start, pages,
        segments, kv_heads, splits, q.stride(0), k.stride(0), *_factors(scale, soft_cap),
        **launch.attend_constants(soft_cap > 0, slopes is not None, wide), **launch.tile.compiler(),
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(launch.blocks, launch.heads, min(launch.max_query, launch.queries))](
            out, partial, state, seg_start, context_len, segments, kv_heads, splits,
            **launch.constants(), **launch.merge_tile.launch(),
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
        seen = min(window, context) if window else context
        growing = max(0, queries - (context - seen))  # the first queries, which see fewer keys than the last
        pairs += queries * seen - growing * (growing - 1) // 2
        keys += min(context, seen + queries - 1)
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
    for exact in (False, True):
        yield _merge_compilation(chip, exact)


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
    capped: bool = False, alibi: bool = False,
) -> Compilation:  # fmt: skip
    launch = _prepared(chip, head_dim, group, regime, window, 1 if cache else 2)
    kinds = [f" cache={cache}"] * bool(cache)
    kinds += [f" window={window}"] * bool(window) + [" soft_cap"] * capped + [" alibi"] * alibi
    strides = ("q_row", "page_stride")
    counts = ("segments", "kv_heads", "splits", *strides)
    constants = launch.attend_constants(capped, alibi)
    partial = "f32" if constants["PARTIAL"] else dtype  # out and q stand for what is not there
    signature = {
        **pointers(q=dtype, k=cache or dtype, v=cache or dtype, out=dtype, partial=partial, state=partial),
        **pointers(slopes="f32" if alibi else dtype),
        **pointers(seg_start="i32", context_len="i32", page_start="i32", pages="i32"),
        **dict.fromkeys(counts, "i32"), "scale": "fp32", "cap": "fp32",
    }  # fmt: skip
    return Compilation(
        NAME,
        f"{regime} head_dim={head_dim} group={group} {dtype}{''.join(kinds)}",
        attend_kernel,
        signature,
        constants,
        launch.tile,
        dots=True,
        aligned=strides,
        large=("k", "v"),
    )


def _merge_compilation(chip: Chip, exact: bool) -> Compilation:
    launch = replace(_prepared(chip, 128, 4, "exact" if exact else "decode", 0), splits=2)
    signature = {
        **pointers(out="bf16", partial="f32", state="f32", seg_start="i32", context_len="i32"),
        **dict.fromkeys(("segments", "kv_heads", "splits"), "i32"),
    }  # fmt: skip
    constants, tile = {**launch.constants(), **launch.merge_tile.sizes}, launch.merge_tile
    return Compilation(MERGE, f"head_dim=128 exact={exact}", merge_kernel, signature, constants, tile, dots=False)
