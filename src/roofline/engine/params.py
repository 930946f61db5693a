"""What a request asks of sampling, checked once, at construction."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from roofline.common.errors import RequestError, UnsupportedError
from roofline.common.options import Options, option
from roofline.engine.constraint import Constraint
from roofline.engine.keywords import CONSTRAINT_NAMES, constraint_of
from roofline.engine.keywords import SAMPLING as SAMPLING_ELSEWHERE
from roofline.engine.pooling import Pooling

MAX_LOGPROBS = 20
MAX_N = 128
SEED_RANGE = 2**64
PENALTIES = 1e-9, 1e9  # for repetition: with these, logits stay numbers of 32 bits
SAMPLING = "Sampling"


@dataclass(frozen=True)
class SamplingParams(Options):
    """How to choose the next ids of a request.

    Order of effects: logit bias, constraint, penalties, temperature, top-k, top-p, min-p, then Gumbel-max with noise
    that depends on (seed, prompt, index of n, position, id) alone, so the same request gives the same ids in any batch,
    and prompts that share a seed do not share their noise.

    Args:
        top_k: -1 is another way to say 0.
        logit_bias: (id, value) pairs or a mapping, values -100 to 100, added to the raw logits.
        logprobs: None, or how many of the most likely ids to report beside each chosen one (0 to 20).
        prompt_logprobs: as `logprobs`, of the prompt's tokens: each but the first, given those before it. A prompt that
            is told so is computed in smaller chunks, and takes nothing from the prefix cache.
        n: answers to the same prompt, 1 to 128.
        stop: a string or strings that end the answer and are not part of it; found where ids become text. None: none.
        max_tokens: 0 computes the prompt, for its log-probabilities, and no answer.
        min_tokens: neither an id nor a stop string that comes with an earlier token ends the answer.
        prompt_progress: events tell how much of the prompt each step has computed.
        digests: events have a digest of the logits that each id was sampled from (`engine/digests.py`).
        stop_token_ids: ids that end the answer, beside the model's own.
        constraint: the form that the answer must have; it ends when it is complete, whatever min_tokens and ignore_eos
            say. Log-probabilities stay those of the raw logits, as with a bias.
        pooling: the request ends with its prompt and gives a vector, and no answer. It goes with no field that is about
            an answer: n, constraint, logprobs, digests, stop, logit_bias.
        structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar: vLLM's names, which become
            `constraint`.

    Raises RequestError with status 400, whose `param` names the field.
    """

    elsewhere: ClassVar[Mapping[str, str]] = SAMPLING_ELSEWHERE
    temperature: float = option(1.0, "0 takes the most likely token.", minimum=0, topic=SAMPLING)
    top_k: int = option(0, "Keep the k most likely tokens; 0 keeps all.", minimum=0, topic=SAMPLING)
    top_p: float = option(
        1.0, "Keep the smallest set of tokens with this probability, which is more than 0.",
        minimum=0, maximum=1, topic=SAMPLING,
    )  # fmt: skip
    min_p: float = option(
        0.0, "Drop tokens below this fraction of the most likely one's probability.",
        minimum=0, maximum=1, topic=SAMPLING,
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, "Divides positive and multiplies negative logits of tokens in prompt or answer.",
        minimum=PENALTIES[0], maximum=PENALTIES[1], topic=SAMPLING,
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, "Subtracted once from the logits of tokens in the answer.", minimum=-2, maximum=2, topic=SAMPLING
    )
    frequency_penalty: float = option(
        0.0, "Subtracted for each occurrence of a token in the answer.", minimum=-2, maximum=2, topic=SAMPLING
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # kept as a tuple of pairs
    seed: int | None = option(
        None,
        "The same seed, any 64-bit integer, gives the same answer to the same prompt. Default: a fresh one.",
        topic=SAMPLING,
    )
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    max_tokens: int | None = option(
        None, "Longest answer; without it, what fits.", minimum=0, unit="tokens", topic=SAMPLING
    )
    min_tokens: int = option(
        0, "The answer does not end by itself before it has this many tokens.", minimum=0, unit="tokens", topic=SAMPLING
    )
    prompt_progress: bool = False
    digests: bool = False
    stop: Sequence[str] | None = ()  # kept as a tuple, as is the next
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = option(False, "Do not end at the model's own end-of-generation ids.", topic=SAMPLING)
    constraint: Constraint | None = None
    pooling: Pooling | None = None
    # Other names of `constraint`, None once it is set.
    structured_outputs: object = field(default=None, repr=False)
    guided_decoding: object = field(default=None, repr=False)
    guided_json: object = field(default=None, repr=False)
    guided_regex: object = field(default=None, repr=False)
    guided_choice: object = field(default=None, repr=False)
    guided_grammar: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # A frozen dataclass normalises here and nowhere else.
        for name, value in vars(self).items():
            if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy's and torch's scalars
                object.__setattr__(self, name, value.item())
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        check_number(self, "temperature", 0.0, math.inf)
        check_number(self, "top_p", 0.0, 1.0, open_low=True)
        check_number(self, "min_p", 0.0, 1.0)
        check_number(self, "repetition_penalty", *PENALTIES)
        check_number(self, "presence_penalty", -2.0, 2.0)
        check_number(self, "frequency_penalty", -2.0, 2.0)
        check_integer(self, "top_k", 0, 2**31 - 1)
        check_integer(self, "seed", -(2**63), SEED_RANGE - 1, optional=True)
        check_integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        check_integer(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        check_integer(self, "n", 1, MAX_N)
        check_integer(self, "max_tokens", 0, 2**31 - 1, optional=True)
        check_integer(self, "min_tokens", 0, 2**31 - 1)
        for name in ("ignore_eos", "prompt_progress", "digests"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, f"{getattr(self, name)!r} is not true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))
        names = {name: getattr(self, name) for name in CONSTRAINT_NAMES}
        if self.constraint is not None or any(value is not None for value in names.values()):
            object.__setattr__(self, "constraint", constraint_of(self.constraint, names))
            for name in names:
                object.__setattr__(self, name, None)
        if self.pooling is not None:
            _check_pooled(self)

    @property
    def uses_history(self) -> bool:
        """Whether sampling depends on which ids came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_pooled(params: SamplingParams) -> None:
    if not isinstance(params.pooling, Pooling):
        raise invalid("pooling", f"{type(params.pooling).__name__} is no Pooling")
    about_answers: dict[str, object] = {"n": 1, "constraint": None, "logprobs": None, "prompt_logprobs": None}
    about_answers |= {"digests": False} | dict.fromkeys(("stop", "stop_token_ids", "logit_bias"), ())
    for name, neutral in about_answers.items():
        if getattr(params, name) != neutral:
            raise invalid(name, "is about an answer, and a request with pooling has none")


