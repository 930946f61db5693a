"""LLM: a model for Python programs. Strings or messages in, text out; the engine runs in this process."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.backends.options import LoadOptions
from roofline.common.errors import RooflineError
from roofline.common.options import declared, split_keywords
from roofline.engine.config import EngineConfig
from roofline.engine.events import Event, FinishReason, TokenLogprob, Usage
from roofline.engine.interrupts import deferred
from roofline.engine.local import LocalEngine, unique_name
from roofline.engine.params import SamplingParams, invalid
from roofline.engine.stats import EngineStats

if TYPE_CHECKING:
    from roofline.bundle import LoadedModel
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
TextPieces = Generator[str, None, None]


@dataclass(frozen=True)
class Answer:
    """One answer. `stop` is the stop string or id that ended it; `error` says why, when finish_reason is "error"."""

    text: str
    ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: list[TokenLogprob] | None
    usage: Usage
    error: str | None = None


@dataclass(frozen=True)
class Output:
    """A prompt's ids and its n answers; the first one's parts are at hand directly."""

    prompt_ids: list[int]
    answers: list[Answer]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text

    @property
    def ids(self) -> list[int]:
        """The first answer's ids."""
        return self.answers[0].ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.answers[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The first answer's log-probabilities, when asked for."""
        return self.answers[0].logprobs

    @property
    def usage(self) -> Usage:
        """The first answer's tokens."""
        return self.answers[0].usage


class LLM:
    """A loaded model.

    Args:
        model: a catalogue name, a path, "hf:ORG/REPO[:FILE]", or a model that `roofline.bundle.load` returned.
        draft: a smaller model of the same vocabulary, for speculate="draft"; loaded with the same options.
        options: settings of the engine (see `EngineConfig`) and of loading (see `roofline.bundle.load`).

    Raises:
        ConfigError, UnsupportedError, CapacityError: with cause and remedy.
    """

    def __init__(
        self,
        model: "str | LoadedModel" = "smollm2-135m",
        *,
        draft: "str | LoadedModel | None" = None,
        **options: Any,
    ) -> None:
        load_options, config = split_keywords(options, LoadOptions, EngineConfig, owner="LLM")
        draft_options = load_options.for_draft().changes()
        load_options = config.prepare_load(load_options)
        if isinstance(model, str) and isinstance(draft, str):
            from roofline.bundle import load_with_draft

            model, draft = load_with_draft(model, load_options.changes(), draft, draft_options)
        else:
            from roofline.bundle import check_draft, load

            if isinstance(draft, str):
                draft = load(draft, **draft_options)
            if isinstance(model, str):
                model = load(model, **load_options.changes())
            elif only_loading := [name for name in options if name not in declared(EngineConfig)]:
                raise TypeError(f"a loaded model takes no option {', '.join(sorted(only_loading))}")
            if draft is not None:
                check_draft(model, draft)
        assert model.tokenizer is not None, "an LLM needs a model loaded with its text side"
        assert model.chat_template is not None, "an LLM needs a model loaded with its text side"
        self.model = model
        self.tokenizer: Tokenizer = model.tokenizer
        self.chat_template: ChatTemplate = model.chat_template
        self.engine = LocalEngine(model.executable, config, draft.executable if draft is not None else None)
        self._open: dict[tuple[str, int], _Collector] = {}

    @property
    def name(self) -> str:
        """The name the model was loaded by."""
        return self.model.name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = False,
    ) -> list[Output]:
        """Complete texts, all in one batch, each as it stands (no chat template).

        Args:
            prompts: one or several strings or lists of ids.
            params: for all prompts, or one each.
            parse_special: read special tokens inside strings as such.

        Returns:
            one Output a prompt, in order.

        Raises:
            RequestError, CapacityError: a prompt that cannot be computed; none is then.
            RooflineError: the engine failed on an answer.
        """
        several = not isinstance(prompts, str) and not (len(prompts) > 0 and _is_id(prompts[0]))
        listed: Sequence[Any] = prompts if several else [prompts]
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if len(each) != len(listed):
            raise invalid("params", f"{len(each)} for {len(listed)} prompts")
        return self._run([self.encode(prompt, parse_special) for prompt in listed], each, at_start=False)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Output:
        """Answer a conversation.

        Args:
            messages: mappings with "role" and "content".
            template: further variables of the chat template.

        Raises:
            as `generate`.
        """
        ids = self.chat_template.encode_chat(self.tokenizer, messages, **template)
        return self._run([ids], [params or SamplingParams()], at_start=True)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Answer a prompt (string or ids) or a conversation (messages) in pieces of text.

        The request is submitted at the first `next`. Leaving the iterator early aborts it. Several streams may be
        read in turn; each step advances all of them.

        Raises:
            as `generate`; and RequestError for n > 1.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise invalid("n", f"{params.n}: a stream has one answer")
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if chat:
            ids = self.chat_template.encode_chat(self.tokenizer, prompt)  # type: ignore[arg-type]
        else:
            ids = self.encode(prompt)  # type: ignore[arg-type]
        return self._stream(ids, params, at_start=chat)

    def encode(self, prompt: Prompt, parse_special: bool = False) -> list[int]:
        """The ids of a prompt as `generate` sees it: with the model's own beginning, if it has one."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=parse_special)
        return list(prompt)

    def stats(self) -> EngineStats:
        """The engine's counters since it was loaded."""
        return self.engine.stats()

    def close(self) -> None:
        """Free memory and threads."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], at_start: bool) -> list[Output]:
        submitted: list[list[_Collector]] = []
        try:
            for ids, wanted in zip(prompts, params, strict=True):
                submitted.append(self._submit(ids, wanted, at_start))
            while any(collector.answer is None for group in submitted for collector in group):
                self._step()
        finally:
            for group in submitted:
                self._drop(group)
        return [
            Output(ids, [collector.result() for collector in group])
            for ids, group in zip(prompts, submitted, strict=True)
        ]

    def _stream(self, ids: list[int], params: SamplingParams, at_start: bool) -> TextPieces:
        group = self._submit(ids, params, at_start)
        (collector,) = group
        try:
            while collector.answer is None or collector.waiting:
                if collector.waiting:  # also from steps that another stream took meanwhile
                    yield collector.take()
                else:
                    self._step()
            collector.result()
        finally:
            self._drop(group)

    def _submit(self, ids: list[int], params: SamplingParams, at_start: bool) -> "list[_Collector]":
        request_id = unique_name()
        self.engine.submit(ids, params, eos_ids=self.tokenizer.eos_ids, request_id=request_id)
        group = [_Collector(self.tokenizer, request_id, index, params, at_start) for index in range(params.n)]
        self._open |= {(request_id, collector.index): collector for collector in group}
        return group

    def _step(self) -> None:
        """One step of everything that is open; a Ctrl-C that falls into it comes after."""
        with deferred():
            for event in self.engine.step():
                collector = self._open.get((event.request_id, event.index))
                if collector is not None and collector.push(event):
                    self.engine.abort(event.request_id, event.index)
                if collector is not None and collector.answer is not None:
                    del self._open[event.request_id, event.index]

    def _drop(self, group: "list[_Collector]") -> None:
        """Forget what is unfinished: an error, Ctrl-C, or a stream nobody reads any more."""
        with deferred():
            for collector in group:
                if self._open.pop((collector.request_id, collector.index), None) is not None:
                    self.engine.abort(collector.request_id, collector.index)


class _Collector:
    """Builds one answer from its events: text, ids up to the stop string, and how it ended."""

    def __init__(
        self, tokenizer: "Tokenizer", request_id: str, index: int, params: SamplingParams, at_start: bool
    ) -> None:
        from roofline.text.streaming.stops import TextStream

        self.request_id, self.index = request_id, index
        self.answer: Answer | None = None
        self._stream = TextStream(tokenizer, params.stop, at_start=at_start)
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._pieces: list[str] = []
        self._taken = 0

    def push(self, event: Event) -> bool:
        """Take an event; True when a stop string ended the answer, and the engine is to be told.

        The answer is complete with the engine's last event, which has the usage; ids after the stop are dropped.
        """
        tell = False
        if self._stream.stopped is None:
            delta = self._stream.push(event.ids if event.stop_id is None else event.ids[:-1])
            self._pieces.append(delta.text)
            used = len(event.ids) if delta.stopped is None else delta.used
            self._ids += event.ids[:used]
            if self._logprobs is not None and event.logprobs is not None:
                self._logprobs += event.logprobs[:used]
            tell = delta.stopped is not None and event.finish_reason is None
        if event.finish_reason is not None:
            self._pieces.append(self._stream.finish())
            self._finish(event)
        return tell

    @property
    def waiting(self) -> bool:
        """Whether there is text that was not taken."""
        return any(self._pieces[self._taken :])

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return text

    def result(self) -> Answer:
        """The whole answer. Raises RooflineError when the engine failed on it."""
        assert self.answer is not None, "the answer is not finished"
        if self.answer.finish_reason == "error":
            raise RooflineError(f"the engine failed on this request: {self.answer.error}")
        return self.answer

    def _finish(self, last: Event) -> None:
        assert last.finish_reason is not None, "the last event says why"
        assert last.usage is not None, "the last event has the usage"
        reason, stop = last.finish_reason, self._stream.stopped or last.stop_id
        if self._stream.stopped is not None:
            reason = "stop"
        usage = last.usage._replace(completion_tokens=len(self._ids))
        self.answer = Answer("".join(self._pieces), self._ids, reason, stop, self._logprobs, usage, last.error)


def _is_id(value: Any) -> bool:
    return not isinstance(value, str | Sequence | Mapping)
