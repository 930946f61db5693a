"""What the engine tells its callers, as named tuples: they travel between processes as they are, and need no import."""

from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(NamedTuple):
    """Natural-log probability of a chosen id, and of the most likely ids, most likely first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(NamedTuple):
    """Tokens of one answer: prompt, generated, how many prompt tokens came from the prefix cache, and the seed used."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int


class Event(NamedTuple):
    """New ids of one answer (`index` of n). The event with a `finish_reason` is the last, and there is just one.

    When an id ended the answer, it is the last of `ids` and stands in `stop_id`: it counts, but is not text.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    usage: Usage | None = None
