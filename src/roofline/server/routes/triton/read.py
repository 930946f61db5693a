"""Bodies of the generate extension -> requests that will be answered."""

from dataclasses import dataclass

from roofline.server.body import fields_of, invalid, refuse_unsupported, renamed, typed
from roofline.server.context import Context
from roofline.server.generation import Generation, check_prompts, sampling_params
from roofline.server.routes.triton.schema import INSTEAD, NEUTRAL, GenerateBody

MAX_TOKENS = 16  # the default of Triton's backend for vLLM
SAME_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
TWO_NAMES = {"seed": "random_seed", "stop": "stop_words", "min_tokens": "min_length"}


@dataclass(frozen=True)
class TritonGeneration(Generation):
    """prefix: what the text begins with, the prompt or nothing; id: the client's, for the answer."""

    prefix: str = ""
    id: str | None = None


def generate(raw: bytes, context: Context, *, model: str, stream: bool) -> TritonGeneration:
    """A body of either route. model: of its path."""
    body = _body(raw, context)
    if body.stream not in (None, stream):
        raise invalid("stream", "is what /generate_stream does, and /generate does not")
    if stream and body.exclude_input_in_output is False:
        raise invalid("exclude_input_in_output", "must be true in a stream")
    loaded = context.generating()
    with renamed({"prompt": "text_input"}):
        ids = context.text.encode(body.text_input, loaded.max_model_len)
    values: dict[str, object] = {name: getattr(body, name) for name in SAME_NAMES}
    names = {}
    for name, other in TWO_NAMES.items():
        value, second = getattr(body, name), getattr(body, other)
        if value is not None and second is not None:
            raise invalid(other, f"is another name of {name}; give one of the two")
        values[name] = value if second is None else second
        if second is not None:
            names[name] = other
    if values["stop"] == "":  # how Triton's clients write that there is none
        values["stop"] = None
    least = values["min_tokens"] if isinstance(values["min_tokens"], int) else 0
    fits = max(1, least, min(MAX_TOKENS, loaded.max_model_len - len(ids)))  # where nobody gave a number
    values["max_tokens"] = fits if body.max_tokens is None else body.max_tokens
    with renamed(names):
        params = sampling_params(values, context.limits)
    check_prompts("text_input", [ids], params, loaded, "" if body.max_tokens is None else "max_tokens")
    return TritonGeneration(
        prompts=(tuple(ids),),
        params=params,
        model=model,
        fingerprint=context.adapters.fingerprint(loaded.fingerprint, model),
        adapter=context.adapters.named(model),
        stream=stream,
        prefix=body.text_input if body.exclude_input_in_output is False else "",
        id=body.id,
    )


def _body(raw: bytes, context: Context) -> GenerateBody:
    """Parameters stand beside the text or in an object of their own."""
    fields = fields_of(raw, context.limits)
    parameters = fields.pop("parameters", None)
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid("parameters", "must be an object")
    for name in parameters or {}:
        if name in fields or name == "text_input":
            raise invalid(f"parameters.{name[:100]}", "stands beside parameters, or there")
    fields |= parameters or {}
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    return typed(GenerateBody, fields)
