"""Captures decode steps, those that verify drafts, and short prompts as CUDA graphs, one for each bucket of sizes: a
replay costs the host one launch.

A prompt of 32 tokens takes an H200 5 ms in a 7B, and its host 20 ms to launch: 300 launches or more. From
`_LONGEST_PROMPT` tokens on a step takes the device as long as the host, and padding costs more than it saves.

A bucket is captured when it is met the second time: the first step of a size runs eagerly, without a CUDA graph, which
also compiles the kernels it needs, so that no first token waits for a capture. Where a capture fails, every step runs
eagerly from then on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.backends.gpu.integers import next_power_of_2
from roofline.backends.gpu.runtime.step import GpuStep, StepSizes
from roofline.common import log
from roofline.common.errors import describe_error
from roofline.ops.batch import BatchLimits

if TYPE_CHECKING:
    import torch

_SMALLEST_CONTEXT = 256
_LONGEST_PROMPT = 1024  # tokens of a step of prompts that is captured
_MOST_PROMPT_GRAPHS = 64  # of sizes met last; each takes some MiB of the device
_LONGEST_DRAFT = 16  # queries of a segment, of a step that is captured: its logits are all wanted


_MULTIPLES = ((64, 8), (256, 32), (1024, 64))  # up to so many tokens, multiples of so many


def bucket(tokens: int, most: int) -> int:
    """The rows that a step of `tokens` is padded to: a power of two to 16, then a multiple as `_MULTIPLES` has it."""
    if tokens <= 16:
        return min(next_power_of_2(tokens), most)
    multiple = next((multiple for limit, multiple in _MULTIPLES if tokens <= limit), _MULTIPLES[-1][1])
    return min(-(-tokens // multiple) * multiple, most)


def padded(sizes: StepSizes, limits: BatchLimits, longest: int) -> StepSizes | None:
    """The sizes that a step is padded to: `bucket` of its tokens, powers of two of the queries of a segment and of the
    context. None for a step that is not captured: one of more than `_LONGEST_PROMPT` tokens of prompts, and one of
    prompts beside sequences that decode, whose number would be one more size.

    longest: positions of a sequence.
    """
    decoding = sizes.max_query == 1 and sizes.tokens <= limits.segments
    verifying = 1 < sizes.max_query <= _LONGEST_DRAFT and sizes.rows == sizes.tokens
    context = min(max(_SMALLEST_CONTEXT, next_power_of_2(sizes.max_context)), longest)
    if decoding or verifying:
        size = bucket(sizes.tokens, min(limits.tokens, limits.rows, limits.segments if decoding else limits.tokens))
        segments, queries = min(size, limits.segments), next_power_of_2(sizes.max_query)
        return StepSizes(size, size, segments, queries, context, adapted=sizes.adapted)
    if sizes.decodes or sizes.tokens > _LONGEST_PROMPT:
        return None
    tokens, segments = bucket(sizes.tokens, limits.tokens), min(next_power_of_2(sizes.segments), limits.segments)
    return StepSizes(
        tokens=tokens,
        rows=min(next_power_of_2(sizes.rows), limits.rows) if sizes.rows else 0,
        segments=segments,
        max_query=min(tokens, next_power_of_2(sizes.max_query)),
        max_context=context,
        adapted=sizes.adapted,
    )


def _is_prompt(sizes: StepSizes) -> bool:
    """Whether a step that is captured neither decodes nor verifies drafts, of which there are few sizes."""
    return sizes.max_query > _LONGEST_DRAFT or sizes.rows != sizes.tokens


class Graphs:
    """run: computes a Step eagerly. A Step is kept with its graph, which reads and writes the Step's tensors."""

    def __init__(self, run: Callable[[GpuStep], None], make: Callable[[StepSizes], GpuStep]) -> None:
        self._run, self._make = run, make
        self._steps: dict[StepSizes, GpuStep] = {}
        self._graphs: dict[StepSizes, torch.cuda.CUDAGraph] = {}
        # Of temporary memory: one for all graphs, since one runs at a time and none keeps any.
        self._pool: torch.cuda.graphs._POOL_HANDLE | None = None
        self.failed = ""  # why no more steps are captured

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def step(self, sizes: StepSizes) -> GpuStep:
        """Run a step of padded sizes; its fields are on the device already."""
        if sizes in self._steps and sizes not in self._graphs and not self.failed:
            self._try_to_capture(sizes)
        if sizes in self._graphs:
            if _is_prompt(sizes):
                self._graphs[sizes] = self._graphs.pop(sizes)  # the last in order is the one used last
            self._graphs[sizes].replay()
            return self._steps[sizes]
        step = self._steps.get(sizes) or self._make(sizes)
        self._run(step)
        self._steps[sizes] = step  # only now: what a failed run has not compiled or loaded cannot be captured
        return step

    def _try_to_capture(self, sizes: StepSizes) -> None:
        """Capture the bucket; where that fails none is captured any more, as torch's pool is in an unknown state."""
        prompts = [known for known in self._graphs if _is_prompt(known)] if _is_prompt(sizes) else []
        if len(prompts) >= _MOST_PROMPT_GRAPHS:
            del self._graphs[prompts[0]], self._steps[prompts[0]]
        try:
            self._graphs[sizes] = self._capture(self._steps[sizes])
        except Exception as error:  # whatever a driver says: eager steps compute the same
            self.failed = describe_error(error)
            log.get("gpu").warning("steps of %d rows could not be captured, none will be: %s", sizes.rows, self.failed)

    def _capture(self, step: GpuStep) -> "torch.cuda.CUDAGraph":
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
        self._steps.clear()
