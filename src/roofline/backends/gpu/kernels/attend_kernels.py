"""Paged attention's two kernels: one for decoding, verification and chunks of prompts, and the merge of splits.

Source: FlashAttention-2 (Dao 2023) for the online softmax, Flash-Decoding for splits over keys; ours lie at fixed
positions. The state of a row is (top, total, acc): the maximum of its scores in units of log2, the sum of
2^(score - top), and the values weighted by those. ALONG: the axis of a tile that a row's elements lie along, 1, or 0 in
tiles that lie the other way round (their keys are the left operand of products).
"""

import triton
import triton.language as tl

PAGE = tl.constexpr(16)  # ops/batch.py: PAGE_TOKENS
SPLIT = tl.constexpr(256)  # keys; where splits may lie, a part of the reduction order
LOG2E = tl.constexpr(1.4426950408889634)


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
def _merged(top, total, acc, top_part, total_part, acc_part, ALONG: tl.constexpr):
    """The state of [rows] and the keys right of its own; an empty part changes nothing."""
    highest = tl.maximum(top, top_part)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    old, new = tl.exp2(top - finite), tl.exp2(top_part - finite)
    empty = top_part == float("-inf")
    total = tl.where(empty, total, tl.fma(total, old, total_part * new))
    rescaled = tl.fma(acc, tl.expand_dims(old, ALONG), acc_part * tl.expand_dims(new, ALONG))
    return highest, total, tl.where(tl.expand_dims(empty, ALONG), acc, rescaled)


@triton.jit
def _with_sink(total, acc, top, sink, ALONG: tl.constexpr):
    """(total, acc) of [rows] and the sink of each row's head, as `_merged` makes them of one key without a value."""
    sink *= LOG2E
    highest = tl.maximum(top, sink)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    old = tl.exp2(top - finite)
    return tl.fma(total, old, tl.exp2(sink - finite)), acc * tl.expand_dims(old, ALONG)


@triton.jit
def _scores(dots, at, keys, slope, scale, cap, CAPPED: tl.constexpr, ALIBI: tl.constexpr, ALONG: tl.constexpr):
    """Dot products as scores in units of log2, where that is more than one factor.

    cap * tanh(x / cap) = cap * (1 - 2 / (2^(x * 2 log2(e) / cap) + 1)); scale and cap come with their constants.
    """
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp2(dots * scale) + 1.0))
    else:
        scores = dots * scale
    if ALIBI:
        distance = tl.expand_dims(keys, 1 - ALONG) - tl.expand_dims(at, ALONG)
        scores += tl.expand_dims(slope, ALONG) * distance.to(tl.float32)
    return scores


