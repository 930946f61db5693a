"""A request and its sequences: integers that the scheduler and the cache work on."""

from dataclasses import dataclass, field
from typing import Any

from roofline.engine.cache.paged import PageKeys
from roofline.engine.events import FinishReason, Usage
from roofline.engine.params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters and its n sequences.

    `max_tokens` and `seed` are resolved; `stop_ids` are all ids that end an answer.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    seed: int
    root: bytes  # of the keys of its pages
    sequences: "list[Sequence]" = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making."""

    request: Request
    index: int
    ids: list[int] = field(init=False)  # the prompt, then the answer
    prompt_length: int = field(init=False)
    end: int = field(init=False)  # the length at which it ends
    stop_ids: frozenset[int] = field(init=False)
    keys: PageKeys = field(init=False)
    computed: int = 0  # how many ids lie in pages
    published: int = 0  # leading pages that were offered to the prefix cache
    cached_tokens: int = 0  # prompt tokens found there
    pages: list[int] = field(default_factory=list)  # its page table, empty unless running
    finished: FinishReason | None = None  # why it ended
    started: bool = False
    draft: list[int] = field(default_factory=list)  # ids guessed to follow `ids`, to be verified by the next step
    sampling: Any = None  # what the row builder keeps for it
    speculation: Any = None  # what the speculator keeps for it

    def __post_init__(self) -> None:
        request = self.request
        self.ids, self.prompt_length = list(request.prompt), len(request.prompt)
        self.end, self.stop_ids = self.prompt_length + request.max_tokens, request.stop_ids
        self.keys = PageKeys(request.root)

    @property
    def generated(self) -> int:
        """Length of the answer so far."""
        return len(self.ids) - self.prompt_length

    def usage(self) -> Usage:
        """What the last event reports."""
        return Usage(self.prompt_length, self.generated, self.cached_tokens, self.request.seed)
