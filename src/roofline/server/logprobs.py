"""Log-probabilities as OpenAI's chats tell them, and Ollama's answers too."""

from collections.abc import Iterable

from roofline.common.json_types import JsonObject
from roofline.engine.events import TokenLogprob
from roofline.server.text_side import TextSide


def token_logprobs(text: TextSide, tokens: Iterable[TokenLogprob]) -> list[JsonObject]:
    """An object for each token, with the likeliest ones beside it."""

    def entry(token: int, logprob: float) -> JsonObject:
        raw = text.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in token.top]}
        for token in tokens
    ]
