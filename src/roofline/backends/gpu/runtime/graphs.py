"""Decode steps, and those that verify drafts, captured in graphs, one for each bucket: a replay costs the host one
launch.

A bucket is captured when it is met the second time: the first step of a kind runs from the list, which also compiles
what it needs, so that no first token waits for a capture. Where a capture fails, steps run from the list from then on.
"""

from collections.abc import Callable
from typing import Any

from roofline.backends.gpu.integers import next_power_of_2
from roofline.backends.gpu.runtime.step import Sizes, Step
from roofline.common import log
from roofline.common.errors import describe_error
from roofline.ops.batch import BatchLimits

_SMALLEST_CONTEXT = 256
_LONGEST_DRAFT = 16  # queries of a segment, of a step that is captured: its logits are all wanted


def bucket(tokens: int, most: int) -> int:
    """The number of rows a step of `tokens` is padded to: powers of two to 16, then multiples of 8, then of 32."""
    if tokens <= 16:
        size = next_power_of_2(tokens)
    else:
        size = -(-tokens // 8) * 8 if tokens <= 64 else -(-tokens // 32) * 32
    return min(size, most)


def padded(sizes: Sizes, limits: BatchLimits, longest: int) -> Sizes | None:
    """The sizes that a step is padded to: `bucket` of its tokens, powers of two of the queries of a segment and of the
    context. None for a step that is not captured: one with chunks of prompts.

    longest: positions of a sequence.
    """
    decoding = sizes.max_query == 1 and sizes.tokens <= limits.segments
    verifying = 1 < sizes.max_query <= _LONGEST_DRAFT and sizes.rows == sizes.tokens
    if not decoding and not verifying:
        return None
    size = bucket(sizes.tokens, min(limits.tokens, limits.rows, limits.segments if decoding else limits.tokens))
    context = max(_SMALLEST_CONTEXT, next_power_of_2(sizes.max_context))
    return Sizes(size, size, min(size, limits.segments), next_power_of_2(sizes.max_query), min(context, longest))


class Graphs:
    """run: computes a Step, from the list; the same Step is kept with its graph, for its tensors are in it."""

    def __init__(self, run: Callable[[Step], None], make: Callable[[Sizes], Step]) -> None:
        self._run, self._make = run, make
        self._seen: dict[Sizes, Step] = {}
        self._graphs: dict[Sizes, Any] = {}
        self._pool: Any = None  # of temporary memory: one for all, since one runs at a time and none keeps any
        self.failed = ""  # why no more steps are captured

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def step(self, sizes: Sizes) -> Step:
        """Run a step of padded sizes; its fields are on the device already."""
        if sizes in self._seen and sizes not in self._graphs and not self.failed:
            self._try_to_capture(sizes)
        if sizes in self._graphs:
            self._graphs[sizes].replay()
            return self._seen[sizes]
        step = self._seen.get(sizes) or self._make(sizes)
        self._run(step)
        self._seen[sizes] = step  # only now: what a failed run has not compiled or loaded cannot be captured
        return step

    def _try_to_capture(self, sizes: Sizes) -> None:
        """Capture the bucket; where that fails none is captured any more, as torch's pool is in an unknown state."""
        try:
            self._graphs[sizes] = self._capture(self._seen[sizes])
        except Exception as error:  # whatever a driver says: the list computes the same
            self.failed = describe_error(error)
            log.get("gpu").warning("steps of %d rows could not be captured, none will be: %s", sizes.rows, self.failed)

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
