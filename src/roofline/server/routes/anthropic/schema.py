"""The bodies of Anthropic's routes. A field is honoured, or listed in NEUTRAL and refused beyond those values."""

from typing import Annotated, Literal

from pydantic import Field

from roofline.server.body import Body

# Fields that clients send and we do not have, with the values that cannot change an answer here; a type stands for all
# of its values.
KEPT_THOUGHTS = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
NEUTRAL: dict[str, tuple[object, ...]] = {
    "billing_policy": (None,),
    "compaction": (None,),
    "container": (None,),
    # Claude Code's asks for all thoughts to be kept, as they are.
    "context_management": (None, {}, {"edits": []}, *({"edits": [edit]} for edit in KEPT_THOUGHTS)),
    "diagnostics": (None, dict),  # on what of the prompt was cached: usage says it
    "fallback_credit_token": (None,),
    "fallbacks": (None, []),
    "inference_geo": (None, "global"),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "user_profile_id": (None,),
    "workspace_id": (None,),
}
INSTEAD = {"context_management": "Nothing is dropped from a conversation here: send fewer messages"}
NEUTRAL_TOOL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (None, ["direct"]),
    "defer_loading": (None, False),
    "eager_input_streaming": (None, True, False),  # calls are told as they are written
    "input_examples": (None, []),
}
NEUTRAL_OUTPUT: dict[str, tuple[object, ...]] = {"task_budget": (None,)}
# Kinds of content that no model served here reads.
UNREADABLE = frozenset({"image", "document", "search_result", "container_upload"})


class CacheControl(Body):
    """A mark for a prefix worth keeping; every prefix is kept here while there is room."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[object], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """What an earlier answer's model thought; its signature proves nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """What another server's model thought, which nobody else can read; left out."""

    type: Literal["redacted_thinking"]
    data: str


class Caller(Body):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(Body):
    """A call that an answer of before has made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    input: dict[str, object]
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(Body):
    """What came of a call; is_error puts "Error: " before it."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Message(Body):
    """One turn, or a part of one: those of one role that follow each other are joined."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=1024)] | None


class Tool(Body):
    """A tool of the client's; those that a server would run are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, object]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    """any: the answer calls one of the tools at least; tool: the one of that name. disable_parallel_tool_use: an answer
    has at most one call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """For chat templates that can turn it on and off (`enable_thinking`). budget_tokens: a hint, as the model itself
    ends its thoughts; `max_tokens` bounds them with the answer. display: "omitted" leaves the text of thoughts out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class Format(Body):
    """JSON that a schema is valid for."""

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(Body):
    """The form of an answer, and how much to think about it, for chat templates that know degrees of that."""

    format: Format | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Body):
    """user_id: names the request in our log lines, and does nothing else."""

    user_id: str | None = None


class PromptBody(Body):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    cache_control: CacheControl | None = None


class MessagesBody(PromptBody):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
