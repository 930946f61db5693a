"""Beam search: the likeliest answers as a whole, found by extending the likeliest beginnings side by side.

The search is that of transformers' `generate(num_beams=...)`. A beginning's likelihood is the sum of the natural
logarithms of its ids' probabilities, of the raw logits. Each step ranks all extensions of all beginnings by one id; an
extension ends with an end id or at the greatest length. Of the first `beam_width` extensions those that end are
finished, with their likelihood divided by length ** length_penalty as their score, and the best `beam_width` finished
ones are kept. The best `beam_width` extensions that do not end are the next beginnings. Of equal ones that of the
better beginning is first, then the lower id.

The search lies above engines: a beginning is a request for one id with its likeliest alternatives. Beginnings share
their full pages by the prefix cache; what each step computes again of one are the ids behind its last full page.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from roofline.backends.sampling import MAX_LOGPROBS
from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.engine.params import SamplingParams, check_integer, check_number, invalid

MAX_WIDTH = MAX_LOGPROBS - 1  # with one end id
# Of a request with beams: what cannot be combined with them. Log-probabilities are those of the raw logits, and a
# search is never random; a seed changes nothing about that.
_WITHOUT = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("min_tokens", "stop", "constraint", "prompt_logprobs", "prompt_progress"),
)


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search. The names are vLLM's and transformers'.

    Args:
        beam_width: beginnings that are extended side by side, and answers that are found.
        max_tokens: the longest answer; None: what fits.
        n: answers that are told, the best first; None: all that are found.
        length_penalty: above 0 it favours longer answers, below 0 shorter ones.
        early_stopping: True: end as soon as `beam_width` answers are finished; False: when the best beginning, were it
            to end now, would be worse than all of them; "never": when it would be at the greatest length too.
        stop_token_ids: ids that end an answer, beside the model's own.
        ignore_eos: answers do not end at the model's own ids.
        logprobs: as in SamplingParams.
        temperature: 0 or 1, which change nothing.

    Raises RequestError with status 400, whose `param` names the field.
    """

    beam_width: int
    max_tokens: int | None = None
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    ignore_eos: bool = False
    logprobs: int | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_integer(self, "beam_width", 1, MAX_WIDTH)
        check_integer(self, "n", 1, self.beam_width, optional=True)
        check_number(self, "length_penalty", -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":  # 1 == True
            raise invalid("early_stopping", f"{self.early_stopping!r} is not true, false or 'never'")
        if self.temperature not in (0, 1):
            raise invalid("temperature", "a beam search takes the logits as they are: leave it at 0 or 1")
        check_integer(self, "max_tokens", 1, 2**31 - 1, optional=True)
        # The other fields mean what they mean to sampling, which checks them.
        shared = {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos, "logprobs": self.logprobs}
        checked = SamplingParams(stop_token_ids=self.stop_token_ids, **shared)  # type: ignore[arg-type]
        object.__setattr__(self, "stop_token_ids", checked.stop_token_ids)

    def ends(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end an answer. Raises RequestError where they and the beams are too many for one request."""
        ends = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))
        if self.beam_width + len(ends) > MAX_LOGPROBS:
            sizes = f"{self.beam_width} beams and {len(ends)} ids that end an answer"
            raise invalid("beam_width", f"{sizes} are more than {MAX_LOGPROBS} together; lower it")
        return ends


def refuse_sampling(params: SamplingParams) -> None:
    """Raises RequestError for a parameter of sampling that asks for something which no beam search can honour."""
    if params.temperature not in (0, 1):
        raise invalid("temperature", "a beam search takes the logits as they are: leave it at 0 or 1")
    plain = SamplingParams()
    for name in _WITHOUT:
        if getattr(params, name) != getattr(plain, name):
            raise invalid(name, "cannot be combined with a beam search")


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning, or an answer. score: the sum of its log-probabilities, of an answer with the penalty."""

    ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()


class BeamSearch:
    """The state of one search. While not `done`, give `extend` the likeliest ids that follow each of `beams`.

    ends: ids that end an answer; longest: tokens of the longest.
    """

    def __init__(self, params: BeamSearchParams, ends: frozenset[int], longest: int) -> None:
        self.params, self._ends, self._longest = params, ends, longest
        self.beams: list[Beam] = [Beam()]
        self.finished: list[Beam] = []  # the best first
        self.step_params = SamplingParams(
            temperature=0, seed=0, max_tokens=1, ignore_eos=True, logprobs=max(self._needed, params.logprobs or 0)
        )

    @property
    def _needed(self) -> int:
        """Alternatives of each beam that a step may need: the best that end, and as many beams as there are."""
        return self.params.beam_width + len(self._ends)

    @property
    def told(self) -> int:
        """How many answers there will be."""
        return self.params.n or self.params.beam_width

    @property
    def done(self) -> bool:
        """Whether the answers are found."""
        params, width = self.params, self.params.beam_width
        if not self.beams:
            return True
        if len(self.finished) < width:
            return False
        if params.early_stopping is True:
            return True
        at_end = params.early_stopping == "never" and params.length_penalty > 0
        length = self._longest if at_end else len(self.beams[0].ids)
        return self.beams[0].score / length**params.length_penalty <= self.finished[-1].score

    def extend(self, tops: Sequence[Sequence[tuple[int, float]]]) -> None:
        """One step. tops: for each of `beams` its likeliest next ids with their log-probabilities, likeliest first."""
        width, alternatives = self.params.beam_width, self.params.logprobs or 0
        ranked = sorted(
            (-beam.score - logprob, at, token, logprob)
            for at, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for token, logprob in top[: self._needed]
        )
        beams: list[Beam] = []
        for rank, (loss, at, token, logprob) in enumerate(ranked):
            if rank >= width and len(beams) == width:
                break
            before = self.beams[at]
            ids = (*before.ids, token)
            logprobs = (*before.logprobs, TokenLogprob(token, logprob, tuple(tops[at][:alternatives])))
            if token not in self._ends and len(ids) < self._longest:
                if len(beams) < width:
                    beams.append(Beam(ids, -loss, logprobs))
            elif rank < width:
                self.finished.append(Beam(ids, -loss / len(ids) ** self.params.length_penalty, logprobs))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        self.beams = beams

    def events(self, request_id: str, prompt_tokens: int, cached_tokens: int) -> list[Event]:
        """The answers that are told, each as the one event of an answer of a request."""
        events = []
        for index, beam in enumerate(self.finished[: self.params.n]):
            stop_id = beam.ids[-1] if beam.ids[-1] in self._ends else None
            logprobs = list(beam.logprobs) if self.params.logprobs is not None else None
            usage = Usage(prompt_tokens, len(beam.ids), cached_tokens, 0)
            reason: Literal["length", "stop"] = "length" if stop_id is None else "stop"
            events.append(
                Event(
                    request_id=request_id,
                    index=index,
                    ids=list(beam.ids),
                    logprobs=logprobs,
                    finish_reason=reason,
                    stop_id=stop_id,
                    error=None,
                    usage=usage,
                )
            )
        return events
