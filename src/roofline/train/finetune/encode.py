"""Samples to token ids, and which of them are trained on: the answers, as the model's own chat template writes them.

Where an answer stands in a rendered chat is counts by rendering the chat up to it, as a server does before the model
answers. Templates that write earlier answers otherwise than the last one (without its reasoning, say) make a sample of
each answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError, RequestError
from roofline.text.replies.reply_format import reply_format
from roofline.text.templates.tools import with_tools_as_text
from roofline.train.finetune.samples import Chat, Continuation, Message, Sample

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer

NO_BEGINNING = (
    "the chat template does not write a chat up to its answer as it writes the beginning of the chat with the answer, "
    "so what the model would have to write cannot be counts: name another model, or write the data as prompt and "
    "completion"
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
    token was added, because the template ends them with none; cut: samples longer than a row; left_out: samples of
    which no target is in a row; longest: tokens of the longest sample."""

    split: int = 0
    ended: int = 0
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
        self._takes_tools = reply_format(self.template.source).takes_tools
        first = self.tokenizer.encode("x", add_special=False)
        self._adds_space = self.tokenizer.token_bytes(first[0]).startswith(b" ")

    def encode(self, sample: Sample, where: str) -> list[Encoded]:
        """The sample, or the several that are made of it; none if no target is left. Raises ConfigError."""
        try:
            parts = list(self._parts(sample))
        except RequestError as error:
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
        return Encoded(np.array(ids, np.uint32), np.arange(len(ids)) >= max(1, at))

    def _chat(self, sample: Chat) -> Iterator[Encoded]:
        messages, tools = sample.messages, sample.tools
        answers = sample.answers[-1:] if self.last_only else sample.answers
        self.template.check_fits(self.tokenizer)
        if not self._takes_tools:
            plain = with_tools_as_text(messages, tools)
            places = dict(zip(_of_assistant(messages), _of_assistant(plain), strict=True))
            answers = tuple(places[number] for number in answers)
            messages, tools = tuple(plain), ()
        rendered = self._rendered(messages, tools, answers)
        if rendered is not None:
            yield self._encoded(*rendered)
            return
        self.counts.split += len(answers) > 1
        for number in answers:
            alone = self._rendered(messages[: number + 1], tools, (number,))
            if alone is None:
                raise ConfigError(NO_BEGINNING)
            yield self._encoded(*alone)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message], answers: Sequence[int]
    ) -> tuple[str, bytes, list[tuple[int, int]]] | None:
        """The chat, what the template wrote of it, and (start, end) of each answer in it; None where the chat up to an
        answer is not rendered as the beginning of the rendered chat."""
        text, mask = self.template.marked(messages, tools or None, False)
        spans = []
        for number in answers:
            before, _ = self.template.marked(messages[:number], tools or None, True)
            is_last = number == len(messages) - 1
            behind = text if is_last else self.template.marked(messages[: number + 1], tools or None, False)[0]
            if not text.startswith(before) or not text.startswith(behind) or len(before) >= len(behind):
                return None
            spans.append((len(before), len(behind)))
        return text, mask, spans

    def _encoded(self, text: str, mask: bytes, spans: Sequence[tuple[int, int]]) -> Encoded:
        """The ids of a chat. Up to each answer they are those that a server gives to the model."""
        ids = self.tokenizer.encode_marked(text, mask)
        bounds = [self._place(ids, text, mask, at) for span in spans for at in span]
        if None in bounds:
            ids, bounds = self._in_pieces(text, mask, spans)
        trained = np.zeros(len(ids), bool)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            assert start is not None
            assert end is not None
            last = next((at for at in range(end - 1, start - 1, -1) if ids[at] in self._ends), None)
            trained[start : end if last is None else last + 1] = True
        if not any(each in self._ends for each in ids[bounds[-2] :]):
            self.counts.ended += 1
            ids, trained = [*ids, self.tokenizer.eos_ids[0]], np.append(trained, True)
        trained[0] = False
        return Encoded(np.array(ids, np.uint32), trained)

    def _place(self, ids: Sequence[int], text: str, mask: bytes, at: int) -> int | None:
        """How many ids stand for the first `at` characters; None where a token stands across that place."""
        if at == len(text):
            return len(ids)
        before = self.tokenizer.encode_marked(text[:at], mask[:at])
        common = _common(ids, before)
        return common if common == len(before) or self._adds_space else None

    def _in_pieces(
        self, text: str, mask: bytes, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[int | None]]:
        """The ids with each answer, and what stands between answers, encoded by itself."""
        ids, bounds, at = list[int](), list[int | None](), 0
        for place in (place for span in spans for place in span):
            ids += self.tokenizer.encode_marked(text[at:place], mask[at:place])
            bounds.append(len(ids))
            at = place
        return [*ids, *self.tokenizer.encode_marked(text[at:], mask[at:])], bounds


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _of_assistant(messages: Sequence[Mapping[str, object]]) -> list[int]:
    """The places of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
