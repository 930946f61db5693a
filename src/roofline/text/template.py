"""Chat templates: messages to the text and the ids a model was trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2.exceptions import TemplateError

from roofline.common.errors import ConfigError, RequestError
from roofline.text.budget import Meter, release, use
from roofline.text.sandbox import ChatEnvironment
from roofline.text.tokenizer import Tokenizer
from roofline.text.tracked import Text, joined, literal, weight

MAX_SOURCE = 128 * 1024  # characters of a template
MAX_RENDERED = 4 * 1024 * 1024  # characters of a rendered chat, and of any one text on the way
MAX_WORK = 64 * 1024 * 1024  # characters of all texts made on the way
SECONDS = 1.0

# Used when a model's files hold no template: ChatML, without a system message of its own.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Some templates build a special token from the role ("<|" + role + "|>"), so the known roles count as the template's.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a rendered chat. Only in trusted ones, which the template wrote, are special tokens special."""

    text: str
    trusted: bool


class ChatTemplate:
    """A chat template in a sandbox with a budget of time and size (`sandbox` says what bounds what).

    Args:
        source: the Jinja source; None for ChatML, and then `is_default` is true.
        bos_token, eos_token: what the variables of those names hold.
        seconds: time budget of one rendering.
    Raises:
        ConfigError: the source is too long, or no valid template.
    """

    def __init__(
        self, source: str | None, *, bos_token: str = "", eos_token: str = "", seconds: float = SECONDS
    ) -> None:
        self.is_default = source is None
        self.source = CHATML if source is None else source
        self.bos_token, self.eos_token = bos_token, eos_token
        self._tokens = {"bos_token": literal(bos_token), "eos_token": literal(eos_token)}
        self._seconds = seconds
        if len(self.source) > MAX_SOURCE:
            raise ConfigError(f"the chat template has {len(self.source):,} characters; {MAX_SOURCE:,} are allowed")
        try:
            self._template = ChatEnvironment().from_string(self.source)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise ConfigError(f"the chat template is not valid: {type(error).__name__}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[Part]:
        """The chat as text, in stretches of the template's and of the users' characters.

        Args:
            messages: mappings with role and content, of plain data (str, numbers, None, lists, mappings).
            kwargs: further variables of the template, e.g. ``enable_thinking``.
        Raises:
            RequestError: the template refuses the messages, fails on them, or goes over its budget.
        """
        rendered = self._render(messages, tools, add_generation_prompt, kwargs)
        parts = []
        at = 0
        for origin, run in groupby(rendered.mask):
            length = sum(1 for _ in run)
            parts.append(Part(str.__str__(rendered)[at : at + length], bool(origin)))
            at += length
        return parts

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of the rendered chat; special tokens in what users wrote are plain text.

        No BOS is added: templates write their own, as in transformers. Raises as `render` does.
        """
        rendered = self._render(messages, tools, add_generation_prompt, kwargs)
        return tokenizer.encode_marked(str.__str__(rendered), rendered.mask)

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> Text:
        taken = next((name for name in kwargs if name in _OWN_NAMES or name in self._template.globals), None)
        if taken is not None:
            raise RequestError(400, "invalid_value", f"{taken!r} cannot be set for a chat template", taken)
        token = use(Meter(self._seconds, MAX_WORK, MAX_RENDERED))
        try:
            variables = {
                **self._tokens,
                "messages": [_message(message) for message in messages],
                "tools": _adopt(tools, "tools"),
                "add_generation_prompt": add_generation_prompt,
                **{name: _adopt(value, name) for name, value in kwargs.items()},
            }
            weight(list(variables.values()))
            context = self._template.new_context(variables)
            return joined(self._bounded(self._template.root_render_func(context)))
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(400, "chat_template_error", f"the chat template: {_short(error)}") from error
        except Exception as error:  # whatever a stranger's template makes Python raise
            message = f"the chat template fails on these messages: {type(error).__name__}: {_short(error)}"
            raise RequestError(400, "chat_template_error", message) from error
        finally:
            release(token)

    def _bounded(self, chunks: Any) -> Any:
        length = 0
        for chunk in chunks:
            length += len(chunk)
            if length > MAX_RENDERED:
                raise RequestError(
                    400, "chat_template_budget", f"the chat is longer than {MAX_RENDERED:,} characters", "messages"
                )
            yield chunk


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> list[int]:
    """`ChatTemplate.encode_chat` as a function."""
    return template.encode_chat(tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)


def _message(message: Any) -> dict[str, Any]:
    """A message for the template: no None values, reasoning under every name templates read, a known role trusted."""
    if not isinstance(message, Mapping):
        raise RequestError(400, "invalid_value", f"a message is a {type(message).__name__}, not a mapping", "messages")
    adopted = _adopt({key: value for key, value in message.items() if value is not None}, "messages")
    reasoning = next((adopted[name] for name in _REASONING if name in adopted), None)
    if reasoning is not None:
        adopted = {"thinking": reasoning, **adopted, "reasoning_content": reasoning}
    if adopted.get("role") in ROLES:
        adopted["role"] = literal(str.__str__(adopted["role"]))
    return adopted


def _adopt(value: Any, name: str, depth: int = 0) -> Any:
    """A user's data as the template sees it: fresh containers of plain types, every string a user's."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return Text(str.__str__(value))
    if depth > 64:
        raise RequestError(400, "invalid_value", f"{name} is nested more than 64 deep", name)
    if isinstance(value, Mapping):
        return {_adopt(key, name, depth + 1): _adopt(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_adopt(item, name, depth + 1) for item in value]
    raise RequestError(400, "invalid_value", f"{name} holds a {type(value).__name__}, which is no JSON value", name)


def _short(error: BaseException) -> str:
    return str(error)[:1000]
