"""The bodies of the OpenAI routes. A field is honoured, or listed in NEUTRAL and refused beyond those values.

Extensions beside OpenAI's fields carry vLLM's names: top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Fields that clients send and we do not have, with the values that ask for nothing.
NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),  # without tools both mean the same
    "prediction": (None,),
    "prompt_cache_key": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


class Body(BaseModel):
    """No field is guessed at: unknown names, other types and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. Several text parts are joined by line breaks, as vLLM does."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]


class Sampling(Body):
    """What both routes share. None stands for the default.

    user, and its successor safety_identifier: names the request in our log lines, and does nothing else.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions"""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Sampling):
    """POST /v1/completions"""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
