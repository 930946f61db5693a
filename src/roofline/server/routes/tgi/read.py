"""Bodies of TGI's routes -> requests that will be answered."""

import re
from dataclasses import dataclass

from roofline.common.errors import RequestError
from roofline.engine.constraint import Constraint
from roofline.server.body import fields_of, invalid, refuse_unsupported, renamed, typed, within
from roofline.server.context import Context
from roofline.server.forms import schema
from roofline.server.generation import Generation, check_model, check_prompts, sampling_params
from roofline.server.routes.tgi.schema import INSTEAD, NEUTRAL, GenerateBody, Grammar, Parameters

MAX_NEW_TOKENS = 100  # TGI's default, or what fits
SAME_NAMES = ("frequency_penalty", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p")
GRAMMAR = "parameters.grammar.value"
_PICTURE = re.compile(
    r"!\[\]\([^)]*\)"
)  # what TGI takes for one where the model reads pictures, and for text elsewhere
FIELDS = {name: f"parameters.{name}" for name in SAME_NAMES} | {"max_tokens": "parameters.max_new_tokens"}


@dataclass(frozen=True)
class TgiGeneration(Generation):
    """prefix: what the generated text begins with, the prompt or nothing; details: whether an answer tells them."""

    prefix: str = ""
    details: bool = False


def generate(raw: bytes, context: Context) -> TgiGeneration:
    """A body of /generate."""
    return _generation(_body(raw, context), context)


def generate_stream(raw: bytes, context: Context) -> TgiGeneration:
    """A body of /generate_stream."""
    body = _body(raw, context)
    if body.stream is False:
        raise invalid("stream", "is what this route does; /generate answers at once")
    return _generation(body.model_copy(update={"stream": True}), context)


def _body(raw: bytes, context: Context) -> GenerateBody:
    fields = fields_of(raw, context.limits)
    if isinstance(parameters := fields.get("parameters"), dict):
        refuse_unsupported(parameters, NEUTRAL, INSTEAD, "parameters.")
    return typed(GenerateBody, fields)


def _generation(body: GenerateBody, context: Context) -> TgiGeneration:
    loaded, parameters = context.generating(), body.parameters or Parameters()
    model = context.name if parameters.adapter_id is None else parameters.adapter_id
    with renamed({"model": "parameters.adapter_id"}):
        model = check_model(model, context)
    if loaded.media_ids and _PICTURE.search(body.inputs):
        problem = "inputs: the model reads text, and no pictures, as ![](URL) is of a model like this; leave it out."
        raise RequestError(400, "unsupported_parameter", problem, param="inputs")
    within("parameters.truncate", parameters.truncate, 1, 1 << 31)
    with renamed({"prompt": "inputs"}):
        every = context.text.encode(body.inputs, None if parameters.truncate else loaded.max_model_len)
    ids = every[-parameters.truncate :] if parameters.truncate else every
    values: dict[str, object] = {name: getattr(parameters, name) for name in SAME_NAMES}
    values["temperature"] = _temperature(parameters)
    room = max(1, loaded.max_model_len - len(ids))
    most = parameters.max_new_tokens
    values["max_tokens"] = min(MAX_NEW_TOKENS, room) if most is None else most
    within("parameters.top_n_tokens", parameters.top_n_tokens, 0, context.limits.logprobs)
    details = bool(parameters.details)
    if details or body.stream:  # both tell the probability of each token
        values["logprobs"] = parameters.top_n_tokens or 0
    values["constraint"] = _constraint(parameters.grammar)
    with renamed(FIELDS):
        params = sampling_params(values, context.limits)
    check_prompts("inputs", [ids], params, loaded, "" if most is None else "parameters.max_new_tokens")
    return TgiGeneration(
        prompts=(tuple(ids),),
        params=params,
        model=model,
        fingerprint=context.adapters.fingerprint(loaded.fingerprint, model),
        adapter=context.adapters.named(model),
        stream=bool(body.stream),
        include_stop=True,
        form_field=GRAMMAR,
        cut_tokens=len(every) - len(ids),
        prefix=body.inputs if parameters.return_full_text else "",
        details=details,
    )


def _constraint(grammar: Grammar | None) -> Constraint | None:
    """The form that an answer must have. Raises RequestError."""
    if grammar is None:
        return None
    value = grammar.value
    with renamed({"constraint": GRAMMAR}):
        if grammar.type == "regex":
            if not isinstance(value, str):
                raise invalid(GRAMMAR, "must be a regular expression")
            return Constraint.of_regex(value)
        if grammar.type == "json_schema" and isinstance(value, dict):
            if not value.keys() <= {"name", "schema"}:
                raise invalid(GRAMMAR, "may have the fields name and schema")
            return schema(f"{GRAMMAR}.schema", value.get("schema"))
        return Constraint.of_json_schema(value)


def _temperature(parameters: Parameters) -> float:
    """0, which takes the most likely token, unless something asks for sampling."""
    temperature = parameters.temperature
    chooses = temperature not in (None, 1.0) or parameters.top_k or parameters.top_p not in (None, 1.0)
    if not (parameters.do_sample or chooses):
        return 0.0
    return 1.0 if temperature is None else temperature
