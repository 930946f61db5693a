"""Bodies of /v1/responses -> requests that will be answered, with what the response says of its request."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.constraint import Constraint
from roofline.server.body import count_within, fields_of, invalid, refuse_unsupported, renamed, typed, within
from roofline.server.context import Context
from roofline.server.conversation import (
    ChatPrompt,
    Conversation,
    check_tools,
    effort_variables,
    flat_tool_fields,
    prompt_of,
)
from roofline.server.forms import schema
from roofline.server.generation import Generation, check_model, check_prompts, sampling_params
from roofline.server.keys import PRIORITIES
from roofline.server.limits import Limits
from roofline.server.receipts import with_receipt
from roofline.server.routes.responses.items import normal_items, turns_of
from roofline.server.routes.responses.schema import (
    INCLUDED,
    INSTEAD,
    NEUTRAL,
    NEUTRAL_REASONING,
    NEUTRAL_TEXT,
    NEUTRAL_TOOL,
    FunctionTool,
    NamedFunction,
    ResponseBody,
)

SAMPLING_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
FIELDS = {"max_tokens": "max_output_tokens", "constraint": "text.format.schema"}  # what the API calls them
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512  # OpenAI's, the last two in characters


@dataclass(frozen=True)
class ResponseGeneration(Generation):
    """A Generation whose answer may be kept.

    input: the items of the request, as they are kept. repeated: the fields of the request that its response has too.
    """

    input: Sequence[JsonObject] = ()
    repeated: JsonObject = field(default_factory=dict)
    previous: str | None = None
    store: bool = True
    background: bool = False


def body_of(raw: bytes, context: Context) -> ResponseBody:
    """The typed body of a request. Raises RequestError."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    for name, neutral in (("reasoning", NEUTRAL_REASONING), ("text", NEUTRAL_TEXT)):
        if isinstance(inner := fields.get(name), dict):
            refuse_unsupported(inner, neutral, INSTEAD, f"{name}.")
    tools = fields.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            _refuse_kind(f"tools.{number}", tool)
            refuse_unsupported(tool, NEUTRAL_TOOL, INSTEAD, f"tools.{number}.")
    if isinstance(choice := fields.get("tool_choice"), dict):
        _refuse_kind("tool_choice", choice)
    _take_included(fields)
    body = typed(ResponseBody, fields)
    _check(body, context.limits)
    check_model(body.model, context)
    return body


def _take_included(fields: dict[str, object]) -> None:
    """Take out what answers should have beside their text, where that adds nothing here."""
    names = fields.pop("include", None)
    for name in names if isinstance(names, list) else [] if names is None else [names]:
        if name not in INCLUDED:
            message = f"include: {str(name)[:100]!r} is not supported. {INSTEAD['include']}."
            raise RequestError(400, "unsupported_parameter", message, param="include")


def _refuse_kind(where: str, fields: dict[str, object]) -> None:
    """Tools that a server runs, and choices among them, are not there."""
    kind = fields.get("type")
    if isinstance(kind, str) and kind != "function":
        message = f"{where}.type: {kind[:64]!r} is not supported; tools are functions of the client's."
        raise RequestError(400, "unsupported_parameter", message, param=f"{where}.type")


