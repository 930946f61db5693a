"""Samples to token ids, and which of them are trained on: the answers, as the model's own chat template writes them.

Where an answer stands in a rendered chat is told by rendering the chat up to it, as a server does before the model
answers. An answer ends with the first token that a server stops at, wherever the template writes it: behind the answer,
or, as GLM's does, at the beginning of the next turn. Templates that write earlier answers otherwise than the last one
(without its reasoning, say), or no such token between turns, make a sample of each answer. Where the prompt opens
reasoning that the template leaves out of chats, an answer stands behind its end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import CapacityError, ConfigError, RequestError
from roofline.hardware.detect import detect
from roofline.text.replies.reasoning import CLOSE, OPEN
from roofline.text.replies.reply_format import reply_format
from roofline.text.templates.tools import with_tools_as_text
from roofline.train.finetune.samples import REASONING_KEYS, Chat, Continuation, Message, Sample, is_empty

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer

LARGE = 1 << 22  # characters of a sample, whose tokens take a good part of a GB while it is encoded
_BYTES_A_CHARACTER = 100  # at four characters a token: the library has some 430 bytes for each
NO_BEGINNING = (
    "the chat template does not write a chat up to its answer as it writes the beginning of the chat with the answer, "
    "so where that answer begins cannot be told: name another model, or write the data as prompt and completion"
)
NO_CALLS = "write them into the content as text, or name a model whose template does"
NO_QUESTION = (
    "the chat begins with the assistant, and its template writes no prompt for an answer that nothing comes before: "
    "put the user's message in front of it, or remove the record"
)


@dataclass(frozen=True)
class Encoded:
    """A sample. ids: uint32 [tokens]; trained: bool [tokens], whether each is a target."""

    ids: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Counts:
    """What happened to samples. split: chats that were taken apart, an answer each; ended: answers to which an end
    token was added, because the template ends them with none; greeted: chats whose first message is the assistant's,
    which is not trained on, as the template writes no prompt before it; unreasoned: samples with an answer whose
    reasoning the template does not write; empty: answers without a text, of which the end alone is trained on;
    unprompted: answers that no token comes before, so that the first of theirs is not trained on; cut: samples longer
    than a row; left_out: samples of which no target is in a row; longest: tokens of the longest sample."""

    split: int = 0
    ended: int = 0
    greeted: int = 0
    unreasoned: int = 0
    empty: int = 0
    unprompted: int = 0
    cut: int = 0
    left_out: int = 0
    longest: int = 0


@dataclass
class Encoder:
    """Encodes samples for a model.

    Args:
        length: most tokens of a sample. drop: leave longer ones out; else they are cut, plain texts into several.
        prompts: train on prompts, too. last_only: of the answers of a chat train on the last alone.

    Raises ConfigError for a tokenizer without an end token.
    """

    tokenizer: "Tokenizer"
    template: "ChatTemplate"
    length: int
    drop: bool = False
    prompts: bool = False
    last_only: bool = False
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        if not self.tokenizer.eos_ids:
            raise ConfigError("the model's tokenizer has no end token, so no answer could ever end")
        self._ends = frozenset(self.tokenizer.eos_ids)
        self._form = reply_format(self.template.source)
        first = self.tokenizer.encode("x", add_special=False)
        self._adds_space = self.tokenizer.token_bytes(first[0]).startswith(b" ")

    def encode(self, sample: Sample, where: str) -> list[Encoded]:
        """The sample, or the several that are made of it; none if no target is left. Raises ConfigError, and
        CapacityError for one that is too long for this machine's memory."""
        _check_room(sample, where)
        try:
            parts = list(self._parts(sample))
        except (RequestError, ConfigError) as error:
            raise ConfigError(f"{where}: {error}") from error
        fitting = [each for part in parts if (each := self._fitted(part)) is not None]
        self.counts.left_out += not fitting
        return fitting

    def _parts(self, sample: Sample) -> Iterator[Encoded]:
        if isinstance(sample, Chat):
            yield from self._chat(sample)
        elif isinstance(sample, Continuation):
            yield self._continuation(sample)
        else:
            ids = np.array([*self._prefix, *self._plain(sample.text), self.tokenizer.eos_ids[0]], np.uint32)
            step = len(ids) if self.drop else self.length
            for start in range(0, len(ids), step):
                part = ids[start : start + step]
                yield Encoded(part, np.arange(len(part)) > 0)

    def _fitted(self, part: Encoded) -> Encoded | None:
        """The part as it goes into a row."""
        self.counts.longest = max(self.counts.longest, len(part))
        if len(part) > self.length:
            self.counts.cut += 1
            if self.drop:
                return None
            part = Encoded(part.ids[: self.length], part.trained[: self.length])
        if self.prompts:
            part = Encoded(part.ids, np.arange(len(part)) > 0)
        return part if part.trained.any() else None

    @property
    def _prefix(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.vocabulary.prefix)

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    def _continuation(self, sample: Continuation) -> Encoded:
        begun = self._plain(sample.prompt)
        ids = self._plain(sample.prompt + sample.completion)
        if ids[: len(begun)] != begun and not self._adds_space:
            ids = [*begun, *self._plain(sample.completion)]
        ids = [*self._prefix, *ids, self.tokenizer.eos_ids[0]]
        at = len(self._prefix) + _common(ids[len(self._prefix) :], begun)
        self.counts.unprompted += at == 0
        return Encoded(np.array(ids, np.uint32), np.arange(len(ids)) >= max(1, at))

    def _chat(self, sample: Chat) -> Iterator[Encoded]:
        messages, tools = sample.messages, sample.tools
        answers = sample.answers[-1:] if self.last_only else sample.answers
        self.template.check_fits(self.tokenizer)
        self.counts.empty += sum(is_empty(messages[number]) for number in answers)
        if not self._form.takes_tools:
            plain = with_tools_as_text(messages, tools, self._form)
            places = dict(zip(_of_assistant(messages), _of_assistant(plain), strict=True))
            answers = tuple(places[number] for number in answers)
            messages, tools = tuple(plain), ()
        if answers[0] == _turns_before(messages) and not self._writes_prompt(messages, tools, answers[0]):
            answers = answers[1:]
            self.counts.greeted += 1
            if not answers:
                raise ConfigError(NO_QUESTION)
        encoded = self._encoded(self._rendered(messages, tools, answers))
        if encoded is not None:
            yield encoded
            return
        self.counts.split += len(answers) > 1
        for number in answers:
            beginning = messages[: number + 1]
            rendered = self._rendered(beginning, tools, (number,)) or self._reasoned(beginning, tools)
            encoded = self._encoded(rendered)
            if encoded is None:
                raise ConfigError(NO_BEGINNING)
            yield encoded

    def _writes_prompt(self, messages: Sequence[Message], tools: Sequence[Message], number: int) -> bool:
        """Whether the template writes the chat up to an answer as the beginning of the chat with it."""
        try:
            return self._rendered(messages[: number + 1], tools, (number,)) is not None
        except RequestError:  # some templates look at the first message, and there is none
            return False

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message], answers: Sequence[int]
    ) -> "_RenderedChat | None":
        """The chat with its answers; None where the chat up to one is not rendered as the beginning of it."""
        text, mask = self.template.marked(messages, tools or None, False)
        spans = []
        for number in answers:
            before, _ = self.template.marked(messages[:number], tools or None, True)
            is_last = number == len(messages) - 1
            behind = text if is_last else self.template.marked(messages[: number + 1], tools or None, False)[0]
            if not text.startswith(before) or not text.startswith(behind) or len(before) >= len(behind):
                return None
            spans.append((len(before), len(behind)))
        return _RenderedChat(text, mask, spans, [messages[number] for number in answers])

    def _reasoned(self, messages: Sequence[Message], tools: Sequence[Message]) -> "_RenderedChat | None":
        """A chat whose prompt opens reasoning that the template leaves out of chats, as DeepSeek-R1's does: behind
        the prompt stand the last message's reasoning, if it has some, its end, and the answer. None for others."""
        text, mask = self.template.marked(messages, tools or None, False)
        prompt, prompt_mask = self.template.marked(messages[:-1], tools or None, True)
        begun = prompt.rstrip().removesuffix(OPEN)
        if begun == prompt.rstrip() or not text.startswith(begun):
            return None
        behind = len(begun) + len(OPEN) if text.startswith(begun + OPEN) else len(begun)
        if text.startswith(CLOSE, behind):  # the template writes that there is none
            reasoning, close = "", ""
        else:
            reasoning, close = _reasoning(messages[-1]), f"\n{CLOSE}\n\n"
        chat_text = prompt + reasoning + close + text[behind:]
        trusted = prompt_mask + bytes(len(reasoning)) + bytes([1]) * len(close) + mask[behind:]
        return _RenderedChat(chat_text, trusted, [(len(prompt), len(chat_text))], messages[-1:])

    def _encoded(self, chat: "_RenderedChat | None") -> Encoded | None:
        """The ids of a chat. Up to each answer they are those that a server gives to the model. None where an answer
        before the last one ends with no token that a server stops at."""
        if chat is None:
            return None
        ids = self.tokenizer.encode_marked(chat.text, chat.mask)
        bounds = [self._place(ids, chat, at) for span in chat.spans for at in span]
        if None in bounds:
            ids, bounds = self._in_pieces(chat)
        trained = np.zeros(len(ids), bool)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            assert start is not None
            assert end is not None
            # A template without an end mark begins the next turn with a token that ends this one.
            stop = next((at for at in range(start, min(end + 1, len(ids))) if ids[at] in self._ends), None)
            if stop is not None:
                trained[start : stop + 1] = True
            elif end < len(ids):
                return None
            elif (unended := chat.to_last_word()) != chat:
                return self._encoded(unended)
            else:
                trained[start:] = True
                self.counts.ended += 1
                ids, trained = [*ids, self._closing], np.append(trained, True)
        trained[0] = False
        self.counts.unreasoned += chat.leaves_out_reasoning()
        return Encoded(np.array(ids, np.uint32), trained)

    @cached_property
    def _closing(self) -> int:
        """What ends a last answer for which the template writes no end: the token that it begins the user's next turn
        with, if a server stops at it, else the tokenizer's end token."""
        answered: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        try:
            before, _ = self.template.marked(answered, None, False)
            behind, mask = self.template.marked([*answered, answered[0]], None, False)
        except RequestError:
            return self.tokenizer.eos_ids[0]
        following = self.tokenizer.encode_marked(behind[len(before) :], mask[len(before) :])
        is_next = behind.startswith(before) and following[:1] and following[0] in self._ends
        return following[0] if is_next else self.tokenizer.eos_ids[0]

    def _place(self, ids: Sequence[int], chat: "_RenderedChat", at: int) -> int | None:
        """How many ids stand for the first `at` characters; None where a token stands across that place."""
        if at == len(chat.text):
            return len(ids)
        before = self.tokenizer.encode_marked(chat.text[:at], chat.mask[:at])
        common = _common(ids, before)
        return common if common == len(before) or self._adds_space else None

    def _in_pieces(self, chat: "_RenderedChat") -> tuple[list[int], list[int | None]]:
        """The ids with each answer, and what stands between answers, encoded by itself."""
        ids, bounds, at, encode = list[int](), list[int | None](), 0, self.tokenizer.encode_marked
        for place in (place for span in chat.spans for place in span):
            ids += encode(chat.text[at:place], chat.mask[at:place])
            bounds.append(len(ids))
            at = place
        return [*ids, *encode(chat.text[at:], chat.mask[at:])], bounds


