"""The bodies of the OpenAI routes. A field is honoured, or listed in NEUTRAL and refused beyond those values.

Extensions beside OpenAI's fields carry vLLM's names: top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, prompt_logprobs, use_beam_search,
length_penalty, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar.
"""

from typing import Annotated, Literal

from pydantic import Field

from roofline.server.body import Body

# Fields that clients send and we do not have, with the values that cannot change an answer here; a type stands for all
# of its values. What is refused is looked for in this order: `functions` are the cause where there is a
# `function_call` too.
VERBOSITIES = ("low", "medium", "high")  # a hint that no chat template reads
RETENTIONS = ("in_memory", "in-memory", "24h")  # of prefixes, all of which are kept while there is room
NEUTRAL_BOTH: dict[str, tuple[object, ...]] = {
    "detokenize": (None, True),
    "kv_transfer_params": (None,),
    "metadata": (None, dict),  # labels of stored completions, of which there are none
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
}
NEUTRAL_CHAT: dict[str, tuple[object, ...]] = NEUTRAL_BOTH | {
    "add_special_tokens": (None, False),  # templates write their own
    "best_of": (None, 1),
    "echo": (None, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_cache_key": (None, str),  # a hint, as the next
    "prompt_cache_retention": (None, *RETENTIONS),
    "verbosity": (None, *VERBOSITIES),
    "web_search_options": (None,),
}
NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = NEUTRAL_BOTH | {
    "suffix": (None, ""),
}
# Of messages; clients send back what answers of this and of other servers had.
NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "images": (None, []),
    "refusal": (None,),
    "thinking_blocks": (None, []),
}
# What to do instead, where there is something.
INSTEAD = {
    "best_of": "/v1/completions has it",
    "chat_template": "The template is the model's own; /v1/completions takes a rendered prompt, with parse_special",
    "echo": "/v1/completions has it, and here continue_final_message goes on from a beginning",
    "function_call": "Give tool_choice",
    "functions": "Give them as tools",
    "suffix": "Write prefix, suffix and the model's marks into the prompt, with parse_special",
}

# Kinds of parts of messages that no model served here reads.
UNREADABLE = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"})
UNREADABLE |= {
    "image",
    "image_embeds",
    "image_pil",
    "video",
    "input_video",
    "audio",
    "audio_embeds",
}  # of other servers


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CacheControl(Body):
    """Anthropic's mark for a prefix worth keeping; every prefix is kept here while there is room."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class FunctionCall(Body):
    """parsed_arguments: the arguments once more, as the package openai has parsed them; not read."""

    name: str = Field(max_length=256)
    arguments: str
    parsed_arguments: object = None


class Call(Body):
    """A call of a tool that an answer of before has made; index: which it was, in a stream."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn. Several text parts are joined by line breaks, as vLLM does. Null, and no parts, are an empty text.

    name: given to the chat template, which may write it. reasoning: another name of reasoning_content, which templates
    write if they care for it. provider_specific_fields: LiteLLM's notes on an answer, which say nothing to a model.
    parsed: the content once more, as the package openai has parsed it; not read.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = Field(default=None, max_length=256)
    provider_specific_fields: dict[str, object] | None = None
    parsed: object = None
    cache_control: CacheControl | None = None
    content: str | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = Field(default=None, max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)


class Function(Body):
    """strict: calls of it are held to the schema, also where the answer may be text."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None


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
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, object] | None = None
    structured_outputs: dict[str, object] | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    receipt: bool | Literal["with_prompt"] | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1)


class ChatBody(Sampling):
    """POST /v1/chat/completions"""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Sampling):
    """POST /v1/completions. parse_special: special tokens in a text are such, and not plain text."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
