"""Renders a chat template in the Jinja sandbox, within a budget of time and size."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from jinja2.exceptions import TemplateError

from roofline.common.errors import ConfigError, RequestError
from roofline.text.templates.budget import MAX_RENDERED, MAX_WORK, RenderBudget, metered
from roofline.text.templates.marked_text import MarkedText
from roofline.text.templates.sandbox import ChatEnvironment
from roofline.text.templates.simple_template import ROLES
from roofline.text.templates.tracked_string import TrackedText, joined, literal, weight

OWN_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)
_CONTENT = "content"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Rendering:
    """A compiled template. Raises ConfigError when the source is not a valid one."""

    def __init__(self, source: str, tokens: Mapping[str, str], seconds: float) -> None:
        self._tokens = {name: literal(token) for name, token in tokens.items()}
        self._seconds = seconds
        try:
            self._template = ChatEnvironment().from_string(source)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise ConfigError(f"the chat template is not valid: {type(error).__name__}: {error}") from error

    def render(
        self, messages: Iterable[object], tools: object, add_generation_prompt: bool, kwargs: Mapping[str, object]
    ) -> TrackedText:
        """The rendered chat. Raises RequestError.

        Keys of messages whose value is None are left out, as transformers has it; where the template fails on that, it
        gets contents that are None: templates of before transformers did so ask whether they are.
        """
        messages = list(messages)
        try:
            return self._render(messages, tools, add_generation_prompt, kwargs, ())
        except RequestError as error:
            contents = (message.get(_CONTENT, "") for message in messages if isinstance(message, Mapping))
            if error.code != "chat_template_error" or None not in contents:
                raise
            with suppress(RequestError):
                return self._render(messages, tools, add_generation_prompt, kwargs, (_CONTENT,))
            raise

    def _render(
        self,
        messages: Iterable[object],
        tools: object,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
        nullable: Collection[str],
    ) -> TrackedText:
        """nullable: keys of messages that are there with the value None."""
        reserved = next((name for name in kwargs if name in OWN_NAMES or name in self._template.globals), None)
        if reserved is not None:
            raise RequestError(400, "invalid_value", f"{reserved!r} cannot be set for a chat template", reserved)
        with metered(
            RenderBudget(self._seconds, MAX_WORK, MAX_RENDERED)
        ):  # also for error messages, which may be a Text
            try:
                variables: dict[str, object] = {
                    **self._tokens,
                    "messages": [_message(message, nullable) for message in messages],
                    "tools": _adopt(tools, "tools"),
                    "add_generation_prompt": add_generation_prompt,
                    **{name: _adopt(value, name) for name, value in kwargs.items()},
                }
                weight(list(variables.values()))
                context = self._template.new_context(variables)
                return joined(_bounded(self._template.root_render_func(context)))
            except RequestError:
                raise
            except TemplateError as error:
                raise RequestError(400, "chat_template_error", f"the chat template: {_short(error)}") from error
            except Exception as error:  # an untrusted template can make Python raise anything
                message = f"the chat template fails on these messages: {type(error).__name__}: {_short(error)}"
                raise RequestError(400, "chat_template_error", message) from error


def _bounded(chunks: Iterable[str]) -> Iterator[str]:
    """The chunks of the rendered chat. Raises RequestError when they become too long together."""
    length = 0
    for chunk in chunks:
        length += len(chunk)
        if length > MAX_RENDERED:
            reason = f"the chat is longer than {MAX_RENDERED:,} characters"
            raise RequestError(400, "chat_template_budget", reason, "messages")
        yield chunk


def _message(message: object, nullable: Collection[str]) -> dict[object, object]:
    """A message for the template: no None under other keys, reasoning under every name templates read, a known role
    trusted."""
    if not isinstance(message, Mapping):
        raise RequestError(400, "invalid_value", f"a message is a {type(message).__name__}, not a mapping", "messages")
    there = {key: value for key, value in message.items() if value is not None or key in nullable}
    adopted = _adopt_mapping(there, "messages", 0)
    reasoning = next((adopted[name] for name in _REASONING if name in adopted), None)
    if reasoning is not None:
        adopted = {"thinking": reasoning, "reasoning": reasoning, **adopted, "reasoning_content": reasoning}
    role = adopted.get("role")
    if role in ROLES:
        adopted["role"] = literal(str.__str__(str(role)))
    return adopted


def _adopt(value: object, name: str, depth: int = 0) -> object:
    """A user's data as the template sees it: fresh containers of plain types, every string a user's."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, MarkedText):
        return TrackedText(str.__str__(value), value.mask)
    if isinstance(value, str):
        return TrackedText(str.__str__(value))
    if depth > 64:
        raise RequestError(400, "invalid_value", f"{name} is nested more than 64 deep", name)
    if isinstance(value, Mapping):
        return _adopt_mapping(value, name, depth)
    if isinstance(value, (list, tuple)):
        return [_adopt(item, name, depth + 1) for item in value]
    raise RequestError(400, "invalid_value", f"{name} holds a {type(value).__name__}, which is no JSON value", name)


def _adopt_mapping(value: Mapping[object, object], name: str, depth: int) -> dict[object, object]:
    return {_adopt(key, name, depth + 1): _adopt(item, name, depth + 1) for key, item in value.items()}


def _short(error: BaseException) -> str:
    return str(error)[:1000]
