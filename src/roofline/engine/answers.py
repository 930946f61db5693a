"""Answers from the engine's events: text, stop strings, log-probabilities and what is billed, built in one place.

`LLM` and `roofline.torch` build theirs with `LocalAnswers`, the server with `server.answers.Answers`.
"""

import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from roofline.common.errors import CapacityError, RequestError, RooflineError
from roofline.engine.events import Event, FinishReason, TokenLogprob, Usage
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling

if TYPE_CHECKING:
    from roofline.engine.local import LocalEngine
    from roofline.engine.progress import ProgressBar
    from roofline.text.replies.parser import Delta
    from roofline.text.streaming.stops import TextStream
    from roofline.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """One answer. `stop` is the stop string or id that ended it; `error` says why, when finish_reason is "error".

    prompt_logprobs: in the first answer to a prompt, where they were asked for: one for each of its tokens, None for
    the first, which nothing stands before.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: list[TokenLogprob] | None
    usage: Usage
    error: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What an event adds to an answer: text, how many ids are billed, the log-probabilities of those that are text.

    The piece with a `finish_reason` is the last. parts: the text among the reasoning and the calls that came with it.
    """

    text: str
    tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    parts: "Sequence[Delta]" = ()


class AnswerBuilder:
    """Builds one answer from its events. Ids after a stop string are dropped and not billed.

    An answer that a stop string ended is complete before the engine has finished with it: while `running`, the caller
    should abort it there. The engine's last event brings the usage.

    Args:
        text: turns the ids into text and finds the stop strings; None: the answer has ids alone.
        logprobs: whether the request asked for log-probabilities.
        prompt_logprobs: whether this answer tells those of the prompt: the first does, where the request asked.
    """

    def __init__(self, text: "TextStream | None", logprobs: bool, prompt_logprobs: bool = False) -> None:
        self.ids: list[int] = []  # all that are billed
        self.logprobs: list[TokenLogprob] | None = [] if logprobs else None  # of `ids`
        self.digests: list[bytes] = []  # of the logits of `ids`, where the request asked for them
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if prompt_logprobs else None
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.running = True  # whether the engine computes it still
        self.vector: bytes | None = None  # of a request with a Pooling, once it is complete
        self._text, self._pieces, self._read = text, list[str](), 0
        self._last: Event | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def read(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces[self._read :])
        self._read = len(self._pieces)
        return text

    def push(self, event: Event) -> AnswerPiece:
        """Take an event of this answer and return what it adds."""
        if event.prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            self.running, self._last, self.vector = False, event, event.vector
        if self.finish_reason is not None:
            return AnswerPiece("")
        words = event.ids if event.stop_id is None else event.ids[:-1]  # an id that ends the answer is not text
        text, used = "", len(event.ids)
        parts: list[Delta] = []
        if self._text is not None:
            delta = self._text.push(words)
            text, parts = delta.text, list(delta.parts)
            if delta.stopped is not None:
                used = delta.used
            elif event.finish_reason is not None:  # the last half of a character may complete a stop string
                rest = self._text.end(cut=event.finish_reason == "length")
                text, parts = text + rest.text, parts + list(rest.parts)
        stopped = self._text.stopped if self._text is not None else None
        if event.finish_reason == "error" or stopped is None:
            self.finish_reason, self.stop = event.finish_reason, event.stop_id
        else:
            self.finish_reason, self.stop = "stop", stopped
        self.ids += event.ids[:used]
        self.digests += event.digests[:used] if event.digests else ()
        self._pieces.append(text)
        logprobs = event.logprobs[:used] if event.logprobs else []
        if self.logprobs is not None:
            self.logprobs += logprobs
        return AnswerPiece(text, used, logprobs[: len(words)], self.finish_reason, parts)

    def result(self) -> Answer:
        """The finished answer. Raises RooflineError when the engine failed on it."""
        last = self._last
        assert last is not None, "the engine's last event has not come"
        assert self.finish_reason is not None, "the last event says why"
        if self.finish_reason == "error":
            raise RooflineError(f"the engine failed on this request: {last.error}")
        assert last.usage is not None, "the last event has the usage"
        usage = last.usage._replace(completion_tokens=len(self.ids))
        extras = self.logprobs, usage, last.error, self.prompt_logprobs
        return Answer(self.text, self.ids, self.finish_reason, self.stop, *extras)


