"""The bodies of Ollama's routes. A field is honoured, or listed in a NEUTRAL table and refused beyond those values."""

from typing import Literal

from pydantic import Field

from roofline.server.body import Body
from roofline.server.routes.openai.schema import Tool

# Fields that clients send and we do not have, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "context": (None, []),
    "images": (None, []),
    "metadata": (None, dict),  # Open WebUI's notes
    "suffix": (None, ""),
    "template": (None, ""),
    "truncate": (None, False),
    "shift": (None, False),
}
NEUTRAL_OPTIONS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_gpu",
            "num_thread",
            "numa",
        ),
        (None,),
    ),
    **dict.fromkeys(("use_mlock", "use_mmap", "vocab_only"), (None,)),
    "mirostat": (None, 0),
    "mirostat_eta": (None, 0.1),
    "mirostat_tau": (None, 5, 5.0),
    "penalize_newline": (None, True),
    "repeat_last_n": (None, -1),
    "tfs_z": (None, 1, 1.0),
    "typical_p": (None, 1, 1.0),
}
NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {"images": (None, [])}
INSTEAD = {
    **dict.fromkeys(("main_gpu", "num_batch", "num_gpu", "num_thread", "numa"), "Options of `roofline serve` say that"),
    "context": "Send the conversation to /api/chat",
    "repeat_last_n": "Penalties look at all of the prompt and the answer, which is -1",
    "suffix": "Write prefix, suffix and the model's marks into the prompt, with raw and options.parse_special",
    "template": "The template is the model's own; raw takes a rendered prompt, with options.parse_special",
}


class Options(Body):
    """Sampling. num_keep: what stays when the context is full; nothing is ever dropped from a context here.

    num_ctx: a context that is shorter than the server's; prompt and answer fit into it, or are refused. parse_special:
    special tokens in a raw prompt are such; nothing is put before it then. Not Ollama's, which has it so always.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    parse_special: bool | None = None


class Request(Body):
    """What both routes share. Answers are streamed unless `stream` is false.

    keep_alive: the model stays while the server runs, so everything but 0 is honoured. format: "json" for any JSON
    object, or a JSON schema.
    """

    model: str
    stream: bool | None = None
    options: Options | None = None
    keep_alive: str | float | int | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    format: str | dict[str, object] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CallFunction(Body):
    name: str = Field(max_length=256)
    arguments: dict[str, object]
    index: int | None = None
    description: str | None = None


class Call(Body):
    id: str | None = Field(default=None, max_length=256)
    type: str | None = None
    function: CallFunction


class Message(Body):
    """One turn. tool_name, or its older name `name`: which tool's result this is."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = Field(default=None, max_length=128)
    tool_name: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)
    tool_call_id: str | None = Field(default=None, max_length=256)


class ChatRequest(Request):
    """POST /api/chat"""

    messages: list[Message] = Field(default_factory=list)
    tools: list[Tool] | None = None


class GenerateRequest(Request):
    """POST /api/generate. raw: the prompt is what the model sees, without a template."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None


class EmbedRequest(Body):
    """POST /api/embed. truncate: what is longer than the context is cut to its beginning; Ollama does so by default."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: str | float | int | None = None


class EmbeddingsRequest(Body):
    """POST /api/embeddings, the older one."""

    model: str
    prompt: str
    options: Options | None = None
    keep_alive: str | float | int | None = None


class ShowRequest(Body):
    """POST /api/show"""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