@dataclass(frozen=True)
class _RenderedChat:
    """A chat as a template writes it. mask: which characters are the template's own; spans: (start, end) of each answer
    that is trained on; answers: their messages."""

    text: str
    mask: bytes
    spans: Sequence[tuple[int, int]]
    answers: Sequence[Message]

    def __post_init__(self) -> None:
        """Raises ConfigError for a call of a tool that the template does not write: nothing would be learnt of it."""
        for (start, end), message in zip(self.spans, self.answers, strict=True):
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                name = str(call["function"]["name"])
                if name not in self.text[start:end]:
                    raise ConfigError(f"the chat template does not write calls of tools, as here of {name}: {NO_CALLS}")

    def leaves_out_reasoning(self) -> bool:
        """Whether the template does not write the reasoning of an answer that is trained on."""
        return any(
            str(message[key]).strip() not in self.text[start:end]
            for (start, end), message in zip(self.spans, self.answers, strict=True)
            for key in REASONING_KEYS
            if message.get(key)
        )

    def to_last_word(self) -> "_RenderedChat":
        """Without what the template writes behind the last answer's own text."""
        last = self.answers[-1]
        content = str(last["content"])
        start, _ = self.spans[-1]
        at = self.text.rfind(content.strip(), start)
        if not content.strip() or last.get("tool_calls") or at < start:
            return self
        end = at + len(content.strip())
        space = content[len(content.rstrip()) :]  # which the text itself ends with
        end += len(space) if self.text.startswith(space, end) else 0
        return replace(self, text=self.text[:end], mask=self.mask[:end], spans=[*self.spans[:-1], (start, end)])


def _check_room(sample: Sample, where: str) -> None:
    """Raise CapacityError for a sample whose tokens would take more memory than is free: the system ends a process
    that takes it."""
    match sample:
        case Chat():
            count = sum(len(str(message["content"])) for message in sample.messages)
        case Continuation():
            count = len(sample.prompt) + len(sample.completion)
        case _:
            count = len(sample.text)
    available = detect().memory_available if count > LARGE else None
    if available is not None and count * _BYTES_A_CHARACTER > available:
        what = f"{where}: a text of {count:,} characters"
        raise CapacityError(what, count * _BYTES_A_CHARACTER, available, "bytes", "Divide it into several records.")


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reasoning(message: Message) -> str:
    """What the assistant thought before it answered, under a key of its own or in front of the answer."""
    apart = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    before, close, _ = str(message["content"]).partition(CLOSE)
    within = before.strip().removeprefix(OPEN) if close else ""
    return str(within if apart is None else apart).strip()


def _turns_before(messages: Sequence[Message]) -> int:
    """The place of the first message that is no system message."""
    return next((at for at, message in enumerate(messages) if message["role"] != "system"), 0)


def _of_assistant(messages: Sequence[Mapping[str, object]]) -> list[int]:
    """The places of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
