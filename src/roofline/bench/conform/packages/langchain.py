"""The package langchain-openai: its messages are objects of its own, and a stream is a sum of its chunks."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

from roofline.bench.conform.checks import TOOL
from roofline.bench.conform.client import Server, Violation
from roofline.bench.conform.packages.round_trip import (
    MOST_CALL_TOKENS,
    MOST_TOKENS,
    NO_KEY,
    PackageCall,
    PackageReply,
    package,
)

Runnable = Any  # of the package, which is imported only where it is used


class LangChain:
    """The package langchain-openai."""

    route = "/v1/chat/completions"
    requires_calls = True

    def __init__(self, server: Server) -> None:
        self.server = server
        self.module = package("langchain_openai", "langchain-openai")

    def answer(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        return _reply(self._model(tools, required).invoke(list(turns)))

    def stream(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        chunks = list(self._model(tools, required).stream(list(turns)))
        if not chunks:
            raise Violation("the stream has no event")
        return _reply(reduce(add, chunks))

    def result(self, call: PackageCall, text: str) -> object:
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def called(self) -> tuple[PackageCall, object]:
        raise NotImplementedError("this API can require a call")

    def _model(self, tools: bool, required: bool) -> Runnable:
        model = self.module.ChatOpenAI(
            model=self.server.model,
            base_url=self.server.url,
            api_key=self.server.key or NO_KEY,
            timeout=self.server.seconds,
            max_retries=0,
            max_tokens=MOST_CALL_TOKENS if tools else MOST_TOKENS,
            temperature=0,
            seed=1,
            stream_usage=True,
        )
        if not tools:
            return model
        choice = {"tool_choice": "required"} if required else {}
        return model.bind_tools([TOOL], parallel_tool_calls=False, **choice)


def _reply(message: Runnable) -> PackageReply:
    calls = tuple(PackageCall(call["id"] or "", call["name"], call["args"]) for call in message.tool_calls)
    usage = message.usage_metadata
    return PackageReply(str(message.content), message, calls, usage["input_tokens"] if usage else None)
