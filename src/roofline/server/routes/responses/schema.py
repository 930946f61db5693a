"""The body of /v1/responses and its items. A field is honoured, or listed in NEUTRAL and refused beyond those values.

Extensions beside OpenAI's fields: top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, stop,
priority, cache_salt, chat_template_kwargs, receipt.
"""

from typing import Literal

from pydantic import Field

from roofline.server.body import Body
from roofline.server.routes.openai.schema import RETENTIONS, VERBOSITIES

# Fields that clients send and we do not have, with the values that cannot change an answer here; a type stands for all
# of its values.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "access_programs": (None,),
    "background_options": (None,),
    "client_metadata": (None, dict),  # Codex's notes on itself
    "context_management": (None, []),
    "conversation": (None,),
    "image": (None,),
    "max_tool_calls": (None, int),  # of tools that a server runs
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None, *RETENTIONS),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
SUMMARIES = ("auto", "concise", "detailed")  # what is thought comes whole, and needs none
# What may be added to items of kinds that answers here do not have, or, the first, in place of what they do have.
INCLUDED = frozenset(
    {"reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url"}
    | {"file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources"}
    | {"web_search_call.results"}
)
NEUTRAL_REASONING: dict[str, tuple[object, ...]] = {
    "context": (None,),
    "generate_summary": (None, *SUMMARIES),
    "mode": (None,),
    "summary": (None, *SUMMARIES),
}
NEUTRAL_TEXT: dict[str, tuple[object, ...]] = {"verbosity": (None, *VERBOSITIES)}
NEUTRAL_TOOL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (None, []),
    "async": (None, False),
    "defer_loading": (None, False),
    "output_schema": (None,),
}
# Of items; clients send back what answers of this and of other servers had.
NEUTRAL_ITEM: dict[str, tuple[object, ...]] = {
    "async": (None, False),
    "caller": (None,),
    "encrypted_content": (None,),
    "namespace": (None,),
    "phase": (None, "commentary", "final_answer"),
}
NEUTRAL_PART: dict[str, tuple[object, ...]] = {"prompt_cache_breakpoint": (None,)}
INSTEAD = {
    "conversation": "previous_response_id goes on from an answer",
    "encrypted_content": "Reasoning comes as text here, and may be sent back as such",
    "include": "Reasoning comes as text without it; /v1/chat/completions has log-probabilities",
    "top_logprobs": "/v1/chat/completions has it",
    "truncation": "Nothing is dropped from a conversation: send fewer items",
}
TEXT_PARTS = ("input_text", "output_text")
Status = Literal["in_progress", "completed", "incomplete"]


class StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class Reasoning(Body):
    """effort: for chat templates that know degrees of thinking, or how to turn it off."""

    effort: str | None = None


class TextFormat(Body):
    """The form of an answer. A schema is kept to whether `strict` is said or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponseBody(Body):
    """POST /v1/responses. None stands for the default.

    user, and its successor safety_identifier: names the request in our log lines, and does nothing else.
    prompt_cache_key: a hint; every prefix is kept while there is room.
    """

    model: str
    input: str | list[dict[str, object]]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=256)
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    chat_template_kwargs: dict[str, object] | None = None
    receipt: bool | Literal["with_prompt"] | None = None

    @property
    def effort(self) -> str | None:
        """How much to think."""
        return None if self.reasoning is None else self.reasoning.effort


class Part(Body):
    """Text of a message. Annotations and log-probabilities of an answer say nothing to a model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[object] | None = None
    logprobs: list[object] | None = None


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class Item(Body):
    """What all kinds of items have. An item without a type is a message."""

    id: str | None = Field(default=None, max_length=256)
    status: Status | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, object]] | None


class CallItem(Item):
    """A call of a tool that an answer has made."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(max_length=256)
    arguments: str


class CallOutputItem(Item):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: str | list[dict[str, object]] | None


class ReasoningItem(Item):
    """What a model thought; the summary is read where there is no content."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None


AnyItem = MessageItem | CallItem | CallOutputItem | ReasoningItem
ITEMS: dict[str, type[AnyItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
