"""The package ollama: POST /api/chat and /api/generate, GET /api/tags."""

from collections.abc import Sequence
from typing import Any

from roofline.bench.conform.checks import TOOL, expect
from roofline.bench.conform.client import Server
from roofline.bench.conform.packages.round_trip import (
    MOST_CALL_TOKENS,
    MOST_TOKENS,
    NO_ROUTE,
    TOOL_NAME,
    PackageCall,
    PackageReply,
    asking,
    package,
)
from roofline.common.json_types import JsonObject

Response = Any  # of the package, which is imported only where it is used
PROMPT = "Tell a short story about a fox and a well."


class Ollama:
    """The package ollama. Its API cannot require a call, and its calls have no ids."""

    route = "/api/chat"
    requires_calls = False

    def __init__(self, server: Server) -> None:
        self.server = server
        self.module = package("ollama", "ollama")
        self.client = self.module.Client(host=server.root, timeout=server.seconds, headers=server.authorization)

    def answer(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        response = self.client.chat(**self._fields(turns, tools))
        return _reply(response.message, response)

    def stream(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        parts = list(self.client.chat(**self._fields(turns, tools), stream=True))
        expect(bool(parts) and parts[-1].done, "the last part of the stream is not done")
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        text = "".join(part.message.content or "" for part in parts)
        return _reply(self.module.Message(role="assistant", content=text, tool_calls=calls or None), parts[-1])

    def result(self, call: PackageCall, text: str) -> object:
        return self.module.Message(role="tool", tool_name=call.name, content=text)

    def called(self) -> tuple[PackageCall, object]:
        call = PackageCall("", TOOL_NAME, {"city": "Ulm"})
        function = self.module.Message.ToolCall.Function(name=call.name, arguments=call.arguments)
        calls = [self.module.Message.ToolCall(function=function)]
        return call, self.module.Message(role="assistant", content="", tool_calls=calls)

    def generates(self) -> str:
        """Check that a generation and its stream are equal. Raises Violation and Missing."""
        fields = {"model": self.server.model, "prompt": PROMPT, "options": _options(MOST_TOKENS)}
        with asking("a generation", "/api/generate", NO_ROUTE):
            text = self.client.generate(**fields).response
        expect(bool(text), "the generation has no text")
        with asking("a generation as a stream"):
            streamed = "".join(part.response for part in self.client.generate(**fields, stream=True))
        expect(streamed == text, f"{streamed!r} is streamed, where {text!r} is the answer")
        return f"{len(text)} characters"

    def lists(self) -> str:
        """Check that the model is listed. Raises Violation and Missing."""
        with asking("the list of models", "/api/tags", NO_ROUTE):
            names = [model.model for model in self.client.list().models]
        own = self.server.model.removesuffix(":latest")
        expect(any((name or "").removesuffix(":latest") == own for name in names), f"{own!r} is not among {names}")
        return f"{len(names)} listed"

    def _fields(self, turns: Sequence[object], tools: bool) -> JsonObject:
        fields = {"model": self.server.model, "messages": list(turns), "options": _options(MOST_TOKENS)}
        return {**fields, "tools": [TOOL], "options": _options(MOST_CALL_TOKENS)} if tools else fields


def _options(most: int) -> JsonObject:
    return {"temperature": 0, "seed": 1, "num_predict": most}


def _reply(message: Response, last: Response) -> PackageReply:
    calls = tuple(
        PackageCall("", call.function.name, dict(call.function.arguments)) for call in message.tool_calls or ()
    )
    return PackageReply(message.content or "", message, calls, last.prompt_eval_count)
