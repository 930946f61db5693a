"""Bodies of Ollama's routes -> requests that will be answered."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from roofline.common.errors import RequestError
from roofline.engine.constraint import Constraint
from roofline.server.body import count_within, fields_of, invalid, refuse_unsupported, renamed, typed, within
from roofline.server.context import Context
from roofline.server.conversation import ChatPrompt, Conversation, check_tools, effort_variables, prompt_of
from roofline.server.efforts import thinking_switch
from roofline.server.forms import schema
from roofline.server.generation import Generation, check_prompts, sampling_params
from roofline.server.routes.ollama.schema import (
    INSTEAD,
    NEUTRAL,
    NEUTRAL_MESSAGE,
    NEUTRAL_OPTIONS,
    ChatRequest,
    GenerateRequest,
    Message,
    Options,
    Request,
)
from roofline.text.replies.parser import PlainReply

ROLES = ("system", "user", "assistant", "tool")
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's own
SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
OTHER_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "seed": "seed"}
FIELDS = {name: f"options.{name}" for name in SAME_NAMES} | {ours: f"options.{o}" for ours, o in OTHER_NAMES.items()}
LOADING_BYTES = 1024  # more has something to answer
NO_TIME = re.compile(r"0+(\.0*)?[a-zµ]*")


def chat(raw: bytes, context: Context) -> Generation:
    """A body of /api/chat."""
    fields = _fields(raw, context)
    messages = fields.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse_unsupported(message, NEUTRAL_MESSAGE, INSTEAD, f"messages.{number}.")
    body = typed(ChatRequest, fields)
    _check(body, context)
    if _parses(body):
        raise invalid("options.parse_special", "is for raw prompts")
    count_within("messages", len(body.messages), 1, context.limits.messages)
    tools = [{"type": "function", "function": _described(tool.function.model_dump())} for tool in body.tools or ()]
    check_tools(tools, context.limits)
    turns = list(_turns(body.messages))
    continues = turns[-1]["role"] == "assistant"
    if continues and "tool_calls" in turns[-1]:
        raise invalid("messages", "the last one calls tools, and their results must follow")
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    conversation = Conversation(turns, tools, strict=strict, variables=_variables(body, context), continues=continues)
    with renamed({"continue_final_message": "messages"}):
        prompt = prompt_of(conversation, context.text, context.generating().max_model_len, _form(body))
    return _generation("messages", body, prompt, context, at_start=not continues)


def generate(raw: bytes, context: Context) -> Generation:
    """A body of /api/generate."""
    body = typed(GenerateRequest, _fields(raw, context))
    _check(body, context)
    most = context.generating().max_model_len
    if body.raw:
        for name in ("system", "think"):
            if getattr(body, name):
                raise invalid(name, "is for prompts that a template writes; raw ones are as they stand")
        ways = {"add_special": False, "parse_special": True} if _parses(body) else {}
        prompt = ChatPrompt(context.text.encode(body.prompt, most, **ways), PlainReply, frozenset(), _form(body))
        return _generation("prompt", body, prompt, context, at_start=False)
    if _parses(body):
        raise invalid("options.parse_special", "is for raw prompts")
    system = [{"role": "system", "content": body.system}] if body.system else []
    turns = [*system, {"role": "user", "content": body.prompt}]
    with renamed({"messages": "prompt"}):
        conversation = Conversation(turns, variables=_variables(body, context))
        prompt = prompt_of(conversation, context.text, most, _form(body))
    return _generation("prompt", body, prompt, context, at_start=True)


def _parses(body: Request) -> bool:
    return body.options is not None and body.options.parse_special is True


def model_to_load(raw: bytes, context: Context, empty: str) -> str | None:
    """The model of a body that only asks for it to be loaded, by its name there; None for one to be answered.

    empty: the field without which there is nothing to answer. Raises RequestError.
    """
    if len(raw) > LOADING_BYTES:
        return None
    fields = _fields(raw, context)
    if fields.get(empty) or fields.get("system"):
        return None
    body = typed(ChatRequest if empty == "messages" else GenerateRequest, fields)
    _check(body, context)
    context.loaded()
    return body.model


def served_name(name: str, context: Context) -> str:
    """The name of the served model or of an adapter, also for one with the tag `latest`. Raises RequestError 404."""
    for known in (name, name.removesuffix(":latest")):
        if known in context.names or context.adapters.get(known) is not None:
            return known
    raise RequestError(404, "model_not_found", f"model '{name[:100]}' not found", param="model")


def _fields(raw: bytes, context: Context) -> dict[str, object]:
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    if isinstance(options := fields.get("options"), dict):
        refuse_unsupported(options, NEUTRAL_OPTIONS, INSTEAD, "options.")
    return fields


def _check(body: Request, context: Context) -> None:
    served_name(body.model, context)
    check_keep_alive(body.keep_alive)
    within("top_logprobs", body.top_logprobs, 0, context.limits.logprobs)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")


def check_keep_alive(keep_alive: str | float | None) -> None:
    """Raises RequestError where a model is to leave at once."""
    if keep_alive is not None and NO_TIME.fullmatch(str(keep_alive).strip()):
        raise invalid("keep_alive", "the model stays while the server runs")


def _variables(body: Request, context: Context) -> dict[str, object]:
    """Of the chat template: whether the model is to think."""
    if body.think and not context.text.reply_format.thinks:
        raise invalid("think", "the model does not think")
    if isinstance(body.think, str):
        return effort_variables("think", body.think, context.text)
    switch = thinking_switch(context.text.template.source) or "enable_thinking"
    return {} if body.think is None else {switch: body.think}


def _described(function: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in function.items() if value is not None and name != "strict"}


class OpenCall(NamedTuple):
    """A call of a tool without a result yet. has_own_id: the client gave the id."""

    id: str
    name: str
    has_own_id: bool


def _turns(messages: list[Message]) -> Iterator[dict[str, object]]:
    """Messages as templates read them. Ollama's calls need no ids: results are matched with calls by name and order."""
    open_calls: list[OpenCall] = []
    count = 0
    for number, message in enumerate(messages):
        where, role = f"messages.{number}", message.role
        if role not in ROLES:
            raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        for name, of in (
            ("tool_calls", "assistant"),
            ("thinking", "assistant"),
            ("tool_name", "tool"),
            ("name", "tool"),
        ):
            if getattr(message, name) and role != of:
                raise invalid(f"{where}.{name}", f"is no field of a message whose role is {role}")
        turn: dict[str, object] = {"role": role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                count += 1
                name = call.function.name
                default = f"call{count:05d}"  # nine characters, as Mistral's template asks
                open_calls.append(OpenCall(call.id or default, name, has_own_id=bool(call.id)))
                function = {"name": name, "arguments": call.function.arguments}
                calls.append({"id": open_calls[-1].id, "type": "function", "function": function})
            turn["tool_calls"] = calls
        if role == "tool":
            answered = _answered(where, message, open_calls)
            open_calls.remove(answered)
            turn |= {"tool_call_id": answered.id, "name": answered.name}
        yield turn


def _answered(where: str, message: Message, open_calls: Sequence[OpenCall]) -> OpenCall:
    """The call that a tool's message is the result of. Its id need not be that of a call that came without one: clients
    make some of their own."""
    told_name, told_id = message.tool_name or message.name, message.tool_call_id
    of_name = [call for call in open_calls if told_name in (None, call.name)]
    fitting = [call for call in of_name if call.id == told_id]
    fitting += [call for call in of_name if told_id is None or not call.has_own_id]
    if not fitting:
        raise invalid(where, "is the result of no call of an earlier message")
    return fitting[0]


def _generation(field: str, body: Request, prompt: ChatPrompt, context: Context, at_start: bool) -> Generation:
    loaded, options = context.generating(), body.options or Options()
    served = served_name(body.model, context)
    values: dict[str, object] = DEFAULTS | {
        name: value for name in SAME_NAMES if (value := getattr(options, name)) is not None
    }
    values["repetition_penalty"] = options.repeat_penalty
    values["seed"] = None if options.seed == -1 else options.seed
    values["max_tokens"] = _longest(field, options, len(prompt.ids), loaded.max_model_len)
    values["constraint"] = prompt.constraint
    values["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    with renamed(FIELDS):
        params = sampling_params(values, context.limits)
    check_prompts(field, [prompt.ids], params, loaded, "options.num_predict")
    return Generation(
        prompts=(tuple(prompt.ids),),
        params=params,
        model=body.model,
        fingerprint=context.adapters.fingerprint(loaded.fingerprint, served),
        adapter=context.adapters.named(served),
        stream=body.stream is not False,
        at_start=at_start,
        parser=prompt.parser,
        shown=prompt.shown,
        form_field="format" if body.format else "tools",
    )


def _form(body: Request) -> Constraint | None:
    if not body.format:
        return None
    if getattr(body, "tools", None):
        raise invalid("format", "an answer with a form calls no tools; leave one of the two out")
    if isinstance(body.format, str) and body.format != "json":
        raise invalid("format", 'must be "json" or a JSON schema')
    return Constraint.of_json() if isinstance(body.format, str) else schema("format", body.format)


def _longest(field: str, options: Options, prompt: int, most: int) -> int | None:
    """Tokens of the longest answer; None: what fits into the server's context."""
    longest = options.num_predict
    if longest in (-1, -2):
        longest = None
    elif longest is not None and longest < 1:
        raise invalid("options.num_predict", f"{longest} is neither a number of tokens, nor -1 or -2 for what fits")
    if options.num_ctx is None:
        return longest
    if not 1 <= options.num_ctx <= most:
        raise invalid("options.num_ctx", f"this server's context is {most}")
    room = options.num_ctx - prompt
    if room < 1:
        problem = f"has {prompt} tokens, and with its answer it must fit into num_ctx, {options.num_ctx}"
        raise RequestError(400, "context_length_exceeded", f"{field}: {problem}.", param=field)
    return room if longest is None else min(longest, room)
