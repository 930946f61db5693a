"""Our engine in the process of the load generator, its steps in a thread: a load without HTTP, server and client.

Events of requests are written as of a server, without the moments of connections. A part of an answer has the moment at
which its step ended and its text was made.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.load.generator import Generator, run_on_fast_loop
from roofline.bench.load.plan import Plan
from roofline.bench.load.progress import Progress
from roofline.bench.traffic.traffic import read_traffic
from roofline.common.errors import ConfigError, RooflineError, describe_error
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.bench.load.connection import Clock
    from roofline.bench.load.run import OnProgress
    from roofline.engine.answers import AnswerBuilder
    from roofline.engine.events import Event
    from roofline.engine.llm import LLM


class _Body(msgspec.Struct):
    """What a request asks for, of the fields that the generator sends."""

    max_tokens: int
    prompt: str = ""
    messages: list[dict[str, str]] | None = None
    ignore_eos: bool = False


@dataclass(eq=False)
class _Call:
    """A request that the engine computes. over: whether nobody waits for it any more."""

    body: _Body
    record: RequestEvents
    builder: "AnswerBuilder"
    clock: "Clock"
    done: "asyncio.Future[None]"
    name: str = ""
    over: bool = False

    def end(self, error: str | None = None) -> None:
        """The answer has come to its end, or failed. Called by the engine's thread."""
        if not self.over:
            self.over = True
            self.record.end = self.clock()
            self.record.error = error
            self.done.get_loop().call_soon_threadsafe(_resolve, self.done)


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


class EngineThread:
    """A thread that takes the steps of an engine for the requests of loads."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._inbox: SimpleQueue[_Call | None] = SimpleQueue()
        self._open: dict[str, _Call] = {}
        self._lost = ""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def fingerprint(self) -> str:
        """Of the engine's executable."""
        return self._llm.engine.executable.fingerprint

    def run(self, plan: Plan, on_progress: "OnProgress | None" = None) -> Events:
        """The events of a plan, as `run_plan`. There is no figure of the client's share of the processor."""
        traffic = read_traffic(Path(plan.traffic))

        def told(now: Progress) -> None:
            if on_progress is not None:
                on_progress(msgspec.structs.replace(now, cpu=None))

        generator = Generator(
            plan, traffic, on_progress=on_progress and told, connect=lambda clock: Caller(self, clock)
        )
        events = run_on_fast_loop(generator)
        events.head = msgspec.structs.replace(events.head, client_cpu=None)
        return events

    def close(self) -> None:
        """End the thread, and free the engine's memory."""
        self._inbox.put(None)
        self._thread.join()
        self._llm.close()

    def begin(self, body: bytes, record: RequestEvents, clock: "Clock") -> _Call:
        """Queue a request. Its `done` is set when it has ended."""
        from roofline.engine.answers import AnswerBuilder
        from roofline.text.streaming.stops import TextStream

        request = msgspec.json.decode(body, type=_Body)
        text = TextStream(self._llm.tokenizer, (), at_start=request.messages is not None)
        done = asyncio.get_running_loop().create_future()
        call = _Call(request, record, AnswerBuilder(text, logprobs=False), clock, done)
        self._inbox.put(call)
        return call

    def abort(self, call: _Call) -> None:
        """Nobody waits for a request any more."""
        call.over = True
        self._inbox.put(call)

    # The engine's thread.

    def _work(self) -> None:
        engine = self._llm.engine
        while True:
            while not self._inbox.empty() or not engine.has_work or self._lost:
                call = self._inbox.get()
                if call is None:
                    return
                if call.over:
                    engine.abort(call.name)
                    self._open.pop(call.name, None)
                else:
                    self._submit(call)
            try:
                for event in engine.step():
                    self._tell(event)
            except Exception as error:  # whatever it is, those who wait are told
                self._lost = f"the engine failed: {describe_error(error)}"
                for call in self._open.values():
                    call.end(self._lost)

    def _submit(self, call: _Call) -> None:
        from roofline.engine.params import SamplingParams

        if self._lost:
            call.end(self._lost)
            return
        llm, body = self._llm, call.body
        try:
            if body.messages is None:
                ids = llm.encode(body.prompt)
            else:
                ids = llm.chat_template.encode_chat(llm.tokenizer, body.messages)
            params = SamplingParams(temperature=0, max_tokens=body.max_tokens, ignore_eos=body.ignore_eos)
            call.name = llm.engine.submit(ids, params, eos_ids=llm.tokenizer.eos_ids)
        except RooflineError as error:
            call.end(f"refused: {error}")
            return
        self._open[call.name] = call

    def _tell(self, event: "Event") -> None:
        """Write what a step brought into the record of its request."""
        call = self._open.get(event.request_id)
        if call is None or call.over:
            return
        record, piece = call.record, call.builder.push(event)
        if piece.text:
            moment = call.clock()
            record.first_text = moment if record.first_text is None else record.first_text
            record.chunks.append(moment)
            record.characters.append(len(piece.text))
        if event.finish_reason is None:
            return
        del self._open[event.request_id]
        record.finish = event.finish_reason
        if event.usage is not None:
            usage = event.usage
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
        failed = event.finish_reason == "error"
        call.end(f"the engine failed on this request: {event.error}" if failed else None)


class Caller:
    """Takes the place of a connection: hands requests to an engine's thread."""

    def __init__(self, engine: EngineThread, clock: "Clock") -> None:
        self._engine, self._clock = engine, clock

    async def send(self, body: bytes, record: RequestEvents, timeout: float) -> str:
        """As `Connection.send`."""
        call = self._engine.begin(body, record, self._clock)
        try:
            async with asyncio.timeout(timeout):
                await call.done
        except TimeoutError:
            self._engine.abort(call)
            record.error, record.end = f"no complete answer within {timeout:g} s", self._clock()
        except asyncio.CancelledError:
            self._engine.abort(call)
            raise
        return call.builder.text

    def close(self) -> None:
        """There is nothing to close."""


@contextmanager
def open_engine(model: str, flags: dict[str, str]) -> Iterator[EngineThread]:
    """An engine of a model while the block runs. flags: options of `LLM`, as the command line has them. Raises
    ConfigError and UnsupportedError."""
    from roofline.engine.llm import LLM

    try:
        llm = LLM(model, **_keywords(flags))
    except TypeError as error:
        raise ConfigError(str(error)) from error
    engine = EngineThread(llm)
    try:
        yield engine
    finally:
        engine.close()


def _keywords(flags: dict[str, str]) -> JsonObject:
    from roofline.backends.options import LoadOptions
    from roofline.common.options import declared
    from roofline.engine.config import EngineConfig

    known = {**declared(LoadOptions), **declared(EngineConfig)}
    keywords: JsonObject = {}
    for flag, text in flags.items():
        name = flag.replace("-", "_")
        if not text:
            on = name in known or not name.startswith("no_")
            keywords[name if on else name.removeprefix("no_")] = on
        else:
            keywords[name] = known[name].parse(text) if name in known else text  # LLM names what there is
    return keywords