def _check(body: ResponseBody, limits: Limits) -> None:
    """Raises RequestError for fields that do not fit each other, or are too large."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    if body.background and body.stream:
        raise invalid("background", "cannot be streamed here; ask for the response by its id instead")
    if body.background and body.store is False:
        raise invalid("background", "needs store to be true")
    for name in ("user", "safety_identifier", "cache_salt", "prompt_cache_key"):
        if len(getattr(body, name) or "") > limits.user_characters:
            raise invalid(name, f"may have at most {limits.user_characters} characters")
    count_within("metadata", len(body.metadata or ()), 0, METADATA_PAIRS)
    for key, value in (body.metadata or {}).items():
        if len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            sizes = f"{METADATA_KEY} characters, and a value at most {METADATA_VALUE}"
            raise invalid("metadata", f"a key may have at most {sizes}")
    within("priority", body.priority, -PRIORITIES, PRIORITIES)
    if not isinstance(body.input, str):
        count_within("input", len(body.input), 1, limits.messages)
    choice, names = body.tool_choice, [tool.name for tool in body.tools or ()]
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise invalid("tool_choice.name", "is none of the tools")
    if choice == "required" and not names:
        raise invalid("tool_choice", "needs tools where one is required")


def generation_of(body: ResponseBody, kept: Sequence[bytes], context: Context) -> ResponseGeneration:
    """What is to be computed. kept: the items before this request's, lists as JSON, oldest first.

    Raises RequestError."""
    before = [item for items in kept for item in msgspec.json.decode(items)]
    new = normal_items(body.input, uuid.uuid4().hex)
    count_within("input", len(before) + len(new), 1, context.limits.messages)
    constraint = _form(body)
    with renamed(FIELDS):
        values: JsonObject = {name: getattr(body, name) for name in SAMPLING_NAMES}
        values |= {"max_tokens": body.max_output_tokens, "constraint": constraint}
        params = sampling_params(values, context.limits)
    prompt = _prompt(body, turns_of(body.instructions, before, new), context, constraint)
    if prompt.constraint is not None:
        params = replace(params, constraint=prompt.constraint)
    loaded = context.generating()
    check_prompts("input", [prompt.ids], params, loaded, "max_output_tokens")
    generation = ResponseGeneration(
        prompts=(tuple(prompt.ids),),
        params=params,
        model=check_model(body.model, context),
        fingerprint=context.adapters.fingerprint(loaded.fingerprint, body.model),
        adapter=context.adapters.named(body.model),
        stream=bool(body.stream),
        at_start=True,
        user=body.safety_identifier if body.safety_identifier is not None else body.user,
        parser=prompt.parser,
        shown=prompt.shown,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        form_field="text.format.schema" if constraint is not None else "tools",
        input=new,
        repeated=_repeated(body),
        previous=body.previous_response_id,
        store=body.store is not False,
        background=bool(body.background),
    )
    return with_receipt(generation, body.receipt or False, loaded)


def _form(body: ResponseBody) -> Constraint | None:
    """The form that the answer must have."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        for name in ("name", "description", "schema_", "strict"):
            if getattr(form, name) is not None:
                raise invalid(f"text.format.{name.rstrip('_')}", "belongs to the type json_schema")
    if form.type == "text":
        return None
    if body.tools and body.tool_choice != "none":
        problem = "an answer with a form calls no tools; give tool_choice none, or leave one of the two out"
        raise invalid("text.format", problem)
    if form.type == "json_object":
        return Constraint.of_json()
    if form.schema_ is None:
        field = "text.format.schema"
        raise RequestError(400, "missing_parameter", f"{field} is missing.", param=field)
    return schema("text.format.schema", form.schema_)


def _prompt(
    body: ResponseBody, turns: Sequence[dict[str, object]], context: Context, form: Constraint | None
) -> ChatPrompt:
    tools = [_template_tool(tool) for tool in body.tools or ()]
    fields = flat_tool_fields(len(tools), "parameters")
    with renamed(fields):
        check_tools(tools, context.limits)
    choice = body.tool_choice
    effort = effort_variables("reasoning.effort", body.effort, context.text)
    conversation = Conversation(
        messages=turns,
        tools=tools,
        tool_choice=choice if isinstance(choice, str) else "auto",
        named_tool=choice.name if isinstance(choice, NamedFunction) else None,
        strict=frozenset(tool.name for tool in body.tools or () if tool.strict),
        one_call=body.parallel_tool_calls is False,
        variables={**effort, **(body.chat_template_kwargs or {})},
    )
    with renamed({"messages": "input"} | fields):
        return prompt_of(conversation, context.text, context.generating().max_model_len, form)


def _template_tool(tool: FunctionTool) -> dict[str, object]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type", "strict"})}


def _repeated(body: ResponseBody) -> JsonObject:
    """What a response repeats of its request, defaults among it."""
    form = body.text.format if body.text is not None else None
    told_form = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": told_form, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [{**tool.model_dump(), "strict": bool(tool.strict)} for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
