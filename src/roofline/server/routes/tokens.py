"""POST /tokenize, /detokenize: text and conversations to ids and back, as vLLM has them. POST /apply-template: a
conversation as the text that a model sees, as llama.cpp has it."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.process.messages import Ready
from roofline.server.body import Body, count_within, fields_of, invalid, refuse_unsupported, typed
from roofline.server.context import Context
from roofline.server.generation import check_model
from roofline.server.respond import on_thread_if_large
from roofline.server.response import json_response
from roofline.server.routes.openai.messages import conversation_of
from roofline.server.routes.openai.read import refuse_in_messages
from roofline.server.routes.openai.schema import ChatBody, Message, Tool
from roofline.server.scopes import USE, needs

router = APIRouter()
# Fields that clients send and we do not have, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "chat_template": (None,),
    "mm_processor_kwargs": (None, {}),
}
INSTEAD = {"chat_template": "The template is the model's own"}


class ChatFields(Body):
    """What conversations are rendered by, as in /v1/chat/completions.

    add_generation_prompt: up to where the assistant's answer begins; default: unless the answer goes on.
    """

    model: str | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(ChatFields):
    """POST /tokenize. Either prompt or messages.

    add_special_tokens: put the model's BOS before a prompt (default); templates write their own, so messages have none.
    parse_special: special tokens in a prompt are such, and not plain text.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


class TemplateBody(ChatFields):
    """POST /apply-template"""

    messages: list[Message]


@router.post("/tokenize")
@needs(USE, TokenizeBody)
async def tokenize(request: Request) -> Response:
    """The ids of a prompt or of a conversation, however many they are; special tokens in users' text are plain text
    unless a prompt has `parse_special`."""
    return await _answer(request, _tokenize)


@router.post("/detokenize")
@needs(USE, DetokenizeBody)
async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens among them."""
    return await _answer(request, _detokenize)


@router.post("/apply-template")
@needs(USE, TemplateBody)
async def apply_template(request: Request) -> Response:
    """A conversation as the model's chat template writes it."""
    return await _answer(request, _apply_template)


async def _answer(request: Request, make: Callable[[bytes, Context], JsonObject]) -> Response:
    return json_response(await on_thread_if_large(request, await request.body(), make))


def _tokenize(raw: bytes, context: Context) -> JsonObject:
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    refuse_in_messages(fields)
    body = typed(TokenizeBody, fields)
    loaded = _loaded(body.model, context)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(400, "invalid_value", "Give one of prompt and messages.", param="prompt")
    text = context.text
    if body.messages is not None:
        for name in ("add_special_tokens", "parse_special"):
            if getattr(body, name):
                raise invalid(name, "is for prompt; the template of messages writes its own")
        ids = text.encode_marked(*_rendered(body, body.messages, context))
    else:
        assert body.prompt is not None, "it is one of the two"
        for name in ChatFields.model_fields.keys() - {"model"}:
            if getattr(body, name) is not None:
                raise invalid(name, "is for messages")
        special = body.add_special_tokens is not False
        ids = text.encode(body.prompt, add_special=special, parse_special=bool(body.parse_special))
    strings = [text.tokenizer.token_string(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": loaded.max_model_len, "tokens": ids, "token_strs": strings}


def _detokenize(raw: bytes, context: Context) -> JsonObject:
    body = typed(DetokenizeBody, fields_of(raw, context.limits))
    size = _loaded(body.model, context).vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
        raise invalid("tokens", f"has an id outside the vocabulary of {size}")
    return {"prompt": context.text.decode(body.tokens)}


def _apply_template(raw: bytes, context: Context) -> JsonObject:
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    refuse_in_messages(fields)
    body = typed(TemplateBody, fields)
    _loaded(body.model, context)
    return {"prompt": _rendered(body, body.messages, context)[0]}


def _loaded(model: str | None, context: Context) -> Ready:
    if model is not None:
        check_model(model, context)
    return context.loaded()


def _rendered(body: ChatFields, messages: list[Message], context: Context) -> tuple[str, bytes]:
    count_within("messages", len(messages), 1, context.limits.messages)
    names = ("tools", "chat_template_kwargs", "continue_final_message")
    chat = ChatBody(model=context.name, messages=messages, **{name: getattr(body, name) for name in names})
    conversation = conversation_of(chat, context.limits, ended=body.add_generation_prompt is not False)
    if conversation.continues and body.add_generation_prompt:
        raise invalid("add_generation_prompt", "must be false where continue_final_message is true")
    return context.text.render(
        conversation.messages,
        tools=conversation.tools,
        variables=conversation.variables,
        continues=conversation.continues,
        answer_begins=body.add_generation_prompt is not False,
    )
