"""Bodies of Anthropic's routes -> requests that will be answered."""

from dataclasses import replace
from functools import partial

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.constraint import Constraint
from roofline.server.body import count_within, fields_of, invalid, refuse_unsupported, renamed, typed
from roofline.server.context import Context
from roofline.server.conversation import (
    ChatPrompt,
    Conversation,
    effort_variables,
    flat_tool_fields,
    prompt_of,
)
from roofline.server.efforts import thinking_switch
from roofline.server.forms import schema
from roofline.server.generation import Generation, check_model, check_prompts, sampling_params
from roofline.server.routes.anthropic.conversation import conversation_of, refuse_unreadable
from roofline.server.routes.anthropic.errors import NO_THREADS
from roofline.server.routes.anthropic.schema import (
    INSTEAD,
    NEUTRAL,
    NEUTRAL_OUTPUT,
    NEUTRAL_TOOL,
    UNREADABLE,
    MessagesBody,
    PromptBody,
)
from roofline.text.replies.parser import WithoutThoughts

SAMPLING_NAMES = ("max_tokens", "temperature", "top_k", "top_p")
FIELDS = {"stop": "stop_sequences"}  # what the API calls parameters of sampling


def messages(raw: bytes, context: Context) -> Generation:
    """A body of /v1/messages."""
    body = typed(MessagesBody, _fields(raw, context))
    user = body.metadata.user_id if body.metadata is not None else None
    if len(user or "") > context.limits.user_characters:
        raise invalid("metadata.user_id", f"may have at most {context.limits.user_characters} characters")
    form_field, constraint = _form(body)
    with renamed(FIELDS):
        values: JsonObject = {name: getattr(body, name) for name in SAMPLING_NAMES}
        params = sampling_params(values | {"stop": body.stop_sequences, "constraint": constraint}, context.limits)
    with renamed({"constraint": form_field}):
        conversation, prompt = _prompt(body, context, constraint)
    if prompt.constraint is not None:
        params = replace(params, constraint=prompt.constraint)
    hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"
    loaded = context.generating()
    check_prompts("messages", [prompt.ids], params, loaded)
    return Generation(
        prompts=(tuple(prompt.ids),),
        params=params,
        model=check_model(body.model, context),
        fingerprint=context.adapters.fingerprint(loaded.fingerprint, body.model),
        adapter=context.adapters.named(body.model),
        stream=bool(body.stream),
        at_start=not conversation.continues,
        user=user,
        parser=partial(WithoutThoughts, prompt.parser) if hides_thoughts else prompt.parser,
        shown=prompt.shown,
        form_field="tools" if constraint is None else form_field,
    )


def count_tokens(raw: bytes, context: Context) -> JsonObject:
    """A body of /v1/messages/count_tokens -> its answer."""
    return {"input_tokens": len(_prompt(typed(PromptBody, _fields(raw, context)), context)[1].ids)}


def _form(body: MessagesBody) -> tuple[str, Constraint | None]:
    """The form that the answer must have, and the field that says so."""
    config = body.output_config.format if body.output_config is not None else None
    if config is not None and body.output_format is not None:
        raise invalid("output_format", "is another name of output_config.format; give one of the two")
    field = "output_format.schema" if config is None else "output_config.format.schema"
    form = body.output_format if config is None else config
    if form is None:
        return field, None
    if body.tools and (body.tool_choice is None or body.tool_choice.type != "none"):
        problem = "an answer with a form calls no tools; give tool_choice none, or leave one of the two out"
        raise invalid(field.removesuffix(".schema"), problem)
    return field, schema(field, form.schema_)


def _fields(raw: bytes, context: Context) -> dict[str, object]:
    """The fields of a body that the schema has."""
    fields = fields_of(raw, context.limits)
    if fields.pop("thread", None) is not None:
        message = "thread: conversations are not held here; send their messages whole."
        raise RequestError(400, NO_THREADS, message, param="thread")
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    refuse_unreadable(fields, UNREADABLE)
    if isinstance(config := fields.get("output_config"), dict):
        refuse_unsupported(config, NEUTRAL_OUTPUT, where="output_config.")
    tools = fields.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            refuse_unsupported(tool, NEUTRAL_TOOL, where=f"tools.{number}.")
    return fields


def _prompt(body: PromptBody, context: Context, form: Constraint | None = None) -> tuple[Conversation, ChatPrompt]:
    check_model(body.model, context)
    loaded = context.generating()
    count_within("messages", len(body.messages), 1, context.limits.messages)
    conversation = conversation_of(body, context.limits)
    effort = body.output_config.effort if body.output_config is not None else None
    degree = effort_variables("output_config.effort", effort, context.text, switches=False)
    switch = thinking_switch(context.text.template.source) or "enable_thinking"
    thinking = conversation.variables.get("enable_thinking")
    variables = degree if thinking is None else {**degree, switch: thinking}
    conversation = replace(conversation, variables=variables)
    fields = flat_tool_fields(len(conversation.tools), "input_schema")
    with renamed({"continue_final_message": "messages"} | fields):
        return conversation, prompt_of(conversation, context.text, loaded.max_model_len, form)
