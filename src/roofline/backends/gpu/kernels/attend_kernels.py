"""Paged attention's two kernels: one for decoding, verification and chunks of prompts, and the merge of splits.

Source: FlashAttention-2 (Dao 2023) for the online softmax, Flash-Decoding for splits over keys; ours lie at fixed
positions. The state of a row is (top, total, acc): the maximum of its scores in units of log2, the sum of
2^(score - top), and the values weighted by those.
"""

import triton
import triton.language as tl

PAGE = tl.constexpr(16)  # ops/batch.py: PAGE_TOKENS
SPLIT = tl.constexpr(256)  # keys; where splits may lie, a part of the reduction order


@triton.jit
def _segment_of(block, seg_start, segments, QUERIES: tl.constexpr):
    """The segment of a block, if segment i has blocks from (rows before it) // QUERIES + i on.

    That leaves every segment enough, and needs no table from the host.
    """
    low = block * 0
    high = low + segments
    base = tl.load(seg_start)
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(seg_start + middle) - base) // QUERIES + middle <= block:
            low = middle
        else:
            high = middle
    return low, block - (tl.load(seg_start + low) - base) // QUERIES - low


@triton.jit
def _locate(seg_start, context_len, segments, QUERIES: tl.constexpr, SINGLE: tl.constexpr):
    """(segment, its first row, its queries, its context, the first query of this block); SINGLE: a block a segment."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most keys: they start first
    if SINGLE:
        segment, index = block, block * 0
    else:
        segment, index = _segment_of(block, seg_start, segments, QUERIES)
    start = tl.load(seg_start + segment)
    return segment, start, tl.load(seg_start + segment + 1) - start, tl.load(context_len + segment), index * QUERIES


@triton.jit
def _spans(queries, context, splits, WINDOW: tl.constexpr, EXACT: tl.constexpr):
    """(where a segment's splits begin, their length): multiples of SPLIT; EXACT: SPLIT itself."""
    origin = context * 0
    if WINDOW > 0:
        origin = tl.maximum(context - queries - WINDOW + 1, 0) // SPLIT * SPLIT
    span = origin * 0 + SPLIT
    if not EXACT:
        span = SPLIT * tl.cdiv(tl.cdiv(context - origin, SPLIT), splits)
    return origin, span


@triton.jit
def _merged(top, total, acc, top_part, total_part, acc_part):
    """The state of [rows] and the keys right of its own; an empty part changes nothing."""
    highest = tl.maximum(top, top_part)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    old, new = tl.exp2(top - finite), tl.exp2(top_part - finite)
    empty = top_part == float("-inf")
    total = tl.where(empty, total, tl.fma(total, old, total_part * new))
    acc = tl.where(empty[:, None], acc, tl.fma(acc, old[:, None], acc_part * new[:, None]))
    return highest, total, acc


@triton.jit
def _scores(dots, at, keys, slope, scale, cap, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """Dot products as scores in units of log2, where that is more than one factor.

    cap * tanh(x / cap) = cap * (1 - 2 / (2^(x * 2 log2(e) / cap) + 1)); scale and cap come with their constants.
    """
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp2(dots * scale) + 1.0))
    else:
        scores = dots * scale
    if ALIBI:
        scores += slope[:, None] * (keys[None, :] - at[:, None]).to(tl.float32)
    return scores


