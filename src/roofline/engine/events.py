"""What the engine tells its callers, as named tuples: they travel between processes as they are, and need no import."""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from roofline.backends.sampling import Sampled

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(NamedTuple):
    """Natural-log probability of a chosen id, and of the most likely ids, most likely first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(token: int, row: int, count: int, sampled: "Sampled") -> TokenLogprob:
    """That of the id which a row chose, with `count` of the most likely ids."""
    top = zip(sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprob(token, float(sampled.logprob[row]), tuple(top))


class Usage(NamedTuple):
    """Tokens of one answer: prompt, generated, how many prompt tokens came from the prefix cache, and the seed used.

    In seconds of the executable's clock, None where it never came to that: `queue_seconds` until the first step that
    computes it is scheduled, from when the engine took the request; `prefill_seconds` from there to the first id, and
    `decode_seconds` from the first id to the last.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None

    # No two computations of an answer take the same time, and it is the same answer: times are not compared.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and self[:4] == other[:4]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:4])


class PromptProgress(NamedTuple):
    """How far the prompt of an answer is: its tokens, how many of them came from the prefix cache, how many are done
    with, and the seconds since the first step that computed it."""

    total: int
    cached: int
    processed: int
    seconds: float


class Event(NamedTuple):
    """New ids of one answer (`index` of n). The event with a `finish_reason` is the last, and there is just one.

    When an id ended the answer, it is the last of `ids` and stands in `stop_id`: it counts, but is not text. A request
    with a constraint has an event without ids once that is compiled. `refused`: the field of the request that is at
    fault for the error. `progress`: in an event of its own, without ids, where the request wants it. `digests`: of the
    logits that each of `ids` was sampled from, where the request wants them (`engine/digests.py`). `prompt_logprobs`:
    in events of their own, of the prompt's tokens from the second on, in order, before the first ids of any answer.
    `vector`: in the last event, without ids, of a request with a Pooling (`engine/pooling.py`).
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    usage: Usage | None = None
    refused: str | None = None
    progress: PromptProgress | None = None
    digests: list[bytes] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    vector: bytes | None = None
