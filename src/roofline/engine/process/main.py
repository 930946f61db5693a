"""The engine process: `python -m roofline.engine.process.main FD`, FD being its end of a socket pair.

It loads what the first message says, then turns requests into reports, one a step. Between steps it takes whatever
has arrived, so an abort holds from the next step on; with nothing to do it sleeps in poll. It ends when its owner
closes the socket, or dies.
"""

import gc
import os
import select
import signal
import socket
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from roofline.backends.base import BackgroundCheck, ChecksWeights, IdentifiesWeights
from roofline.common import log
from roofline.common.errors import RequestError, RooflineError
from roofline.common.processes import die_with_parent, end_now
from roofline.engine.checks import RequestOptions
from roofline.engine.events import Event
from roofline.engine.local import LocalEngine
from roofline.engine.process import messages
from roofline.engine.process.messages import (
    Abort,
    AdapterLoaded,
    Checked,
    Close,
    EngineLost,
    EngineSpec,
    LoadAdapter,
    Ping,
    Pong,
    Ready,
    StepReport,
    Submit,
    ToEngine,
    ToOwner,
    UnloadAdapter,
)
from roofline.hardware.cores import pin_to

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

# Bytes of reports that may wait for a slow owner before the engine waits too. They are steps that the owner does not
# know of yet: what it says of requests that end, and of the engine's load, is so much behind.
UNSENT_LIMIT = 1 << 20
CHECK_SECONDS = 1.0  # between looks at whether the weights have been checked, where there is nothing else to do