Builders = dict[tuple[str, int], AnswerBuilder]  # by request and index of the answer


class LocalAnswers:
    """The answers to requests that this submits to `engine`, which steps only while one of them is awaited.

    Any number of threads may wait for answers: whichever of them has the lock takes a step, for the requests of all.

    Args:
        tokenizer: None: answers have ids alone, and stop strings are not looked for.
        eos_ids: the ids that end an answer.
    """

    def __init__(self, engine: "LocalEngine", tokenizer: "Tokenizer | None", eos_ids: Iterable[int]) -> None:
        self._engine, self._tokenizer, self._eos_ids = engine, tokenizer, tuple(eos_ids)
        self._open: Builders = {}
        # Reentrant, because the garbage collector may close an abandoned stream in the middle of this thread's step.
        self._lock = threading.RLock()
        self._stepping, self._abandoned = False, list[tuple[str, int]]()
        self._process, self._closed = os.getpid(), False

    def run(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        at_start: bool,
        bar: "ProgressBar | None" = None,
        adapter: str = "",
    ) -> list[list[Answer]]:
        """All answers to all prompts, computed in one batch. Raises as `LLM.generate`.

        at_start: answers begin a text, as in chat; otherwise they go on from the prompt's. bar: shows how far it is.
        adapter: the digest of one that `load_adapter` loaded.
        """
        submitted = self._run(prompts, params, at_start, bar, adapter)
        return [[builder.result() for builder in builders.values()] for builders in submitted]

    def vectors(self, prompts: Sequence[list[int]], pooling: Pooling, bar: "ProgressBar | None" = None) -> list[bytes]:
        """What each prompt gives with this pooling, all in one batch. Raises as `run`, and UnsupportedError."""
        params = [SamplingParams(temperature=0, pooling=pooling)] * len(prompts)
        vectors = []
        for builders in self._run(prompts, params, False, bar, ""):
            (builder,) = builders.values()
            builder.result()
            assert builder.vector is not None, "it has not failed"
            vectors.append(builder.vector)
        return vectors

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        at_start: bool,
        bar: "ProgressBar | None",
        adapter: str,
    ) -> list[Builders]:
        """Submit all prompts, and step until all of their answers have ended."""
        submitted: list[Builders] = []
        try:
            for number, (ids, prompt_params) in enumerate(zip(prompts, params, strict=True), 1):
                with numbered(number, len(prompts)):
                    submitted.append(self._submit(ids, prompt_params, at_start, adapter))
            while any(builder.running for builders in submitted for builder in builders.values()):
                self._step()
                if bar is not None:
                    bar.update(lambda: sum(not any(b.running for b in each.values()) for each in submitted))
        finally:
            if bar is not None:
                bar.close()
            for builders in submitted:
                self._drop(builders)
        return submitted

    def stream(
        self, ids: list[int], params: SamplingParams, at_start: bool, adapter: str = ""
    ) -> Generator[str, None, None]:
        """The text of the one answer to a prompt, piece by piece; leaving early aborts it. Raises as `run`."""
        builders = self._submit(ids, params, at_start, adapter)
        (builder,) = builders.values()
        try:
            while (text := builder.read()) or builder.running:
                if text:  # also from steps that another stream took meanwhile
                    yield text
                else:
                    self._step()
            builder.result()
        finally:
            self._drop(builders)

    def load_adapter(self, path: str) -> str:
        """Load a folder of PEFT's files, or a GGUF file, unless it is loaded; its digest. Raises as `Adapters.load`."""
        with self._lock:
            self.check_open()
            return self._engine.adapters.load(path).digest

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter once the answers that are computed with it have ended."""
        with self._lock:
            self.check_open()
            self._engine.adapters.unload(digest)

    def close(self) -> None:
        """Close the engine, after the step that another thread is taking. A second call does nothing."""
        if self._process != os.getpid():  # the engine is that of the process that loaded it
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.close()

    def _submit(self, ids: list[int], params: SamplingParams, at_start: bool, adapter: str = "") -> Builders:
        from roofline.text.streaming.stops import TextStream

        if self._process != os.getpid():  # before the lock, which a thread that is not here may have held
            where = f"was loaded in process {self._process}, and this is its fork {os.getpid()}, without its threads"
            raise RooflineError(f"this model {where}: load it in the process that uses it, or start that by spawn")
        if params.constraint is not None:
            self.check_open()
            self._engine.compile(params.constraint).result()  # other threads go on meanwhile
        with self._lock:
            self.check_open()
            request_id = self._engine.submit(ids, params, eos_ids=self._eos_ids, adapter=adapter)
            builders: Builders = {}
            for index in range(params.n):
                text = None
                if self._tokenizer is not None:
                    # Of a form every byte counts, also a space at the beginning.
                    starts = at_start and params.constraint is None
                    text = TextStream(self._tokenizer, params.stop or (), at_start=starts, min_tokens=params.min_tokens)
                builders[request_id, index] = AnswerBuilder(
                    text, params.logprobs is not None, params.prompt_logprobs is not None and index == 0
                )
            self._open |= builders
            return builders

    def check_open(self) -> None:
        """Raise RooflineError once this was closed."""
        if self._closed:
            raise RooflineError("this model is closed: load it again")

    def _step(self) -> None:
        """One step of everything that is open; a Ctrl-C that falls into it comes after."""
        with self._lock, deferred():
            self.check_open()
            self._stepping = True
            try:
                for event in self._engine.step():
                    self._push(event)
            finally:
                self._stepping = False
            while self._abandoned:
                self._engine.abort(*self._abandoned.pop())

    def _push(self, event: Event) -> None:
        builder = self._open.get((event.request_id, event.index))
        if builder is None:
            return
        if builder.push(event).finish_reason is not None and builder.running:
            self._engine.abort(event.request_id, event.index)
        if not builder.running:
            del self._open[event.request_id, event.index]

    def _drop(self, builders: Builders) -> None:
        """Abort what is unfinished: after an error, Ctrl-C, or when nobody reads a stream any more."""
        if self._process != os.getpid():
            return
        with self._lock, deferred():
            unfinished = [key for key in builders if self._open.pop(key, None) is not None]
            if self._closed:
                return
            if self._stepping:
                self._abandoned += unfinished
                return
            for key in unfinished:
                self._engine.abort(*key)
            if unfinished and not self._open:
                self._engine.step()  # takes the events of what was aborted


@contextmanager
def numbered(number: int, count: int) -> Iterator[None]:
    """Errors of a request say which prompt of several it was."""
    try:
        yield
    except (RequestError, CapacityError) as error:
        if count == 1:
            raise
        prompt = f"prompt {number} of {count}"
        if isinstance(error, RequestError):
            raise RequestError(error.status, error.code, f"{prompt}: {error}", param=error.param) from None
        what = f"{prompt}: {error.what}"
        raise CapacityError(what, error.needed, error.available, error.unit, error.remedy) from None


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back SIGINT until the block ends, then let the previous handler have it.

    A KeyboardInterrupt raised inside commit would leave pages and sequences in disagreement. In other threads than
    the main one there is nothing to do: Python delivers signals to the main thread alone. Nor where no handler of
    Python's runs: SIGINT is ignored, ends the process at once, or has a handler that could not be set again from here.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        previous(*arrived[0])
