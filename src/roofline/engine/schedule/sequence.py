"""A request and its sequences: integers that the scheduler and the cache work on."""

from typing import Any

from roofline.engine.cache.paged import PageKeys
from roofline.engine.events import FinishReason, Usage
from roofline.engine.params import SamplingParams


class Request:
    """A prompt with its parameters and its n sequences.

    `max_tokens` and `seed` are resolved; `stop_ids` are all ids that end an answer.
    """

    __slots__ = ("id", "max_tokens", "params", "prompt", "seed", "sequences", "stop_ids")

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        max_tokens: int,
        seed: int,
        root: bytes,
    ) -> None:
        self.id, self.prompt, self.params, self.stop_ids = request_id, prompt, params, stop_ids
        self.max_tokens, self.seed = max_tokens, seed
        self.sequences = [Sequence(self, index, root) for index in range(params.n)]


class Sequence:
    """One answer in the making.

    ids: prompt then answer. computed: how many of them lie in pages. pages: its page table, empty unless running.
    published: how many leading pages were offered to the prefix cache. cached_tokens: prompt tokens found there.
    finished: why it ended. sampling: what the row builder keeps for it. draft: ids guessed to follow `ids`, to be
    verified by the next step; speculation: what the speculator keeps for it.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "draft",
        "end",
        "finished",
        "ids",
        "index",
        "keys",
        "pages",
        "prompt_length",
        "published",
        "request",
        "sampling",
        "speculation",
        "started",
        "stop_ids",
    )

    def __init__(self, request: Request, index: int, root: bytes) -> None:
        self.request, self.index = request, index
        self.ids = list(request.prompt)
        self.prompt_length = len(self.ids)
        self.end = self.prompt_length + request.max_tokens
        self.stop_ids = request.stop_ids
        self.keys = PageKeys(root)
        self.computed = self.published = self.cached_tokens = 0
        self.pages: list[int] = []
        self.finished: FinishReason | None = None
        self.started = False
        self.draft: list[int] = []
        self.sampling: Any = None
        self.speculation: Any = None

    @property
    def generated(self) -> int:
        """Length of the answer so far."""
        return len(self.ids) - self.prompt_length

    def usage(self) -> Usage:
        """What the last event reports."""
        return Usage(self.prompt_length, self.generated, self.cached_tokens, self.request.seed)
