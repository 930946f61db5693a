"""The one choke point: bytes of a body -> a typed request, or a RequestError that names the field.

After this nothing is checked again: every field was honoured or refused, and every prompt fits. What that means for
fields that OpenAI clients send along:

    user, safety_identifier    honoured: the log names the request by them
    store, parallel_tool_calls, metadata, service_tier, tools, ...
                               taken at values that ask for nothing (schema.NEUTRAL_*), refused by name at others
    anything unknown           refused by name
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from roofline.common.errors import RequestError
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import Ready
from roofline.server.context import Context
from roofline.server.limits import Limits
from roofline.server.schema import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    Body,
    ChatBody,
    CompletionBody,
    Message,
    Sampling,
    StreamOptions,
    TextPart,
)

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
MAX_PROBLEMS = 1000
COMPLETION_MAX_TOKENS = 16  # OpenAI's default on this route
KNOWN_NAMES = frozenset(
    name for kind in (ChatBody, CompletionBody, Message, TextPart, StreamOptions) for name in kind.model_fields
)
SAMPLING_NAMES = Sampling.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()
AnyBody = TypeVar("AnyBody", bound=Body)


@dataclass(frozen=True)
class Generation:
    """A request that will be answered: every prompt's ids, and how. `params.stop` is found on this side."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    at_start: bool  # the answer begins a text of its own, as in chat; else it goes on from the prompt
    model: str
    fingerprint: str
    user: str | None  # whoever the client says it asks for: a label in log lines

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def chat(raw: bytes, context: Context) -> Generation:
    """A body of /v1/chat/completions."""
    fields = _fields(raw, context.limits)
    _refuse_unsupported(fields, NEUTRAL_CHAT)
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse_unsupported(message, NEUTRAL_MESSAGE, f"messages.{i}.")
    body = _model(ChatBody, fields)
    _bound("messages", len(body.messages), 1, context.limits.messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    _bound("top_logprobs", body.top_logprobs, 0, context.limits.logprobs)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of the two")
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    loaded = _loaded(body, context)
    params = _params(body, context.limits, most, (body.top_logprobs or 0) if body.logprobs else None)
    prompt = context.text.encode_chat([_plain(message) for message in body.messages])
    return _generation(body, [prompt], params, loaded, context)


def completion(raw: bytes, context: Context) -> Generation:
    """A body of /v1/completions."""
    fields = _fields(raw, context.limits)
    _refuse_unsupported(fields, NEUTRAL_COMPLETION)
    body = _model(CompletionBody, fields)
    _bound("logprobs", body.logprobs, 0, context.limits.logprobs)
    loaded = _loaded(body, context)
    most = body.max_tokens if body.max_tokens is not None else COMPLETION_MAX_TOKENS
    params = _params(body, context.limits, most, body.logprobs)
    many = _prompts(body.prompt)
    _bound("prompt", len(many), 1, context.limits.prompts)
    _bound("n", len(many) * params.n, 1, context.limits.choices)
    prompts = [context.text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in many]
    return _generation(body, prompts, params, loaded, context)


def invalid(field: str, problem: str) -> RequestError:
    """A field with a value that cannot be used."""
    return RequestError(400, "invalid_value", f"{field}: {problem}.", param=field)


def json_depth_within(raw: bytes, most: int) -> bool:
    """Whether brackets nest at most `most` deep. Works on bytes, before anything is built from them.

    Without strings and all else only brackets are left; each round takes off the innermost ones. What is left after
    `most` rounds nests deeper, or is not balanced, which the parser would refuse anyway.
    """
    brackets = STRING.sub(b"", raw).translate(None, NOT_BRACKETS).replace(b"{", b"[").replace(b"}", b"]")
    for _ in range(most):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _fields(raw: bytes, limits: Limits) -> dict[str, object]:
    if not json_depth_within(raw, limits.json_depth):
        raise RequestError(400, "invalid_json", f"The body is not JSON nested at most {limits.json_depth} deep.")
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, "invalid_json", "The body is not JSON.") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", "The body must be a JSON object.")
    return fields


def _refuse_unsupported(fields: dict[str, object], neutral: Mapping[str, tuple[object, ...]], where: str = "") -> None:
    """Take out fields at values that ask for nothing; refuse other values by name."""
    for name in neutral.keys() & fields.keys():
        value = fields.pop(name)
        # `1 == True` in Python: the types must agree too.
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral[name]):
            raise RequestError(400, "unsupported_parameter", f"{where}{name} is not supported.", param=where + name)