class Channel:
    """The socket to the owner. Sending never waits (up to UNSENT_LIMIT); receiving waits when told to."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.closed = False
        self._sock, self._poll = sock, select.poll()
        self._poll.register(sock, select.POLLIN)
        self._in, self._out = bytearray(), bytearray()

    def send(self, message: ToOwner) -> None:
        """Queue a message and write what the socket takes."""
        self._out += messages.frame(message)
        self._flush()
        while len(self._out) > UNSENT_LIMIT and not self.closed:
            self._wait_writable()

    def finish(self) -> None:
        """Wait until everything queued is written."""
        while self._out and not self.closed:
            self._wait_writable()

    def receive(self, wait: bool, seconds: float | None = None) -> list[ToEngine]:
        """All messages that have arrived; with `wait`, at least one, unless the owner is gone (`closed`) or so many
        seconds passed."""
        while True:
            self._flush()
            self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
            if self._poll.poll(0 if not wait else None if seconds is None else seconds * 1000):
                self._read()
            received = self._take()
            if received or self.closed or not wait or seconds is not None:
                return received

    def _read(self) -> None:
        try:
            while data := self._sock.recv(1 << 18):
                self._in += data
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.closed = True

    def _take(self) -> list[ToEngine]:
        received: list[ToEngine] = []
        at = 0
        while len(self._in) - at >= messages.LENGTH.size:
            (length,) = messages.LENGTH.unpack_from(self._in, at)
            start = at + messages.LENGTH.size
            if length > messages.MAX_MESSAGE:
                raise RooflineError(f"a message of {length} bytes: the stream from the owner is broken")
            if len(self._in) < start + length:
                break
            received.append(messages.engine_decoder.decode(self._in[start : start + length]))
            at = start + length
        del self._in[:at]
        return received

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.closed = True

    def _wait_writable(self) -> None:
        self._poll.modify(self._sock, select.POLLOUT)
        self._poll.poll()
        self._flush()


def main(arguments: list[str]) -> int:
    """Run until the owner is done. Exit status 0, or 1 when nothing could be loaded."""
    die_with_parent()  # a backstop to the closed socket
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole group, they are for the owner, which may drain first
    log.configure()
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    first = channel.receive(wait=True)
    if not first:
        return 0
    spec, *rest = first
    assert isinstance(spec, EngineSpec), "the first message says what to load"
    started = time.perf_counter()
    gc.disable()  # loading makes objects that stay: nothing to collect
    try:
        pin_to(spec.cores)
        name, engine = _load(spec)
    except Exception as error:  # anything a loader raises is told to the owner, who raises it again
        if not isinstance(error, RooflineError):
            log.get("engine").exception("loading %s failed", spec.source)
        channel.send(messages.refused(error))
        channel.finish()
        return 1
    channel.send(ready(name, engine, time.perf_counter() - started))
    gc.collect()
    gc.freeze()  # no collection needs to look at them later
    gc.enable()
    work(channel, engine, rest)
    engine.close()
    gc.unfreeze()  # what is part of a cycle is released at the end, or the native module reports it as leaked
    if engine.lost is not None:
        end_now(1)
    return 0


def ready(name: str, engine: LocalEngine, load_seconds: float) -> Ready:
    """Return the message that tells the owner of a loaded engine."""
    executable = engine.executable
    return Ready(
        name=name,
        vocab_size=executable.vocab_size,
        max_model_len=engine.limits.max_model_len,
        fingerprint=executable.fingerprint,
        num_pages=executable.num_pages,
        page_bytes=executable.page_bytes,
        load_seconds=load_seconds,
        pid=os.getpid(),
        exact=executable.exact,
        step_tokens=engine.limits.tokens,
        weights_identity=executable.weights_identity if isinstance(executable, IdentifiesWeights) else "",
        gives_hidden=engine.gives_hidden,
        encoder=engine.encoder,
        pooling=engine.pooling,
        gives_logits=engine.gives_logits,
        facts=engine.facts,
        media_ids=dict(engine.media_ids),
    )


def work(channel: Channel, engine: LocalEngine, arrived: list[ToEngine]) -> None:
    """Turn messages into reports until the owner closes, or nothing can be computed any more. arrived: the first
    messages."""
    check = _weights_check(engine)
    while not channel.closed:
        rejected: list[Event] = []
        for message in arrived:
            match message:
                case Submit():
                    rejected += _submit(engine, message)
                case Abort(request_id, index):
                    engine.abort(request_id, index)
                case LoadAdapter():
                    channel.send(_load_adapter(engine, message))
                case UnloadAdapter(digest):
                    engine.adapters.unload(digest)
                case Ping():
                    channel.send(Pong())
                case Close():
                    engine.abort_all()
                    channel.send(StepReport(engine.step(), engine.stats()))
                    channel.finish()
                    return
        if engine.has_work or rejected:
            events = engine.step()
            if engine.lost is not None:  # what the lost step would have computed, a fresh process does
                events = [event for event in events if event.finish_reason != "error"]
            channel.send(StepReport(rejected + events, engine.stats()))
        if engine.lost is not None:
            channel.send(EngineLost(engine.lost))
            channel.finish()
            return
        if check is not None and not check.pending:
            channel.send(Checked(check.problem))
            check = None
        arrived = channel.receive(not engine.has_work, None if check is None else CHECK_SECONDS)


def _weights_check(engine: LocalEngine) -> BackgroundCheck | None:
    executable = engine.executable
    return executable.weights_check if isinstance(executable, ChecksWeights) else None


def _submit(engine: LocalEngine, message: Submit) -> list[Event]:
    """Queue a request; what is wrong with it becomes the last event of each of its answers."""
    name = message.request_id
    try:
        options = RequestOptions(
            eos_ids=message.eos_ids,
            request_id=name,
            salt=message.salt,
            adapter=message.adapter,
            priority=message.priority,
        )
        engine.submit(message.ids, message.params, message.answers, message.scored, **options)
        return []
    except Exception as error:  # of this request alone
        if not isinstance(error, RooflineError):
            log.get("engine").error("request %s cannot be taken", name, exc_info=error)
        text = str(error) if isinstance(error, RooflineError) else f"{type(error).__name__}: {error}"
        refused = error.param if isinstance(error, RequestError) else None
        return [Event(name, index, [], finish_reason="error", error=text, refused=refused) for index in message.answers]


def _load_adapter(engine: LocalEngine, message: LoadAdapter) -> AdapterLoaded:
    try:
        return AdapterLoaded(message.number, engine.adapters.load(message.path, message.digest, message.max_bytes))
    except Exception as error:  # of this adapter alone
        if not isinstance(error, RooflineError):
            log.get("engine").error("the adapter %s cannot be loaded", message.path, exc_info=error)
        return AdapterLoaded(message.number, None, messages.refused(error))


def _load(spec: EngineSpec) -> tuple[str, LocalEngine]:
    name, _, function = spec.factory.partition(":")
    module = import_module(name)
    load = getattr(module, function)

    def tokenizer() -> "Tokenizer":
        words: Tokenizer = module.load_text_of(spec.source, spec.options.get("backend", "cpu"))[0]
        return words

    if spec.draft is None:
        loaded, draft = load(spec.source, **spec.options), None
    else:
        loaded, draft = module.load_with_draft(spec.source, spec.options, spec.draft, spec.draft_options)
    engine = LocalEngine(loaded.executable, spec.config, draft and draft.executable, tokenizer)
    engine.pooling, engine.facts, engine.media_ids = loaded.pooling, loaded.facts, loaded.media_ids
    return loaded.name, engine


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except msgspec.MsgspecError as error:
        sys.exit(f"the stream from the owner is broken: {error}")