@triton.jit
def _block(
    top, total, acc, query, at, slope, first_key, low, end, k, v, pages, k_page, v_page, scale, cap,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state after BLOCK_N more keys. MASKED: some row does not see all of them, or they leave [low, end)."""
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < DIM
    written = (keys >= low) & (keys < end)
    if MASKED:
        page = tl.load(pages + keys // PAGE, mask=written, other=0).to(tl.int64)
    else:
        page = tl.load(pages + keys // PAGE).to(tl.int64)
    k_at = k + (page * k_page + keys % PAGE * DIM)[None, :] + dims[:, None]
    v_at = v + (page * v_page + keys % PAGE * DIM)[:, None] + dims[None, :]
    if DIM == BLOCK_D:
        k_block = tl.load(k_at)  # [dims, keys]; what no one wrote gives scores that are selected away
    else:
        k_block = tl.load(k_at, mask=inside[:, None], other=0.0)
    dots = tl.dot(query, k_block.to(query.dtype), input_precision="ieee")
    if CAPPED or ALIBI:
        scores = _scores(dots, at, keys, slope, scale, cap, CAPPED, ALIBI)
    else:
        scores = dots
    if MASKED:
        seen = keys[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > at[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    if CAPPED or ALIBI:
        highest = tl.maximum(top, tl.max(scores, axis=1))
    else:
        highest = tl.maximum(top, tl.max(scores, axis=1) * scale)
    finite = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    if CAPPED or ALIBI:
        p = tl.exp2(scores - finite[:, None])
    else:
        p = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    if MASKED:
        v_block = tl.load(v_at, mask=written[:, None] & inside[None, :], other=0.0)  # 0 * NaN would be NaN
    elif DIM == BLOCK_D:
        v_block = tl.load(v_at)
    else:
        v_block = tl.load(v_at, mask=inside[None, :], other=0.0)
    old = tl.exp2(top - finite)
    v_block = v_block.to(query.dtype)
    acc_next = tl.dot(p.to(query.dtype), v_block, acc * old[:, None], input_precision="ieee")
    total_next = tl.fma(total, old, tl.sum(p, axis=1))
    if EXACT and MASKED:  # a row decoded alone has not met a block that it sees nothing of
        blind = tl.max(scores, axis=1) == float("-inf")
        total_next = tl.where(blind, total, total_next)
        acc_next = tl.where(blind[:, None], acc, acc_next)
    return highest, total_next, acc_next


@triton.jit
def _keys(
    query, at, slope, first, last, low, end, k, v, pages, k_page, v_page, scale, cap,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, PEEL: tl.constexpr,
):  # fmt: skip
    """A fresh state over the keys [low, end), for queries at positions first to last.

    PEEL: blocks that every row sees whole go without masks; the results are the same.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = low // BLOCK_N * BLOCK_N
    whole_from, whole_to = begin, begin
    if PEEL:
        if WINDOW > 0:
            whole_from = tl.cdiv(tl.maximum(low, last - WINDOW + 1), BLOCK_N) * BLOCK_N
            whole_from = tl.minimum(whole_from, tl.cdiv(end, BLOCK_N) * BLOCK_N)
            for key in range(begin, whole_from, BLOCK_N):
                top, total, acc = _block(
                    top, total, acc, query, at, slope, key, low, end, k, v, pages, k_page, v_page, scale, cap,
                    DIM, BLOCK_D, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, True,
                )  # fmt: skip
        whole_to = tl.maximum(whole_from, tl.minimum(end, first + 1) // BLOCK_N * BLOCK_N)
        for key in range(whole_from, whole_to, BLOCK_N):
            top, total, acc = _block(
                top, total, acc, query, at, slope, key, low, end, k, v, pages, k_page, v_page, scale, cap,
                DIM, BLOCK_D, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, False,
            )  # fmt: skip
    for key in range(whole_to, end, BLOCK_N):
        top, total, acc = _block(
            top, total, acc, query, at, slope, key, low, end, k, v, pages, k_page, v_page, scale, cap,
            DIM, BLOCK_D, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, True,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def attend_kernel(
    q, k, v, out, partial, state, slopes, seg_start, context_len, page_start, pages,
    segments, kv_heads, splits, q_row, k_page, v_page, scale, cap,
    GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PEEL: tl.constexpr, SINGLE: tl.constexpr, PARTIAL: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, kv heads x blocks of their heads, splits or 1). Surplus programs leave at once."""
    QUERIES: tl.constexpr = BLOCK_M // HEAD_ROWS
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEAD_ROWS - 1) // HEAD_ROWS
    segment, start, queries, context, block = _locate(seg_start, context_len, segments, QUERIES, SINGLE)
    if block >= queries:
        return
    first = context - queries + block
    last = tl.minimum(first + QUERIES, context) - 1
    low, end = first * 0, last + 1
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
    if PARTIAL:
        origin, span = _spans(queries, context, splits, WINDOW, EXACT)
        origin += tl.program_id(2) * span
        low, end = tl.maximum(low, origin), tl.minimum(end, origin + span)
        if low >= end:
            return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    member = tl.program_id(1) % HEAD_BLOCKS * HEAD_ROWS + rows % HEAD_ROWS
    index = block + rows // HEAD_ROWS
    real = (member < GROUP) & (index < queries)
    head = kv_head * GROUP + member
    token = (start + index).to(tl.int64)
    at = tl.minimum(context - queries + index, last)
    query = tl.load(
        q + (token * q_row + head * DIM)[:, None] + dims[None, :], mask=real[:, None] & (dims < DIM)[None, :], other=0.0
    )
    slope = tl.load(slopes + head, mask=real, other=0.0) if ALIBI else scale
    k += kv_head.to(tl.int64) * (PAGE * DIM)
    v += kv_head.to(tl.int64) * (PAGE * DIM)
    pages += tl.load(page_start + segment)

    if PARTIAL or not EXACT:
        top, total, acc = _keys(
            query, at, slope, first, last, low, end, k, v, pages, k_page, v_page, scale, cap,
            DIM, BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, PEEL,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
            top_part, total_part, acc_part = _keys(
                query, at, slope, first, last, tl.maximum(low, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT),
                k, v, pages, k_page, v_page, scale, cap,
                DIM, BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, PEEL,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, top_part, total_part, acc_part)

    row = token * (kv_heads * GROUP) + head
    kept = real[:, None] & (dims < DIM)[None, :]
    if PARTIAL:
        row = row * splits + tl.program_id(2)
        tl.store(state + row * 2, top, mask=real)
        tl.store(state + row * 2 + 1, total, mask=real)
        tl.store(partial + row[:, None] * DIM + dims[None, :], acc, mask=kept)
    else:
        tl.store(out + row[:, None] * DIM + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)


@triton.jit
def merge_kernel(
    out, partial, state, seg_start, context_len, segments, kv_heads, splits,
    GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SINGLE: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row of one head: its splits from left to right. Grid (blocks, heads, queries of a block)."""
    QUERIES: tl.constexpr = BLOCK_M // HEAD_ROWS
    _segment, start, queries, context, block = _locate(seg_start, context_len, segments, QUERIES, SINGLE)
    index = block + tl.program_id(2)
    if index >= queries:
        return
    origin, span = _spans(queries, context, splits, WINDOW, EXACT)
    at = context - queries + index
    low = at * 0
    if WINDOW > 0:
        low = tl.maximum(at - WINDOW + 1, 0)
    row = (start + index).to(tl.int64) * (kv_heads * GROUP) + tl.program_id(1)
    one, dims = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for split in range((low - origin) // span, (at - origin) // span + 1):
        part = row * splits + split + one
        top_part, total_part = tl.load(state + part * 2), tl.load(state + part * 2 + 1)
        acc_part = tl.load(partial + part[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
        top, total, acc = _merged(top, total, acc, top_part, total_part, acc_part)
    kept = out + (row + one)[:, None] * DIM + dims[None, :]
    tl.store(kept, (acc / total[:, None]).to(out.dtype.element_ty), mask=(dims < DIM)[None, :])