def _model(kind: type[AnyBody], fields: dict[str, object]) -> AnyBody:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        # The first problem is enough; the value is not repeated, so an error is never larger than its cause.
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> RequestError:
    if error.error_count() > MAX_PROBLEMS:  # telling them apart would cost more than the request is worth
        return RequestError(400, "invalid_value", f"The body has more than {MAX_PROBLEMS} problems.")
    # Where several forms are allowed each has its error: the one that got furthest into the value says most.
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = max(problems, key=lambda problem: len(problem["loc"]))
    # Unions put the tried type into the path: keep names of fields and positions of lists only.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part) in KNOWN_NAMES]
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:100]
        param = ".".join([*path, name] if name not in path else path)
        return RequestError(400, "unknown_parameter", f"Unknown field: {param}.", param=param)
    param = ".".join(path) or "body"
    if first["type"] == "missing":
        return RequestError(400, "missing_parameter", f"{param} is missing.", param=param)
    return invalid(param, first["msg"].rstrip("."))


def _loaded(body: Sampling, context: Context) -> Ready:
    if body.model != context.name:
        message = f"The model {body.model[:100]!r} is not served here; {context.name!r} is."
        raise RequestError(404, "model_not_found", message, param="model")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    for field in ("user", "safety_identifier"):
        if len(getattr(body, field) or "") > context.limits.user_characters:
            raise invalid(field, f"may have at most {context.limits.user_characters} characters")
    return context.loaded()


def _params(body: Sampling, limits: Limits, most: int | None, logprobs: int | None) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _bound("stop", len(stop), 0, limits.stop_strings)
    for text in stop:
        if len(text.encode("utf-8", "surrogatepass")) > limits.stop_string_bytes:
            raise invalid("stop", f"a stop string may have at most {limits.stop_string_bytes} bytes")
    _bound("stop_token_ids", len(body.stop_token_ids or ()), 0, limits.stop_token_ids)
    _bound("logit_bias", len(body.logit_bias or {}), 0, limits.logit_bias)
    _bound("n", body.n, 1, limits.n)
    if body.temperature is not None and body.temperature > 2:
        raise invalid("temperature", "must be at most 2")
    values = {name: getattr(body, name) for name in SAMPLING_NAMES} | {
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM's way to switch it off
        "logit_bias": _bias(body.logit_bias),
        "max_tokens": most,
        "logprobs": logprobs,
    }
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise invalid("logit_bias", "its keys must be token ids")
    return {int(name): value for name, value in bias.items()}


def _prompts(prompt: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt


def _plain(message: Message) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    return {"role": role, "content": "\n".join(part.text for part in message.content)}


def _generation(
    body: Sampling, prompts: Sequence[Sequence[int]], params: SamplingParams, loaded: Ready, context: Context
) -> Generation:
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    answer = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
    for prompt in prompts:
        _check_prompt(field, prompt, answer, loaded)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [i for i, _ in params.logit_bias])):
        if any(i >= loaded.vocab_size for i in ids):
            raise invalid(name, f"has an id outside the vocabulary of {loaded.vocab_size}")
    return Generation(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        params=params,
        stream=bool(body.stream),
        at_start=isinstance(body, ChatBody),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        model=context.name,
        fingerprint=loaded.fingerprint,
        user=body.safety_identifier if body.safety_identifier is not None else body.user,
    )


def _check_prompt(field: str, prompt: Sequence[int], answer: int, loaded: Ready) -> None:
    """Raises RequestError for a prompt that cannot be computed with an answer of so many tokens."""
    if not prompt:
        raise invalid(field, "has no tokens")
    if not 0 <= min(prompt) <= max(prompt) < loaded.vocab_size:
        raise invalid(field, f"has an id outside the vocabulary of {loaded.vocab_size}")
    needed, most = len(prompt) + answer, loaded.max_model_len
    if needed > most:
        sizes = f"The prompt has {len(prompt)} tokens and the answer {answer}: together {needed}"
        remedy = f"but this server's context is {most}. Shorten the prompt or lower max_tokens."
        param = field if len(prompt) >= most else "max_tokens"
        raise RequestError(400, "context_length_exceeded", f"{sizes}, {remedy}", param=param)


def _bound(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise invalid(field, f"{value} is not within {least} and {most}")
