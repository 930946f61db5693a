"""Paged attention over compressed rows: the kernel. One row of a token is the key of all heads and, but for its first
columns, their value.

A block of rows is loaded once and multiplied twice: with the queries, and with the weights of the softmax. The heads of
a token are rows of one product. How blocks and splits lie, and the merge of splits, is as in attend_kernels.py.
Source: DeepSeek-AI 2024 (DeepSeek-V2), FlashAttention-2 (Dao 2023) for the online softmax.
"""

import triton
import triton.language as tl

from roofline.backends.gpu.kernels.attend_kernels import PAGE, SPLIT, _locate, _merged, _spans


@triton.jit
def _block(
    top, total, acc, q_turned, q_plain, at, first_key, end, rows, pages, page_stride, scale,
    TURNED: tl.constexpr, BLOCK_T: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The state after BLOCK_N more rows. WIDE: the cache has more elements than 32 bits count."""
    slot = tl.arange(0, BLOCK_N)
    keys = first_key + slot
    written = keys < end
    page = tl.load(pages + first_key // PAGE + slot // PAGE, mask=written, other=0)  # blocks are whole pages
    if WIDE:
        page = page.to(tl.int64)
    place = rows + page * page_stride + slot % PAGE * (TURNED + DIM)
    turned, plain = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    # Of what no one wrote 0: as a value it is multiplied with 0, and 0 * NaN would be NaN.
    row_turned = tl.load(
        place[:, None] + turned[None, :], mask=written[:, None] & (turned < TURNED)[None, :], other=0.0
    )
    row_plain = tl.load(
        place[:, None] + TURNED + plain[None, :], mask=written[:, None] & (plain < DIM)[None, :], other=0.0
    ).to(q_plain.dtype)
    scores = tl.dot(q_turned, tl.trans(row_turned.to(q_turned.dtype)), input_precision="ieee")
    scores = tl.dot(q_plain, tl.trans(row_plain), scores, input_precision="ieee")
    scores = tl.where(keys[None, :] <= at[:, None], scores, float("-inf"))
    high = tl.max(scores, axis=1)
    highest = tl.maximum(top, high * scale)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    old = tl.exp2(top - finite)
    total_next = tl.fma(total, old, tl.sum(p, axis=1))
    acc_next = tl.dot(p.to(q_plain.dtype), row_plain, acc * old[:, None], input_precision="ieee")
    if EXACT:  # a row decoded alone has not met a block that it sees nothing of
        blind = high == float("-inf")
        total_next = tl.where(blind, total, total_next)
        acc_next = tl.where(blind[:, None], acc, acc_next)
    return highest, total_next, acc_next


@triton.jit
def _rows(
    q_turned, q_plain, at, low, end, rows, pages, page_stride, scale,
    TURNED: tl.constexpr, BLOCK_T: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A fresh state over the rows [low, end); low is a multiple of SPLIT."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in range(low, end, BLOCK_N):
        top, total, acc = _block(
            top, total, acc, q_turned, q_plain, at, key, end, rows, pages, page_stride, scale,
            TURNED, BLOCK_T, DIM, BLOCK_D, WIDE, BLOCK_N, EXACT,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["first_segment", "segments", "splits"])
def attend_rows_kernel(
    q, rows, out, partial, state, seg_start, context_len, page_start, pages,
    first_segment, segments, splits, q_row, page_stride, scale,
    GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr, TURNED: tl.constexpr, BLOCK_T: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE: tl.constexpr,
    PARTIAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, blocks of heads, splits or 1). Surplus programs leave at once.

    TURNED: columns of a row that stand before the DIM ones of the value; the others are as of attend_kernel.
    """
    QUERIES: tl.constexpr = BLOCK_M // HEAD_ROWS
    seg_start, context_len = seg_start + first_segment, context_len + first_segment
    page_start += first_segment
    segment, start, queries, context, block = _locate(seg_start, context_len, segments, QUERIES, SINGLE)
    if block >= queries:
        return
    last = tl.minimum(context - queries + block + QUERIES, context) - 1
    low, end = last * 0, last + 1
    if PARTIAL:
        origin, span = _spans(queries, context, splits, 0, EXACT)
        low = origin + tl.program_id(2) * span
        end = tl.minimum(end, low + span)
        if low >= end:
            return

    member = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * HEAD_ROWS + member % HEAD_ROWS
    index = block + member // HEAD_ROWS
    real = (head < GROUP) & (index < queries)
    token = (start + index).to(tl.int64)
    at = tl.minimum(context - queries + index, last)
    turned, plain = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    query = (q + token * q_row + head * (TURNED + DIM))[:, None]
    q_turned = tl.load(query + turned[None, :], mask=real[:, None] & (turned < TURNED)[None, :], other=0.0)
    plain_mask = real[:, None] & (plain < DIM)[None, :]
    q_plain = tl.load(query + TURNED + plain[None, :], mask=plain_mask, other=0.0)
    pages += tl.load(page_start + segment)

    if PARTIAL or not EXACT:
        top, total, acc = _rows(
            q_turned, q_plain, at, low, end, rows, pages, page_stride, scale,
            TURNED, BLOCK_T, DIM, BLOCK_D, WIDE, BLOCK_M, BLOCK_N, EXACT,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(0, tl.cdiv(end, SPLIT)):
            top_part, total_part, acc_part = _rows(
                q_turned, q_plain, at, split * SPLIT, tl.minimum(end, (split + 1) * SPLIT),
                rows, pages, page_stride, scale,
                TURNED, BLOCK_T, DIM, BLOCK_D, WIDE, BLOCK_M, BLOCK_N, EXACT,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, top_part, total_part, acc_part, 1)

    row = token * GROUP + head
    if PARTIAL:
        row = row * splits + tl.program_id(2)
        tl.store(state + row * 2, top, mask=real)
        tl.store(state + row * 2 + 1, total, mask=real)
        tl.store(partial + (row * DIM)[:, None] + plain[None, :], acc, mask=plain_mask)
    else:
        value = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * DIM)[:, None] + plain[None, :], value, mask=plain_mask)
