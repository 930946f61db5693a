"""Attention over a cache of compressed rows: what is launched for a step, what it costs, what is compiled ahead.

Of a token and layer the cache holds one row, from which keys and values of every head would be made; queries have been
taken to where the rows are (`ops.heads.head_linear`). The kernel is in attend_rows_kernel.py.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from roofline.backends.gpu.kernels import attend as whole
from roofline.backends.gpu.kernels.attend_kernels import merge_kernel
from roofline.backends.gpu.kernels.attend_launches import MERGE, ROWS, Launch, prepare, state_start, workspace_floats
from roofline.backends.gpu.kernels.attend_rows_kernel import attend_rows_kernel
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip


def attend_rows(
    launch: Launch, q: Tensor, rows: Tensor, seg_start: Tensor, context_len: Tensor, page_start: Tensor, pages: Tensor,
    *, scale: float, workspace: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    """`ops.attend` with `value_dim` over a paged cache that holds this step's rows already.

    q [tokens, heads * (turned + value_dim)], its rows may be apart; rows [pages, 1, 16, turned + value_dim], each page
    contiguous, in q's dtype or the chip's float8; out [tokens, heads * value_dim], contiguous, in q's dtype. launch:
    of `prepare` with `turned`; fields of the step and workspace as for `attend`.
    """
    splits = launch.splits
    partial, state = out, out
    if splits > 1:
        assert workspace is not None
        assert workspace.numel() >= workspace_floats(launch), "a workspace for another launch"
        stop = state_start(launch)
        partial, state = workspace[:stop], workspace[stop:]
    assert rows.shape[3] == launch.turned + launch.head_dim, "rows of another width"
    wide = rows.shape[0] * rows.stride(0) >= whole.WIDE
    counts = launch.first_segment, launch.segments - launch.first_segment
    attend_rows_kernel[(launch.blocks, launch.head_blocks, splits)](
        q, rows, out, partial, state, seg_start, context_len, page_start, pages,
        *counts, splits, q.stride(0), rows.stride(0), scale * math.log2(math.e),
        **launch.rows_constants(wide=wide), **launch.tile.compiler(),
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(launch.blocks, launch.heads, min(launch.max_query, launch.queries))](
            out, partial, state, q, seg_start, context_len, *counts, launch.kv_heads, splits,
            **launch.merge_constants(), **launch.merge_tile.compiler(),
        )  # fmt: skip


def cost(
    segments: Iterable[tuple[int, int]], *, heads: int, turned: int, value_dim: int, cache_bytes: int = 2
) -> tuple[int, int]:
    """(FLOPs, bytes) of one step of segments (queries, context): pairs that are seen, rows read once."""
    pairs = keys = tokens = 0
    for queries, context in segments:
        pairs += queries * context - queries * (queries - 1) // 2
        keys += context
        tokens += queries
    width = turned + value_dim
    moved = keys * width * cache_bytes + 2 * tokens * heads * (width + value_dim)
    return 2 * pairs * heads * (width + value_dim), moved


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Rows of the families we know, each regime, and the merge of their splits."""
    for regime in ("decode", "verify", "prefill", "exact"):
        yield _compilation(chip, 64, 512, regime)
    yield _compilation(chip, 32, 256, "prefill")
    for regime in ("decode", "prefill"):
        yield _compilation(chip, 64, 512, regime, wide=True)
        yield _compilation(chip, 64, 512, regime, dtype="f16")
        if chip.fp8:
            yield _compilation(chip, 64, 512, regime, cache=chip.fp8)
    for exact in (False, True):
        launch = replace(_prepared(chip, 64, 512, "exact" if exact else "decode", 2), splits=2)
        types = pointers(out="bf16", partial="f32", state="f32", sinks="bf16", seg_start="i32", context_len="i32")
        yield Compilation(
            kernel=MERGE,
            case=f"rows of 512 exact={exact}",
            function=merge_kernel,
            signature=types,
            constants=launch.merge_constants(),
            tile=launch.merge_tile,
        )


def _prepared(chip: Chip, turned: int, value_dim: int, regime: str, cache_bytes: int) -> Launch:
    heads, tokens, max_query = {
        "decode": (16, 8, 1), "verify": (32, 8, 1), "prefill": (128, 2048, 2048), "exact": (128, 2048, 2048),
    }[regime]  # fmt: skip
    return prepare(
        chip, tokens=tokens, segments=8, max_query=max_query, max_context=4096, heads=heads, kv_heads=1,
        head_dim=value_dim, turned=turned, exact=regime == "exact", cache_bytes=cache_bytes,
    )  # fmt: skip


def _compilation(
    chip: Chip, turned: int, value_dim: int, regime: str, *, dtype: str = "bf16", cache: str = "", wide: bool = False
) -> Compilation:
    launch = _prepared(chip, turned, value_dim, regime, 1 if cache else 2)
    partial = "f32" if launch.splits > 1 else dtype  # out stands for what is not there
    kinds = f" cache={cache}" * bool(cache) + " wide" * wide
    return Compilation(
        kernel=ROWS,
        case=f"{regime} {turned} + {value_dim} heads={launch.heads} {dtype}{kinds}",
        function=attend_rows_kernel,
        signature={
            **pointers(q=dtype, rows=cache or dtype, out=dtype, partial=partial, state=partial),
            **pointers(seg_start="i32", context_len="i32", page_start="i32", pages="i32"),
            "scale": "fp32",
        },
        constants=launch.rows_constants(wide=wide),
        tile=launch.tile,
        dots=True,
        aligned=("q_row", "page_stride"),
        large=("rows",),
    )
