"""POST /v1/explain: what a request of OpenAI's API becomes before a model computes anything.

The body is one of chat completions (it has messages) or of completions. It is read by the reader of its API, so what
is refused there is refused here, and the parameters are those that would sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.server.body import fields_of
from roofline.server.context import Context
from roofline.server.respond import on_thread_if_large
from roofline.server.response import json_response
from roofline.server.routes.openai import read
from roofline.server.routes.openai.schema import ChatBody, CompletionBody
from roofline.server.scopes import USE, needs
from roofline.server.text_side import TextSide
from roofline.text.tokenizers.alignment import align

router = APIRouter()


@router.post("/v1/explain")
@needs(USE, ChatBody, CompletionBody)
async def explain_request(request: Request) -> Response:
    """Each prompt as text and as tokens, with who wrote each of them, and how its answer would be sampled."""
    return json_response(await on_thread_if_large(request, await request.body(), explanation))


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt on its way to ids: its text, for each character 1 where the template wrote it, how many ids of the
    tokenizer's own come before and after those of the text. parsed: special tokens of users' are such."""

    text: str
    mask: bytes
    ids: Sequence[int]
    parsed: bool = False
    before: int = 0
    after: int = 0


class RecordingText(TextSide):
    """A text side that keeps what it encodes."""

    def __init__(self, text: TextSide) -> None:
        super().__init__(text.tokenizer, text.template, lambda template: text.reply_format)
        self.encoded: list[EncodedPrompt] = []

    def encode(
        self, text: str, most: int | None = None, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        ids = super().encode(text, most, add_special=add_special, parse_special=parse_special)
        vocabulary = self.tokenizer.vocabulary
        around = (len(vocabulary.prefix), len(vocabulary.suffix)) if add_special else (0, 0)
        self.encoded.append(EncodedPrompt(text, bytes(len(text)), ids, parse_special, *around))
        return ids

    def encode_marked(self, text: str, mask: bytes) -> list[int]:
        ids = super().encode_marked(text, mask)
        self.encoded.append(EncodedPrompt(text, mask, ids))
        return ids


def explanation(raw: bytes, context: Context) -> JsonObject:
    """The explanation of a body. Raises RequestError as the route of its API does."""
    text = RecordingText(context.text)
    is_chat = "messages" in fields_of(raw, context.limits)
    generation = (read.chat if is_chat else read.completion)(raw, replace(context, text=text))
    # Prompts that came as ids were encoded by the client.
    prompts = text.encoded or [EncodedPrompt(text.decode(ids), b"", ids) for ids in generation.prompts]
    most = context.loaded().max_model_len
    return {
        "object": "explanation",
        "kind": "chat" if is_chat else "completion",
        "model": generation.model,
        "system_fingerprint": generation.fingerprint,
        "max_model_len": most,
        "prompts": [
            _prompt(prompt, len(ids), text, most) for prompt, ids in zip(prompts, generation.prompts, strict=True)
        ],
        "sampling": _sampling(asdict(generation.params)),
    }


def _sampling(params: Mapping[str, object]) -> JsonObject:
    bias = params["logit_bias"]
    assert isinstance(bias, tuple), "pairs of an id and its bias"
    params = {name: value for name, value in params.items() if name != "pooling"}  # of other routes
    return {**params, "logit_bias": {str(token): value for token, value in bias}}


def _prompt(prompt: EncodedPrompt, count: int, text: TextSide, most: int) -> JsonObject:
    """count: of the last tokens that the model is given, as truncate_prompt_tokens has it; else all."""
    return {
        "text": prompt.text,
        "token_count": count,
        "cut_tokens": len(prompt.ids) - count,
        "room": most - count,
        "tokens": _tokens(prompt, text)[len(prompt.ids) - count :],
        "escaped": [
            {"text": prompt.text[start:end], "start": start, "end": end}
            for start, end in text.tokenizer.special_spans(prompt.text)
            if 0 in prompt.mask[start:end] and not prompt.parsed
        ],
    }


def _tokens(prompt: EncodedPrompt, text: TextSide) -> list[JsonObject]:
    tokenizer, ids = text.tokenizer, prompt.ids
    inner = ids[prompt.before : len(ids) - prompt.after]
    spans = [None] * prompt.before + align(tokenizer, prompt.text, inner) + [None] * prompt.after
    tokens = []
    for position, (token, span) in enumerate(zip(ids, spans, strict=True)):
        is_special = not prompt.before <= position < len(ids) - prompt.after
        start, end = span or (None, None)
        tokens.append(
            {
                "id": token,
                "text": tokenizer.token_bytes(token).decode("utf-8", "replace"),
                "source": "tokenizer" if is_special else _source(prompt.mask, span),
                "special": token in tokenizer.special_ids,
                "start": start,
                "end": end,
            }
        )
    return tokens


def _source(mask: bytes, span: tuple[int, int] | None) -> str | None:
    """Who wrote the characters of a token."""
    if not mask:
        return "client"
    if span is None:
        return None
    start, end = span
    writers = set(mask[start : max(end, start + 1)])
    return "mixed" if len(writers) > 1 else "template" if 1 in writers else "user"