@triton.jit
def _block(
    top, total, acc, query, at, slope, first_key, low, end, k, v, pages, page_stride, scale, cap,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, ALONG: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The state after BLOCK_N more keys. MASKED: some row does not see all of them, or they leave [low, end). WIDE: the
    cache has more elements than 32 bits count."""
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < DIM
    written = (keys >= low) & (keys < end)
    slot = tl.arange(0, BLOCK_N)
    pages += first_key // PAGE  # blocks are whole pages
    page = tl.load(pages + slot // PAGE, mask=written, other=0) if MASKED else tl.load(pages + slot // PAGE)
    if WIDE:
        page = page.to(tl.int64)
    place = page * page_stride + slot % PAGE * DIM
    k_at = k + tl.expand_dims(place, 1 - ALONG) + tl.expand_dims(dims, ALONG)
    v_at = v + tl.expand_dims(place, ALONG) + tl.expand_dims(dims, 1 - ALONG)
    if DIM == BLOCK_D:
        k_block = tl.load(k_at)  # [dims, keys]; what no one wrote gives scores that are selected away
    else:
        k_block = tl.load(k_at, mask=tl.expand_dims(inside, ALONG), other=0.0)
    k_block = k_block.to(query.dtype)
    if ALONG == 1:
        scores = tl.dot(query, k_block, input_precision="ieee")
    else:
        scores = tl.dot(k_block, query, input_precision="ieee")
    if CAPPED or ALIBI:
        scores = _scores(scores, at, keys, slope, scale, cap, CAPPED, ALIBI, ALONG)
    if MASKED:
        visible = tl.expand_dims(keys, 1 - ALONG) <= tl.expand_dims(at, ALONG)
        if WINDOW > 0:
            visible = visible & (tl.expand_dims(keys, 1 - ALONG) > tl.expand_dims(at - WINDOW, ALONG))
        scores = tl.where(visible, scores, float("-inf"))
    high = tl.max(scores, axis=ALONG)
    highest = tl.maximum(top, high if CAPPED or ALIBI else high * scale)
    finite = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    if CAPPED or ALIBI:
        p = tl.exp2(scores - tl.expand_dims(finite, ALONG))
    else:
        p = tl.exp2(tl.fma(scores, scale, tl.expand_dims(-finite, ALONG)))
    if MASKED:
        v_mask = tl.expand_dims(written, ALONG) & tl.expand_dims(inside, 1 - ALONG)
        v_block = tl.load(v_at, mask=v_mask, other=0.0)  # of what no one wrote: 0 * NaN would be NaN
    elif DIM == BLOCK_D:
        v_block = tl.load(v_at)
    else:
        v_block = tl.load(v_at, mask=tl.expand_dims(inside, 1 - ALONG), other=0.0)
    v_block = v_block.to(query.dtype)
    old = tl.exp2(top - finite)
    acc_next = acc * tl.expand_dims(old, ALONG)
    if ALONG == 1:
        acc_next = tl.dot(p.to(query.dtype), v_block, acc_next, input_precision="ieee")
    else:
        acc_next = tl.dot(v_block, p.to(query.dtype), acc_next, input_precision="ieee")
    total_next = tl.fma(total, old, tl.sum(p, axis=ALONG))
    if EXACT and MASKED:  # a row decoded alone has not met a block that it sees nothing of
        blind = high == float("-inf")
        total_next = tl.where(blind, total, total_next)
        acc_next = tl.where(tl.expand_dims(blind, ALONG), acc, acc_next)
    return highest, total_next, acc_next


@triton.jit
def _keys(
    query, at, slope, first, last, low, end, k, v, pages, page_stride, scale, cap,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, ALONG: tl.constexpr,
    PEEL: tl.constexpr,
):  # fmt: skip
    """A fresh state over the keys [low, end), for queries at positions first to last.

    PEEL: blocks that every row sees whole go without masks; the results are the same.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D] if ALONG == 1 else [BLOCK_D, BLOCK_M], tl.float32)
    begin = low // BLOCK_N * BLOCK_N
    whole_from, whole_to = begin, begin
    if PEEL:
        if WINDOW > 0:
            whole_from = tl.cdiv(tl.maximum(low, last - WINDOW + 1), BLOCK_N) * BLOCK_N
            whole_from = tl.minimum(whole_from, tl.cdiv(end, BLOCK_N) * BLOCK_N)
            for key in range(begin, whole_from, BLOCK_N):
                top, total, acc = _block(
                    top, total, acc, query, at, slope, key, low, end, k, v, pages, page_stride, scale, cap,
                    DIM, BLOCK_D, WIDE, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, ALONG, True,
                )  # fmt: skip
        whole_to = tl.maximum(whole_from, tl.minimum(end, first + 1) // BLOCK_N * BLOCK_N)
        for key in range(whole_from, whole_to, BLOCK_N):
            top, total, acc = _block(
                top, total, acc, query, at, slope, key, low, end, k, v, pages, page_stride, scale, cap,
                DIM, BLOCK_D, WIDE, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, ALONG, False,
            )  # fmt: skip
    for key in range(whole_to, end, BLOCK_N):
        top, total, acc = _block(
            top, total, acc, query, at, slope, key, low, end, k, v, pages, page_stride, scale, cap,
            DIM, BLOCK_D, WIDE, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, ALONG, True,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["first_segment", "segments", "kv_heads", "splits"])
def attend_kernel(
    q, k, v, out, partial, state, slopes, sinks, seg_start, context_len, page_start, pages,
    first_segment, segments, kv_heads, splits, q_row, page_stride, scale, cap,
    GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FLIP: tl.constexpr, PEEL: tl.constexpr,
    SINGLE: tl.constexpr, PARTIAL: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, kv heads x blocks of their heads, splits or 1). Surplus programs leave at once.

    first_segment: the launch begins with it; tables are passed whole, for views into them are not aligned.
    """
    QUERIES: tl.constexpr = BLOCK_M // HEAD_ROWS
    ALONG: tl.constexpr = 0 if FLIP else 1
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEAD_ROWS - 1) // HEAD_ROWS
    seg_start, context_len = seg_start + first_segment, context_len + first_segment
    page_start += first_segment
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
    row_mask = tl.expand_dims(real, ALONG) & tl.expand_dims(dims < DIM, 1 - ALONG)
    query = tl.load(
        q + tl.expand_dims(token * q_row + head * DIM, ALONG) + tl.expand_dims(dims, 1 - ALONG),
        mask=row_mask,
        other=0.0,
    )
    slope = tl.load(slopes + head, mask=real, other=0.0) if ALIBI else scale
    k += kv_head.to(tl.int64) * (PAGE * DIM)
    v += kv_head.to(tl.int64) * (PAGE * DIM)
    pages += tl.load(page_start + segment)

    if PARTIAL or not EXACT:
        top, total, acc = _keys(
            query, at, slope, first, last, low, end, k, v, pages, page_stride, scale, cap,
            DIM, BLOCK_D, WIDE, BLOCK_M, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, ALONG, PEEL,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D] if ALONG == 1 else [BLOCK_D, BLOCK_M], tl.float32)
        for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
            top_part, total_part, acc_part = _keys(
                query, at, slope, first, last, tl.maximum(low, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT),
                k, v, pages, page_stride, scale, cap,
                DIM, BLOCK_D, WIDE, BLOCK_M, BLOCK_N, WINDOW, CAPPED, ALIBI, EXACT, ALONG, PEEL,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, top_part, total_part, acc_part, ALONG)

    row = token * (kv_heads * GROUP) + head
    if PARTIAL:
        row = row * splits + tl.program_id(2)
        tl.store(state + row * 2, top, mask=real)
        tl.store(state + row * 2 + 1, total, mask=real)
        tl.store(partial + tl.expand_dims(row * DIM, ALONG) + tl.expand_dims(dims, 1 - ALONG), acc, mask=row_mask)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=float("-inf"))
            total, acc = _with_sink(total, acc, top, sink, ALONG)
        value = (acc / tl.expand_dims(total, ALONG)).to(out.dtype.element_ty)
        tl.store(out + tl.expand_dims(row * DIM, ALONG) + tl.expand_dims(dims, 1 - ALONG), value, mask=row_mask)


@triton.jit(do_not_specialize=["first_segment", "segments", "kv_heads", "splits"])
def merge_kernel(
    out, partial, state, sinks, seg_start, context_len, first_segment, segments, kv_heads, splits,
    GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SINGLE: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of one head: its splits, in the exact order from left to right. Grid (blocks, heads, queries of a block).

    Whatever lies in [where the row's keys begin, where they end) was written, and nothing else is read.
    """
    QUERIES: tl.constexpr = BLOCK_M // HEAD_ROWS
    seg_start, context_len = seg_start + first_segment, context_len + first_segment
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
    one, dims, place = tl.arange(0, 1), tl.arange(0, BLOCK_D), tl.arange(0, CHUNK)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    stop = (at - origin) // span + 1
    for chunk in range((low - origin) // span, stop, CHUNK):  # so many loads under way at a time
        part = row * splits + chunk + place
        there = chunk + place < stop
        tops = tl.load(state + part * 2, mask=there, other=float("-inf"))
        totals = tl.load(state + part * 2 + 1, mask=there, other=0.0)
        part_mask = there[:, None] & (dims < DIM)[None, :]
        accs = tl.load(partial + part[:, None] * DIM + dims[None, :], mask=part_mask, other=0.0)
        if EXACT:
            for i in tl.static_range(CHUNK):
                chosen = place == i
                top_part = tl.max(tl.where(chosen, tops, float("-inf")), axis=0) + tl.zeros([1], tl.float32)
                total_part = tl.sum(tl.where(chosen, totals, 0.0), axis=0) + tl.zeros([1], tl.float32)
                acc_part = tl.sum(tl.where(chosen[:, None], accs, 0.0), axis=0)[None, :]
                top, total, acc = _merged(top, total, acc, top_part, total_part, acc_part, 1)
        else:
            highest = tl.maximum(top, tl.max(tops, axis=0))
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            old, weights = tl.exp2(top - finite), tl.exp2(tops - finite)
            total = total * old + tl.sum(totals * weights, axis=0)
            acc = acc * old[:, None] + tl.sum(accs * weights[:, None], axis=0)[None, :]
            top = highest
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1) + one)
        total, acc = _with_sink(total, acc, top, sink, 1)
    target = out + (row + one)[:, None] * DIM + dims[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=(dims < DIM)[None, :])
