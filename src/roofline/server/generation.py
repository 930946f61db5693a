"""A request that will be answered, whatever API it came by, and the checks that every API needs.

Each API reads its own bodies (`routes/*/`) and ends here: after `generation_of` nothing is checked again, every field
was honoured or refused, and every prompt fits.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import RequestError
from roofline.engine.beams import BeamSearchParams
from roofline.engine.checks import media_in
from roofline.engine.params import SamplingParams, check_logits
from roofline.engine.pooling import check_able
from roofline.engine.process.messages import Ready
from roofline.server.body import count_within, invalid, within
from roofline.server.context import Context
from roofline.server.limits import Limits
from roofline.text.replies.parser import PlainReply, ReplyParser

Receipt = Literal["hashes", "with_prompt"]  # with_prompt: it has the prompt's ids, not their hash alone
Usage = Literal["none", "last", "every"]  # events of a stream that tell the usage


@dataclass(frozen=True)
class Generation:
    """Every prompt's ids, and how to answer them. `params.stop` is looked for on this side.

    parser: of each answer's text, into what a model says, thinks and calls.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    model: str
    fingerprint: str
    stream: bool = False
    usage: Usage = "none"
    at_start: bool = False  # the answer begins a text of its own, as in chat; else it goes on from the prompt
    user: str | None = None  # whoever the client says it asks for: a label in log lines
    parser: Callable[[], ReplyParser] = PlainReply
    shown: frozenset[int] = frozenset()  # special tokens that are text, as the parser looks for them
    priority: int | None = None  # of this request among those of its key: the lowest is computed first
    cache_salt: str = ""  # the client's: its prefixes are shared only among requests of the same salt and key
    include_stop: bool = False  # the stop string that ends an answer is part of its text
    echo: tuple[str, ...] = ()  # the text of each prompt, where answers begin with it
    best: int | None = None  # of each prompt's answers only so many are told, those with the likeliest tokens
    hides_logprobs: bool = False  # they were computed to find the best
    beams: BeamSearchParams | None = None  # answers are those of a beam search; of `params` n and stop ids still hold
    prompt_logprobs: int | None = None  # alternatives told beside each token of the prompts; None: those are not told
    echoes_logprobs: bool = False  # the log-probabilities of an answer begin with those of the prompt, as its text does
    with_ids: bool = False  # answers tell the ids of prompt and answer
    receipt: Receipt | None = None  # beside the answers comes a receipt (`server/receipts.py`)
    form_field: str = "constraint"  # what the API calls `params.constraint`
    adapter: str | None = None  # the name of the adapter that computes it; None: the model alone
    cut_tokens: int = 0  # that stood before the prompts, and were left out because the request says so

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def check_model(name: str, context: Context) -> str:
    """The name that answers tell: an adapter's own, or, as in vLLM, the model's first, whichever the request gave.
    Raises RequestError 404 for a model that is not served here."""
    if name not in context.names and context.adapters.get(name) is None:
        served = (*context.names, *(adapter.name for adapter in context.adapters.all), *context.other_names)
        names = ", ".join(map(repr, served))
        message = f"The model {name[:100]!r} is not served here; {names} {'are' if len(served) > 1 else 'is'}."
        raise RequestError(404, "model_not_found", message, param="model")
    return context.name if name in context.names else name


def check_own_model(name: str, context: Context) -> None:
    """As `check_model`, where adapters cannot be named. Raises RequestError."""
    if check_model(name, context) != context.name:
        message = f"model: {name[:100]!r} is an adapter, and vectors are those of the model itself, {context.name!r}."
        raise RequestError(400, "unsupported_parameter", message, param="model")


def sampling_params(values: Mapping[str, object], limits: Limits, least_answer: int = 1) -> SamplingParams:
    """Parameters of sampling from those of a request; None stands for the default. Raises RequestError.

    Args:
        values: fields of SamplingParams, as JSON has them: `stop` may be a string, keys of `logit_bias` are strings.
        least_answer: the least `max_tokens` that the API takes.
    """
    values = {name: value for name, value in values.items() if value is not None}
    stop, bias = values.get("stop"), values.get("logit_bias")
    strings = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    count_within("stop", len(strings), 0, limits.stop_strings)
    for text in strings:
        if len(text.encode("utf-8", "surrogatepass")) > limits.stop_string_bytes:
            raise invalid("stop", f"a stop string may have at most {limits.stop_string_bytes} bytes")
    for name, most in (("stop_token_ids", limits.stop_token_ids), ("logit_bias", limits.logit_bias)):
        several = values.get(name)
        within(name, len(several) if isinstance(several, Sized) else None, 0, most)
    within("n", _integer(values.get("n")), 1, limits.n)
    within("max_tokens", _integer(values.get("max_tokens")), least_answer, (1 << 31) - 1)
    temperature = values.get("temperature")
    if isinstance(temperature, int | float) and temperature > limits.temperature:
        raise invalid("temperature", f"must be at most {limits.temperature:g}")
    if isinstance(bias, dict):
        values["logit_bias"] = _bias(bias)
    return SamplingParams(**values)  # type: ignore[arg-type]  # which checks the types of all


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise invalid("logit_bias", "its keys must be token ids")
    result = {int(name): value for name, value in bias.items()}
    if len(result) < len(bias):
        twin = next(name for name in bias if str(int(name)) != name)
        raise invalid("logit_bias", f"{twin!r} is another spelling of a token id that is there already")
    return result


def check_prompts(
    field: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    loaded: Ready,
    answer_field: str = "max_tokens",
) -> None:
    """Raises RequestError for prompts that cannot be computed with their answers, and for ids that do not exist.

    field, answer_field: what the API calls the prompt, and the longest answer.
    """
    answer, longest = params.max_tokens, answer_field
    if answer is None:
        answer, longest = (params.min_tokens, "min_tokens") if params.min_tokens > 1 else (1, "")
    check_able(params.pooling, loaded.gives_hidden, encoder=loaded.encoder)
    check_logits(params, loaded.gives_logits)
    if params.pooling is not None:
        answer = 0
    for prompt in prompts:
        _check_prompt(field, prompt, answer, loaded, longest)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", list(dict(params.logit_bias)))):
        if any(i >= loaded.vocab_size for i in ids):
            raise invalid(name, f"has an id outside the vocabulary of {loaded.vocab_size}")


def _check_prompt(field: str, prompt: Sequence[int], answer: int, loaded: Ready, answer_field: str) -> None:
    """answer_field: what says how long the answer is; "": nobody did."""
    if not prompt:
        raise invalid(field, "has no tokens")
    if not 0 <= min(prompt) <= max(prompt) < loaded.vocab_size:
        raise invalid(field, f"has an id outside the vocabulary of {loaded.vocab_size}")
    if problem := media_in(prompt, loaded.media_ids):
        raise invalid(field, problem)
    needed, most = len(prompt) + answer, loaded.max_model_len
    if needed > most:
        if answer == 0:
            message = f"{field} has {len(prompt)} tokens, but this server's context is {most}. Shorten it."
            raise RequestError(400, "context_length_exceeded", message, param=field)
        sizes = f"The prompt has {len(prompt)} tokens and the answer {answer}: together {needed}"
        shorter = f" or lower {answer_field}" if answer_field else ""
        remedy = f"but this server's context is {most}. Shorten the prompt{shorter}."
        param = field if len(prompt) >= most or not answer_field else answer_field
        raise RequestError(400, "context_length_exceeded", f"{sizes}, {remedy}", param=param)
