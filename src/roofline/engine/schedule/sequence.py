"""A request and its sequences: integers that the scheduler and the cache work on."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from roofline.engine.cache.paged import PageKeys
from roofline.engine.cache.state_slots import SequenceSlots
from roofline.engine.events import FinishReason, Usage
from roofline.engine.params import SEED_RANGE, SamplingParams

if TYPE_CHECKING:
    from roofline.engine.constraints.matcher import Matcher


def noise_seed(seed: int, prompt: list[int]) -> int:
    """What the noise of a prompt's answers is drawn by, 64 bits, so that one seed is another noise for another prompt:
    the first 8 bytes of SHA-256 over seed and ids, all little-endian. native/library/sampling.cpp has the same."""
    digest = sha256((seed % SEED_RANGE).to_bytes(8, "little"))
    digest.update(array("i", prompt))
    return int.from_bytes(digest.digest()[:8], "little")


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters and its n sequences.

    `max_tokens` and `seed` are resolved; `stop_ids` are all ids that end an answer; `submitted_at`: in seconds of the
    executable's clock; `priority`: the lowest is computed first; `arrival`: its number among the engine's requests.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    seed: int
    root: bytes  # of the keys of its pages
    submitted_at: float = 0.0
    slot: int = 0  # of its adapter; 0: none
    priority: int = 0
    common_noise: bool = False  # the noise is the seed's, the same for every prompt, as of receipts of version 2
    arrival: int = field(init=False, default=0)
    noise: int = field(init=False)  # what its ids are sampled with
    sequences: "list[Sequence]" = field(init=False)  # those that have not ended at the start

    def __post_init__(self) -> None:
        self.noise = self.seed % SEED_RANGE if self.common_noise else noise_seed(self.seed, self.prompt)
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]

    @property
    def ended(self) -> bool:
        """Whether all of its answers have ended."""
        return all(sequence.finished is not None for sequence in self.sequences)

    def resume(self, answers: Mapping[int, list[int]], scored: int = 0) -> None:
        """Go on from the ids so far of each answer that has not ended: they are computed as after a pre-emption.

        scored: prompt tokens whose log-probabilities are told already.
        """
        self.sequences = [Sequence(self, index) for index in sorted(answers)]
        for sequence in self.sequences:
            sequence.ids += answers[sequence.index]
            sequence.resumed = bool(answers[sequence.index])
            sequence.scored = min(scored, sequence.to_score)


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
    computed: int = 0  # how many ids lie in pages, and in the state of a model that has one
    again: int = 0  # ids before the last that lie in pages, and have to be computed again for the state
    published: int = 0  # leading pages that were offered to the prefix cache
    cached_tokens: int = 0  # prompt tokens found there
    to_score: int = 0  # prompt tokens whose log-probability is told: all but the first, of the first answer's sequence
    scored: int = 0  # leading ones among them whose log-probability was computed
    passed_over: int = 0  # steps in a row that computed others instead of its prompt, a very long one
    pages: list[int] = field(default_factory=list)  # its page table, empty unless running
    finished: FinishReason | None = None  # why it ended
    started: bool = False
    resumed: bool = False  # another engine has begun it, so nobody here knows its times
    scheduled_at: float | None = None  # when the first step that computes it was; these are set by the stepper
    first_at: float | None = None  # when its first id came
    last_at: float = 0.0  # when its latest id came, where there is one
    recurrent: SequenceSlots | None = None  # while it is running, of a model with recurrent state
    draft: list[int] = field(default_factory=list)  # ids guessed to follow `ids`, to be verified by the next step
    matcher: "Matcher | None" = None  # of the form that the answer must have
    sampling: Any = None  # what the row builder keeps for it
    speculation: Any = None  # what the speculator keeps for it
    pools: str = ""  # the kind of its request's pooling; "": it has none
    hidden: bool = False  # its vector is made of hidden rows, and no id follows it
    row_sum: Any = None  # the sum of hidden rows so far, for a mean; or the first row
    vector: bytes | None = None  # what a request with pooling gives, once it is there

    def __post_init__(self) -> None:
        request = self.request
        self.ids, self.prompt_length = list(request.prompt), len(request.prompt)
        self.end, self.stop_ids = self.prompt_length + max(1, request.max_tokens), request.stop_ids
        if request.params.prompt_logprobs is not None and self.index == 0:
            self.to_score = self.prompt_length - 1
        self.keys = PageKeys(request.root)
        pooling = request.params.pooling
        if pooling is not None:
            self.pools, self.hidden = pooling.kind, pooling.hidden

    @property
    def generated(self) -> int:
        """Length of the answer so far."""
        return len(self.ids) - self.prompt_length

    def usage(self) -> Usage:
        """What the last event reports."""
        queue = prefill = decode = None
        if self.scheduled_at is not None and not self.resumed:
            queue = self.scheduled_at - self.request.submitted_at
            if self.first_at is not None:
                prefill, decode = self.first_at - self.scheduled_at, self.last_at - self.first_at
        counts = self.prompt_length, self.generated, self.cached_tokens
        return Usage(*counts, self.request.seed, queue, prefill, decode)
