"""The package anthropic: POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Sequence
from typing import Any

from roofline.bench.conform.checks import STORY, TOOL, expect
from roofline.bench.conform.client import Server
from roofline.bench.conform.packages.round_trip import (
    MOST_CALL_TOKENS,
    MOST_TOKENS,
    NO_KEY,
    NO_ROUTE,
    PackageCall,
    PackageReply,
    asking,
    package,
)
from roofline.common.json_types import JsonObject

Message = Any  # of the package, which is imported only where it is used


class Anthropic:
    """The package anthropic."""

    route = "/v1/messages"
    requires_calls = True

    def __init__(self, server: Server) -> None:
        self.server = server
        module = package("anthropic", "anthropic")
        self.client = module.Anthropic(
            base_url=server.root, api_key=server.key or NO_KEY, timeout=server.seconds, max_retries=0
        )

    def answer(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        return _reply(self.client.messages.create(**self._fields(turns, tools, required)))

    def stream(self, turns: Sequence[object], *, tools: bool = False, required: bool = False) -> PackageReply:
        with self.client.messages.stream(**self._fields(turns, tools, required)) as stream:
            return _reply(stream.get_final_message())

    def result(self, call: PackageCall, text: str) -> object:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": text}]}

    def called(self) -> tuple[PackageCall, object]:
        raise NotImplementedError("this API can require a call")

    def counts(self) -> str:
        """Check that count_tokens says what an answer is billed. Raises Violation and Missing."""
        with asking("count_tokens", f"{self.route}/count_tokens", NO_ROUTE):
            count = self.client.messages.count_tokens(model=self.server.model, messages=STORY).input_tokens
        with asking("a chat", self.route, NO_ROUTE):
            billed = self.answer(STORY).prompt_tokens
        expect(count == billed, f"count_tokens says {count} tokens, and an answer is billed {billed}")
        return f"{count} tokens"

    def _fields(self, turns: Sequence[object], tools: bool, required: bool) -> JsonObject:
        # Some releases of the package have no parameter for the temperature.
        fields: JsonObject = {"model": self.server.model, "messages": list(turns), "extra_body": {"temperature": 0}}
        if not tools:
            return {**fields, "max_tokens": MOST_TOKENS}
        function = TOOL["function"]
        fields["tools"] = [
            {
                "name": function["name"],
                "description": function["description"],
                "input_schema": function["parameters"],
            }
        ]
        if required:
            fields["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        return {**fields, "max_tokens": MOST_CALL_TOKENS}


def _reply(message: Message) -> PackageReply:
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = tuple(
        PackageCall(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"
    )
    usage = message.usage
    tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return PackageReply(text, {"role": "assistant", "content": message.content}, calls, tokens)
