"""POST /v1/messages, /v1/messages/count_tokens"""

from fastapi import APIRouter, Request, Response

from roofline.server.keys import USE
from roofline.server.respond import on_thread_if_large, respond
from roofline.server.response import json_response
from roofline.server.routes.anthropic import read
from roofline.server.routes.anthropic.form import MessageForm
from roofline.server.routes.anthropic.schema import MessagesBody, PromptBody
from roofline.server.scopes import needs

router = APIRouter()


@router.post("/v1/messages")
@needs(USE, MessagesBody)
async def messages(request: Request) -> Response:
    """Answer a conversation. Body, answer, events and errors are Anthropic's."""
    return await respond(request, read.messages, MessageForm)


@router.post("/v1/messages/count_tokens")
@needs(USE, PromptBody)
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has as a prompt."""
    return json_response(await on_thread_if_large(request, await request.body(), read.count_tokens))
