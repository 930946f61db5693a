"""Steps over a paged cache for the tests of attention: made, run, and what the reference says."""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCE = {"f32": 5e-6, "bf16": 2e-2, "f16": 3e-3}


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Paged:
    """A step and its cache: shuffled pages, NaN in all that nothing has written."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    fields: list[torch.Tensor]  # seg_start, context_len, page_start, pages
    contexts: list[tuple[torch.Tensor, torch.Tensor]]  # k, v [context, kv_heads, head_dim]
    segments: list[tuple[int, int, int]]

    def read(self, layer, index):
        return self.contexts[index]


def paged(steps, heads, kv_heads, dim, dtype="f32", cache=None, unused=2, seed=0):
    """steps: (queries, context) of each segment; 3 pages lie in the cache that no segment has."""
    made = torch.Generator().manual_seed(seed)
    counts = [-(-context // 16) for _, context in steps]
    order = torch.randperm(sum(counts) + 3, generator=made)[: sum(counts)]
    of_dtype = cache or DTYPES[dtype]
    k = torch.full((sum(counts) + 3, kv_heads, 16, dim), float("nan")).to(of_dtype)
    v = k.clone()
    contexts, segments, page, row = [], [], 0, 0
    for (queries, context), count in zip(steps, counts, strict=True):
        parts = [torch.randn(context, kv_heads, dim, generator=made).to(of_dtype) for _ in range(2)]
        at = torch.arange(context)
        for store, part in zip((k, v), parts, strict=True):
            store[order[page + at // 16], :, at % 16] = part
        contexts.append(tuple(part.float() for part in parts))
        segments.append((row, row + queries, context - queries))
        page, row = page + count, row + queries
    starts = [0, *(stop for _, stop, _ in segments)]
    pages = [sum(counts[:i]) for i in range(len(counts) + 1)]
    fields = [ints(starts), ints([context for _, context in steps]), ints(pages), order.int()]
    q = torch.randn(row, heads * dim, generator=made).to(DTYPES[dtype])
    return Paged(q, k, v, fields, contexts, segments)


def prepared(step, heads, window=0, exact=False, programs=64, chip="sm_90"):
    from roofline.backends.gpu.kernels.attend_launches import prepare
    from roofline.hardware.chips import chips

    starts, contexts = step.fields[:2]
    return prepare(
        chips.get(chip), tokens=step.q.shape[0], segments=len(contexts), max_query=int(starts.diff().max()),
        max_context=int(contexts.max()), heads=heads, kv_heads=step.k.shape[1], head_dim=step.k.shape[3], window=window,
        exact=exact, element_bytes=step.q.element_size(), programs=programs,
    )  # fmt: skip


def run(step, launch, soft_cap=0.0, alibi=False, sinks=None):
    """(out, workspace), both poisoned before."""
    from roofline.backends.gpu.kernels.attend import attend
    from roofline.backends.gpu.kernels.attend_launches import workspace_floats
    from roofline.ops.attention import log2_slopes

    out = torch.full(step.q.shape, float("nan"), dtype=step.q.dtype)
    workspace = torch.full((workspace_floats(launch),), float("nan"))
    slopes = torch.tensor(log2_slopes(launch.heads)) if alibi else None
    attend(
        launch, step.q, step.k, step.v, *step.fields, scale=step.k.shape[3] ** -0.5, soft_cap=soft_cap, slopes=slopes,
        sinks=sinks, workspace=workspace, out=out,
    )  # fmt: skip
    return out, workspace


def expected(step, heads, window=0, soft_cap=0.0, alibi=False, sinks=None):
    from roofline import ops

    q, bends = step.q.contiguous().float(), {"soft_cap": soft_cap, "alibi": alibi, "sinks": sinks}
    return ops.attend(q, step, 0, heads, step.k.shape[3] ** -0.5, window=window, **bends)


def error(out, want):
    worst = (out.float() - want).abs().max().item()
    return worst if worst == worst else float("inf")
