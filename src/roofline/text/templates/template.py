"""Chat templates: messages to the text and the ids a model was trained on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError, RequestError
from roofline.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from roofline.text.templates.rendering import Rendering
    from roofline.text.templates.simple_template import Outline

MAX_SOURCE = 128 * 1024  # characters of a template
SECONDS = 1.0  # of one rendering
Objects = Sequence[Mapping[str, object]]  # of JSON: messages, tools

# Used when a model's files hold no template and its vocabulary has the marks below: ChatML, without a system message of
# its own.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_TEMPLATE = (
    "the model has no chat template, as models before instruction tuning have none: give it the beginning of a text "
    "to continue (`roofline generate`, LLM.generate, /v1/completions), or a template of your own (LLM.chat's "
    "chat_template)"
)
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class ChatPart:
    """A stretch of a rendered chat. Only in trusted ones, which the template wrote, are special tokens special."""

    text: str
    trusted: bool


class ChatTemplate:
    """A chat template in a sandbox with a budget of time and size (`sandbox` says what bounds what).

    Args:
        source: the Jinja source; None where the model's files have none: then `is_default` is true, and ChatML is used
            where it `fits`.
        bos_token, eos_token: what the variables of those names hold.
        seconds: time budget of one rendering.
        outline: of this source (simple_template.py). Chats that it can render need no Jinja, which is slow to import.
    Raises:
        ConfigError: the source is too long, or no valid template.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        seconds: float = SECONDS,
        outline: "Outline | None" = None,
    ) -> None:
        self.is_default = source is None
        self.source = CHATML if source is None else source
        self.bos_token, self.eos_token = bos_token, eos_token
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._outline = outline
        self._seconds = seconds
        if len(self.source) > MAX_SOURCE:
            raise ConfigError(f"the chat template has {len(self.source):,} characters; {MAX_SOURCE:,} are allowed")
        if outline is None:
            self.complete()

    def with_source(self, source: str) -> "ChatTemplate":
        """Another template for the same model. Raises ConfigError when it is none."""
        if not isinstance(source, str):
            raise ConfigError(f"a chat template is a {type(source).__name__}; give its Jinja as a string")
        return ChatTemplate(source, bos_token=self.bos_token, eos_token=self.eos_token, seconds=self._seconds)

    def fits(self, tokenizer: Tokenizer) -> bool:
        """Whether the model may know this template: it came with the model, or its vocabulary has ChatML's marks."""
        if not self.is_default:
            return True
        return all(len(tokenizer.encode(mark, add_special=False, parse_special=True)) == 1 for mark in CHATML_MARKS)

    def check_fits(self, tokenizer: Tokenizer) -> None:
        """Raises RequestError for a model that cannot chat: its files have no template, its vocabulary not ChatML's
        marks."""
        if not self.fits(tokenizer):
            raise RequestError(400, "no_chat_template", NO_TEMPLATE)

    def render(
        self, messages: Objects, *, tools: Objects | None = None, add_generation_prompt: bool = True, **kwargs: object
    ) -> list[ChatPart]:
        """The chat as text, in stretches of the template's and of the users' characters.

        Args:
            messages: mappings with role and content, of plain data (str, numbers, None, lists, mappings).
            kwargs: further variables of the template, e.g. ``enable_thinking``.
        Raises:
            RequestError: the template refuses the messages, fails on them, or goes over its budget.
        """
        parts: list[ChatPart] = []
        for text, trusted in self._rendered(messages, tools, add_generation_prompt, kwargs):
            if parts and parts[-1].trusted == trusted:
                text = parts.pop().text + text
            if text:
                parts.append(ChatPart(text, trusted))
        return parts

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Objects,
        *,
        tools: Objects | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """The ids of the rendered chat; special tokens in what users wrote are plain text.

        No BOS is added: templates write their own, as in transformers. Raises as `render` and `check_fits` do.
        """
        self.check_fits(tokenizer)
        return tokenizer.encode_marked(*self.marked(messages, tools, add_generation_prompt, kwargs))

    def marked(
        self,
        messages: Objects,
        tools: Objects | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[str, bytes]:
        """The rendered chat, and for each character 1 where the template wrote it. Raises as `render` does."""
        parts = self._rendered(messages, tools, add_generation_prompt, variables)
        mask = b"".join(bytes([trusted]) * len(text) for text, trusted in parts)
        return "".join(text for text, _ in parts), mask

    def complete(self) -> None:
        """Compile the template for Jinja now, so that no later call has to. Raises ConfigError when it is none."""
        _ = self._rendering

    def _rendered(
        self, messages: Objects, tools: object, add_generation_prompt: bool, kwargs: Mapping[str, object]
    ) -> list[tuple[str, bool]]:
        """Stretches of the chat, and whether the template wrote them."""
        if self._outline is not None and tools is None and not kwargs and type(add_generation_prompt) is bool:
            from roofline.text.templates.simple_template import render

            parts = render(self._outline, messages, self._tokens, add_generation_prompt)
            if parts is not None:
                return parts
        messages = list(messages)  # which may be an iterator
        if self._reads_parts_alone:
            from roofline.text.templates.content_parts import as_parts

            messages = as_parts(messages)
        if any(isinstance(each, Mapping) and each.get("tool_calls") for each in messages) and self._reads_texts:
            from roofline.text.templates.call_arguments import with_texts

            messages = with_texts(messages)
        text = self._rendering.render(messages, tools, add_generation_prompt, kwargs)
        return [(str.__str__(text)[start:end], origin) for start, end, origin in _runs(text.mask)]

    @cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether texts must be given as lists of parts, or the template would lose them."""
        from roofline.text.templates.content_parts import reads_parts_alone

        return reads_parts_alone(self.source, lambda messages: self._rendering.render(messages, None, True, {}))

    @cached_property
    def _reads_texts(self) -> bool:
        """Whether arguments of calls must be given as texts, or the template would fail on them."""
        from roofline.text.templates.call_arguments import reads_arguments_as_text

        return reads_arguments_as_text(self.source, lambda messages: self._rendering.render(messages, None, True, {}))

    @cached_property
    def _rendering(self) -> "Rendering":
        from roofline.text.templates.rendering import Rendering

        return Rendering(self.source, self._tokens, self._seconds)


def _runs(mask: bytes) -> Iterator[tuple[int, int, bool]]:
    """(start, end, value) of each run of equal bytes."""
    at = 0
    for value, run in groupby(mask):
        start, at = at, at + sum(1 for _ in run)
        yield start, at, bool(value)
