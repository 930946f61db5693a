"""Clients of POST /v1/chat/completions: the packages openai and litellm, whose answers have the same fields."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from roofline.bench.conform.checks import GREEDY, TOOL
from roofline.bench.conform.client import Server
from roofline.bench.conform.packages.round_trip import (
    MOST_CALL_TOKENS,
    MOST_TOKENS,
    NO_KEY,
    PackageCall,
    PackageReply,
    package,
)
from roofline.common import env
from roofline.common.json_types import JsonObject

Completion = Any  # of a package that is imported only where it is used


class ChatCompletions(ABC):
    """What the two packages share: how a request is made, and how an answer is read."""

    route = "/v1/chat/completions"
    requires_calls = True

    def __init__(self, server: Server) -> None:
        self.server = server

    @abstractmethod
    def create(self, fields: JsonObject) -> Completion:
        """A complete answer."""

    @abstractmethod
    def assembled(self, fields: JsonObject) -> Completion:
        """A stream, put together by the package itself."""

    def answer(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        return _reply(self.create(self._fields(turns, tools, required)))

    def stream(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        return _reply(self.assembled(self._fields(turns, tools, required)))

    def result(self, call: PackageCall, text: str) -> object:
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def called(self) -> tuple[PackageCall, object]:
        raise NotImplementedError("this API can require a call")

    def _fields(self, turns: Sequence[object], tools: bool, required: bool) -> JsonObject:
        fields = {"model": self.server.model, "messages": list(turns), "max_tokens": MOST_TOKENS, **GREEDY}
        if tools:
            fields |= {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": MOST_CALL_TOKENS}
        if required:
            fields["tool_choice"] = "required"
        return fields


class OpenAI(ChatCompletions):
    """The package openai."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        module = package("openai", "openai")
        self.client = module.OpenAI(
            base_url=server.url, api_key=server.key or NO_KEY, timeout=server.seconds, max_retries=0
        )

    def create(self, fields: JsonObject) -> Completion:
        return self.client.chat.completions.create(**fields)

    def assembled(self, fields: JsonObject) -> Completion:
        with self.client.chat.completions.stream(**fields) as stream:
            stream.until_done()
            # get_final_completion() refuses answers that ended at max_tokens.
            return stream.current_completion_snapshot


class LiteLLM(ChatCompletions):
    """The package litellm, as for any server of OpenAI's protocol (`openai/NAME`)."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        # Otherwise its import fetches a table of prices from GitHub.
        env.suggest("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        self.module = package("litellm", "litellm")
        # It prints advice beside its errors, and would count its users.
        vars(self.module).update(suppress_debug_info=True, telemetry=False)

    def create(self, fields: JsonObject) -> Completion:
        return self.module.completion(
            **{**fields, "model": f"openai/{self.server.model}"},
            api_base=self.server.url,
            api_key=self.server.key or NO_KEY,
            timeout=self.server.seconds,
            num_retries=0,
            max_retries=0,
        )

    def assembled(self, fields: JsonObject) -> Completion:
        chunks: Iterable[object] = self.create({**fields, "stream": True})
        return self.module.stream_chunk_builder(list(chunks))


def _reply(completion: Completion) -> PackageReply:
    message = completion.choices[0].message
    calls = tuple(
        PackageCall(call.id or "", call.function.name, _arguments(call.function.arguments))
        for call in message.tool_calls or ()
    )
    usage = completion.usage
    return PackageReply(message.content or "", message, calls, usage.prompt_tokens if usage is not None else None)


def _arguments(text: str) -> object:
    """The arguments of a call, as text where they are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
