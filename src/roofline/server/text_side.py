"""The served model's text, without its weights: tokenizer, chat template, stop strings."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from roofline import bundle
from roofline.common.errors import RequestError
from roofline.text.replies.parser import ReplyParser
from roofline.text.replies.reply_format import ReplyFormat, reply_format
from roofline.text.streaming.stops import TextStream
from roofline.text.templates.begun_answer import render_begun
from roofline.text.templates.template import ChatTemplate, Objects
from roofline.text.templates.tools import with_tools_as_text
from roofline.text.tokenizers.tokenizer import Tokenizer

LARGE_TEXT = 1 << 16  # characters, which take tens of milliseconds and of megabytes to encode
LONGEST_OPENING = 8  # tokens of a prompt's end among which the mark is that opens the reasoning


UNKNOWN_CALLS = (
    "the model's chat template describes tools in a format that is not known here, so calls would come as text; start "
    "the server with --tool-call-parser NAME to name the format that the model writes"
)


class TextSide:
    """Strings to token ids and back, by a model's tokenizer and chat template.

    form: how a model with this template writes reasoning and calls.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, form: Callable[[str], ReplyFormat] = reply_format
    ) -> None:
        self.tokenizer, self.template, self._form = tokenizer, template, form
        self.eos_ids = tuple(tokenizer.eos_ids)

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """How the model writes reasoning and calls of tools."""
        return self._form(self.template.source)

    @cached_property
    def chosen_format(self) -> ReplyFormat | None:
        """`reply_format` where it is another than the chat template says of itself; None: it is that one."""
        return None if self.reply_format == reply_format(self.template.source) else self.reply_format

    @property
    def chat_notice(self) -> str:
        """What happens to chats with a model whose files have no chat template; "" where they have one."""
        if not self.template.is_default:
            return ""
        if self.template.fits(self.tokenizer):
            return "the model's files have no chat template: chats are written in ChatML, whose marks it knows"
        return "the model has no chat template: chats are refused, /v1/completions continues texts"

    @property
    def tools_notice(self) -> str:
        """What happens to tools where the format of calls is not known; "" where it is."""
        return f"tools of requests are refused: {UNKNOWN_CALLS}" if self.reply_format.is_unknown else ""

    def complete(self) -> None:
        """Build what was left for later: the first odd text need not wait for it then. Raises ConfigError."""
        self.tokenizer.complete()
        _ = self.tokenizer.density
        self.template.complete()

    def encode(
        self, text: str, most: int | None = None, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Ids of a raw completion's prompt, with the model's beginning-of-sequence id where it wants one.

        most: tokens of the context; parse_special: special tokens in the text are such, as in what a chat template
        writes. Raises RequestError, before it is encoded, for a text that cannot fit in there.
        """
        self._check_size("prompt", text, most)
        if not parse_special:
            return self.tokenizer.encode(text, add_special=add_special)
        ids, vocabulary = self.tokenizer.encode_marked(text, b"\1" * len(text)), self.tokenizer.vocabulary
        return [*vocabulary.prefix, *ids, *vocabulary.suffix] if add_special else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens among them."""
        return self.tokenizer.decode(ids, skip_special=False)

    def encode_chat(
        self,
        messages: Objects,
        most: int | None = None,
        *,
        tools: Objects = (),
        variables: Mapping[str, object] = MappingProxyType({}),
        continues: bool = False,
    ) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins, or goes on. Raises RequestError, also as
        `encode`.

        tools: that the answer may call; variables: of the chat template; continues: the last message is the beginning
        of the answer.
        """
        text, mask = self.render(messages, tools=tools, variables=variables, continues=continues)
        self._check_size("messages", text, most)
        return self.encode_marked(text, mask)

    def encode_marked(self, text: str, mask: bytes) -> list[int]:
        """Ids of a rendered conversation; mask: for each character 1 where the template wrote it."""
        return self.tokenizer.encode_marked(text, mask)

    def render(
        self,
        messages: Objects,
        *,
        tools: Objects,
        variables: Mapping[str, object],
        continues: bool,
        answer_begins: bool = True,
    ) -> tuple[str, bytes]:
        """The rendered conversation, and for each character 1 where the template wrote it. Raises RequestError.

        answer_begins: what opens an answer comes last, unless one goes on.
        """
        self.template.check_fits(self.tokenizer)
        if not self.reply_format.takes_tools:
            messages, tools = with_tools_as_text(messages, tools, self.reply_format), ()
        elif tools and self.reply_format.is_unknown:
            raise RequestError(400, "unsupported_parameter", f"tools: {UNKNOWN_CALLS}", param="tools")
        if continues:
            return render_begun(self.template, messages, tools or None, variables)
        return self.template.marked(messages, tools or None, answer_begins, variables)

    def ends_thinking(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens a model's reasoning."""
        if not self.reply_format.thinks:
            return False
        return (
            self.tokenizer.decode(ids[-LONGEST_OPENING:], skip_special=False)
            .rstrip()
            .endswith(self.reply_format.thoughts.open)
        )

    def _check_size(self, field: str, text: str, most: int | None) -> None:
        """Encoding megabytes takes seconds: a text that is too long by its size alone is refused without."""
        density = self.tokenizer.density if most is not None and len(text) > most else None
        if density is None or most is None:
            return
        if density.least_tokens(text) <= most:
            cover = self.tokenizer.cover if len(text) >= LARGE_TEXT else None
            if cover is not None and cover.exceeds(text, most):
                message = f"The prompt has more tokens than this server's context of {most}. Shorten the prompt."
                raise RequestError(400, "context_length_exceeded", message, param=field)
            return
        size, room = len(text.encode("utf-8", "surrogatepass")), most * density.most
        message = f"The prompt has {size} bytes, but this server's context of {most} tokens holds at most {room}"
        raise RequestError(400, "context_length_exceeded", f"{message}. Shorten the prompt.", param=field)

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for."""
        return self.tokenizer.token_bytes(token)

    def special_ids(self, contents: Collection[str] | None = None) -> frozenset[int]:
        """The special tokens of the model, or those of them with these texts."""
        if contents is None:
            return self.tokenizer.special_ids
        added = self.tokenizer.vocabulary.added
        return frozenset(token.id for token in added if token.special and token.content in contents)

    def stream(
        self,
        stop: Sequence[str],
        *,
        at_start: bool,
        shown: Collection[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
        reply: ReplyParser | None = None,
    ) -> TextStream:
        """A fresh stream of text that looks for `stop`.

        at_start: the ids do not go on from a text; shown: special tokens that are text here; include_stop, min_tokens,
        reply: see `TextStream`.
        """
        return TextStream(
            self.tokenizer,
            stop,
            at_start=at_start,
            shown=shown,
            include_stop=include_stop,
            min_tokens=min_tokens,
            reply=reply,
        )


def load_text(model: str, backend: str = "cpu", form: Callable[[str], ReplyFormat] = reply_format) -> TextSide:
    """Read the text side of a model by name or path, as its backend does. Raises ConfigError."""
    return TextSide(*bundle.load_text_of(model, backend), form)
