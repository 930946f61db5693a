"""Reads a streamed answer: server-sent events of chats and completions, into the moments of a request."""

import msgspec

from roofline.bench.load.events import RequestEvents, negative_counts

MOST_ERROR = 300  # characters that are kept of a server's message


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Event).decode


class AnswerStream:
    """Puts what arrives of an answer into a request's record."""

    def __init__(self, record: RequestEvents) -> None:
        self._record = record
        self._pending = b""
        self._texts: list[str] = []
        self.complete = False  # whether [DONE] has come

    @property
    def text(self) -> str:
        """The answer so far, without reasoning."""
        return "".join(self._texts)

    def feed(self, data: bytes, moment: int) -> None:
        """Bytes of the body that arrived at that moment."""
        if self._record.first_byte is None:
            self._record.first_byte = moment
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), moment)

    def _event(self, data: bytes, moment: int) -> None:
        record = self._record
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            record.error = record.error or f"an event of the answer cannot be read: {error}"
            return
        if bytes(event.error) != b"null":
            record.error = record.error or bytes(event.error).decode("utf-8", "replace")[:MOST_ERROR]
        if event.usage is not None:
            self._usage(event.usage)
        for choice in event.choices:
            self._choice(choice, moment)

    def _usage(self, usage: _Usage) -> None:
        record = self._record
        record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        cause = negative_counts(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
        if cause is not None:
            record.error = record.error or cause
            record.prompt_tokens = record.completion_tokens = record.cached_tokens = None

    def _choice(self, choice: _Choice, moment: int) -> None:
        record, delta = self._record, choice.delta
        record.finish = choice.finish_reason or record.finish
        text = (choice.text if delta is None else delta.content) or ""
        reasoning = "" if delta is None else delta.reasoning_content or delta.reasoning or ""
        if not text and not reasoning:
            return  # such as the event that only names the role
        record.chunks.append(moment)
        record.characters.append(len(text) + len(reasoning))
        if text:
            record.first_text = moment if record.first_text is None else record.first_text
            self._texts.append(text)
        if reasoning and record.first_reasoning is None:
            record.first_reasoning = moment
