"""LocalAnswers: runs requests on an engine of this process and builds their answers."""

import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from roofline.engine.answers import Answer, AnswerBuilder
from roofline.engine.params import SamplingParams

if TYPE_CHECKING:
    from roofline.engine.local import LocalEngine
    from roofline.text.tokenizers.tokenizer import Tokenizer

Builders = dict[tuple[str, int], AnswerBuilder]  # by request and index of the answer


class LocalAnswers:
    """The answers to requests that this submits to `engine`, which steps only while one of them is awaited.

    Args:
        tokenizer: None: answers have ids alone, and stop strings are not looked for.
        eos_ids: the ids that end an answer.
    """

    def __init__(self, engine: "LocalEngine", tokenizer: "Tokenizer | None", eos_ids: Iterable[int]) -> None:
        self._engine, self._tokenizer, self._eos_ids = engine, tokenizer, tuple(eos_ids)
        self._open: Builders = {}

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], at_start: bool) -> list[list[Answer]]:
        """All answers to all prompts, computed in one batch. at_start: answers begin a text, as in chat; otherwise
        they go on from the prompt's.

        Raises:
            RequestError, CapacityError: a prompt that cannot be computed; none is then.
            RooflineError: the engine failed on an answer.
        """
        submitted: list[Builders] = []
        try:
            for ids, each in zip(prompts, params, strict=True):
                submitted.append(self._submit(ids, each, at_start))
            while any(builder.running for builders in submitted for builder in builders.values()):
                self._step()
        finally:
            for builders in submitted:
                self._drop(builders)
        return [[builder.result() for builder in builders.values()] for builders in submitted]

    def stream(self, ids: list[int], params: SamplingParams, at_start: bool) -> Generator[str, None, None]:
        """The text of the one answer to a prompt, piece by piece; leaving early aborts it. Raises as `run`."""
        builders = self._submit(ids, params, at_start)
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

    def _submit(self, ids: list[int], params: SamplingParams, at_start: bool) -> Builders:
        from roofline.text.streaming.stops import TextStream

        request_id = self._engine.submit(ids, params, eos_ids=self._eos_ids)
        builders: Builders = {}
        for index in range(params.n):
            text = TextStream(self._tokenizer, params.stop, at_start=at_start) if self._tokenizer is not None else None
            builders[request_id, index] = AnswerBuilder(text, params.logprobs is not None)
        self._open |= builders
        return builders

    def _step(self) -> None:
        """One step of everything that is open; a Ctrl-C that falls into it comes after."""
        with deferred():
            for event in self._engine.step():
                builder = self._open.get((event.request_id, event.index))
                if builder is None:
                    continue
                if builder.push(event).finish_reason is not None and builder.running:
                    self._engine.abort(event.request_id, event.index)
                if not builder.running:
                    del self._open[event.request_id, event.index]

    def _drop(self, builders: Builders) -> None:
        """Abort what is unfinished: after an error, Ctrl-C, or when nobody reads a stream any more."""
        with deferred():
            unfinished = [key for key in builders if self._open.pop(key, None) is not None]
            for key in unfinished:
                self._engine.abort(*key)
            if unfinished and not self._open:
                self._engine.step()  # takes the events of what was aborted


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back SIGINT until the block ends, then let the previous handler have it.

    A KeyboardInterrupt raised inside commit would leave pages and sequences in disagreement. In other threads than
    the main one there is nothing to do: Python delivers signals to the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        # None: a handler that was not set from Python and cannot be set again from here.
        signal.signal(signal.SIGINT, previous if previous is not None else signal.SIG_DFL)
    if arrived and callable(previous):
        previous(*arrived[0])
