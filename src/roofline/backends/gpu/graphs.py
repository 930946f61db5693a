"""Decode steps captured in graphs, one for each bucket of tokens: a replay costs the host one launch.

A bucket is captured when it is met the second time: the first step of a kind runs from the list, which also compiles
what it needs, so that no first token waits for a capture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roofline.backends.gpu.step import Sizes, Step

_SMALLEST_CONTEXT = 256


def bucket(tokens: int, most: int) -> int:
    """The number of rows a step of `tokens` is padded to: powers of two to 16, then multiples of 8, then of 32."""
    if tokens <= 16:
        size = 1 << (tokens - 1).bit_length()
    else:
        size = -(-tokens // 8) * 8 if tokens <= 64 else -(-tokens // 32) * 32
    return min(size, most)


def padded(sizes: Sizes, most: int, longest: int) -> Sizes:
    """The sizes that a decode step is padded to: `bucket` of its tokens, the context's power of two."""
    size = bucket(sizes.tokens, most)
    context = max(_SMALLEST_CONTEXT, 1 << (sizes.max_context - 1).bit_length())
    return replace(sizes, tokens=size, rows=size, segments=size, max_context=min(context, longest))


class Graphs:
    """run: computes a Step, from the list; the same Step is kept with its graph, for its tensors are in it."""

    def __init__(self, run: Callable[[Step], None], make: Callable[[Sizes], Step]) -> None:
        self._run, self._make = run, make
        self._seen: dict[Sizes, Step] = {}
        self._graphs: dict[Sizes, Any] = {}
        self._pool: Any = None  # of temporary memory: one for all, since one runs at a time and none keeps any

    def step(self, sizes: Sizes) -> Step:
        """Run a step of padded sizes; its fields are on the device already."""
        if sizes in self._graphs:
            self._graphs[sizes].replay()
        elif sizes in self._seen:
            self._graphs[sizes] = self._capture(self._seen[sizes])
            self._graphs[sizes].replay()
        else:
            self._seen[sizes] = self._make(sizes)
            self._run(self._seen[sizes])
        return self._seen[sizes]

    def _capture(self, step: Step) -> Any:
        import torch

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of CUDA meanwhile is no part of the capture, and must not end it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._run(step)
        return graph

    def close(self) -> None:
        """Drop graphs and what they hold."""
        self._graphs.clear()
        self._seen.clear()