def fresh_seed() -> int:
    """A seed for a request that names none: 53 bits, exact in any JSON reader."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def invalid(field: str, problem: str) -> RequestError:
    """The error of a field with a value that cannot be used."""
    return RequestError(400, "invalid_value", f"{field}: {problem}", param=field)


def check_number(params: object, field: str, low: float, high: float, open_low: bool = False) -> None:
    """Raises RequestError for a field that is no finite number within these bounds."""
    value = getattr(params, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid(field, f"{value!r} is not a finite number")
    if value < low or value > high or (open_low and value == low):
        bounds = f"{'more than' if open_low else 'at least'} {low:g}"
        raise invalid(field, f"{value!r} must be {bounds}" + ("" if high == math.inf else f" and at most {high:g}"))


def check_integer(params: object, field: str, low: int, high: int, optional: bool = False) -> None:
    """Raises RequestError for a field that is no whole number within these bounds."""
    value = getattr(params, field)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(field, f"{value!r} is not a whole number")
    if not low <= value <= high:
        raise invalid(field, f"{value} must be from {low} to {high}")


def _bias(value: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    result: dict[int, float] = {}
    try:
        for token, bias in pairs:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise invalid("logit_bias", f"{token!r} is not a token id")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise invalid("logit_bias", f"{bias!r} for id {token} must be from -100 to 100")
            if token in result:
                raise invalid("logit_bias", f"id {token} is given twice")
            result[token] = float(bias)
    except (TypeError, ValueError) as error:
        raise invalid("logit_bias", "must be a mapping of token ids to numbers") from error
    return tuple(sorted(result.items()))


def _stop_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, Iterable):
        raise invalid("stop", f"{value!r} is not a list of strings")
    strings = tuple(strings)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise invalid("stop", f"{text!r} is not a non-empty string")
    return strings


def _ids(value: Iterable[int]) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise invalid("stop_token_ids", f"{value!r} is not a list of token ids")
    ids = tuple(value)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise invalid("stop_token_ids", f"{token!r} is not a token id")
    return ids


def check_logits(params: SamplingParams, gives_logits: bool) -> None:
    """Raises UnsupportedError for what only a model with logits can give."""
    if gives_logits:
        return
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    has_scores = params.pooling is not None and not params.pooling.hidden
    if has_logprobs or has_scores or params.constraint is not None:
        what = "log-probabilities" if has_logprobs else "scores" if has_scores else "a form of the answer"
        raise UnsupportedError(f"{what} of a simulated model", "nothing is computed", ("backend=cpu",))
