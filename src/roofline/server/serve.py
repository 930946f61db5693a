"""Two processes started together: the engine loads its model while this one parses the tokenizer and imports HTTP."""

import asyncio
import gc
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from roofline.common import log
from roofline.common.errors import RooflineError
from roofline.common.processes import allow_all_files, return_freed_memory, signal_handlers_as_before
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.server.activation import inherited_socket
from roofline.server.complete_text import complete_text
from roofline.server.listening import address_of, listening_on, widest_host
from roofline.server.options import ServeOptions
from roofline.server.places import check_places
from roofline.server.service_manager import ServiceManager, service_manager

if TYPE_CHECKING:
    from roofline.engine.facade import AsyncEngine
    from roofline.engine.process.messages import Ready
    from roofline.server.adapters import ServedAdapters
    from roofline.server.context import Context
    from roofline.server.drain import DrainingServer
    from roofline.server.golden import GoldenState
    from roofline.server.models import Models
    from roofline.server.text_side import TextSide
    from roofline.server.tracing import Tracing

CONNECTIONS = 65_536  # and files, that may be open at a time, where the system lets a process raise its limit


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT; what runs then may finish. Raises ConfigError when the address is
    taken, or a path among the options cannot be used, before anything is loaded."""
    options = options.with_room_for_adapters()
    check_places(options)
    manager, inherited = service_manager(), inherited_socket()
    if inherited is not None:
        options = replace(options, host=widest_host(options.host, inherited.getsockname()[0]))
    with listening_on(options, inherited) as listening:
        # An inherited socket holds connections until they are taken, and another server may take them meanwhile.
        _serve_on(listening, options, manager, waits=inherited is not None)


def _serve_on(listening: socket.socket, options: ServeOptions, manager: ServiceManager | None, *, waits: bool) -> None:
    """waits: connections are taken once the model is loaded, and not before."""
    started = time.perf_counter()
    allow_all_files(CONNECTIONS)
    gc.disable()  # importing makes objects that stay: looking for garbage among them takes a sixth of the time
    engine = make_engine(options)
    engine.launch()  # all that follows happens while the engine loads

    def read_text() -> "TextSide":
        from roofline.server.text_side import load_text

        return load_text(options.model, options.load.backend, options.reply_format)

    with log.threaded_handler("roofline", "uvicorn"):  # whoever stops reading the log does not stop the server
        _run(_serve(options, listening, engine, started, read_text, _settle, manager, waits=waits))


def serve_engine(options: ServeOptions, engine: "AsyncEngine", text: "TextSide") -> None:
    """As `serve`, for an engine that is to be started; it is closed at the end. From the main thread only.

    options: what of them is about loading is not looked at.
    """
    options = replace(options, golden_check="off")  # the model's file is not known
    check_places(options)
    with listening_on(options) as listening:
        _run(_serve(options, listening, engine, time.perf_counter(), lambda: text, lambda: None))


def _run(serving: Coroutine[object, None, None]) -> None:
    import uvloop

    with signal_handlers_as_before(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


def make_engine(options: ServeOptions) -> "AsyncEngine":
    """What computes. Raises CapacityError for more replicas than there is to compute on."""
    spec = _spec(options)
    if options.data_parallel == 1:
        return RemoteEngine(spec)
    from roofline.bundle.replicas import divided
    from roofline.engine.process.replicas import EngineReplicas

    engines = []
    for number, place in enumerate(divided(options.load, options.data_parallel)):
        load, draft = {**spec.options, **place.options}, {**spec.draft_options, **place.draft_options}
        file, folder = options.engine.cache_file, options.engine.record
        config = replace(
            options.engine,
            cache_file=None if file is None else f"{file}.{number}",
            record=None if folder is None else str(Path(folder) / str(number)),
        )
        replica_spec = msgspec.structs.replace(
            spec, options=load, draft_options=draft, cores=place.cores, config=config
        )
        engines.append(RemoteEngine(replica_spec))
    return EngineReplicas(engines)


def _spec(options: ServeOptions) -> EngineSpec:
    """What the engine process is to load; the text side stays in this process."""
    return EngineSpec(
        source=options.model,
        options={**options.engine.prepare_load(options.load).changes(), "text": False},
        config=options.engine,
        draft=options.draft,
        draft_options=options.load.for_draft().changes(),
    )


async def _serve(
    options: ServeOptions,
    listening: socket.socket,
    engine: "AsyncEngine",
    started: float,
    read_text: "Callable[[], TextSide]",
    settle: Callable[[], None],
    manager: ServiceManager | None = None,
    waits: bool = False,
) -> None:
    """Serve until told to end. waits: connections are taken once the model is loaded, and requests wait while its
    engine is started again: whoever handed the socket over has others that answer meanwhile."""
    adapters = adapters_of(options, engine)
    loading, failing = asyncio.create_task(_start(engine, adapters)), asyncio.create_task(engine.failed())
    spans: Tracing | None = None
    checking: asyncio.Task[None] | None = None
    pinning: asyncio.Task[None] | None = None
    watching: list[asyncio.Task[None]] = []
    models: Models | None = None
    try:
        text = read_text()
        spans = _tracing(options.otlp_endpoint)
        golden = _golden_state()
        context = _context(options, adapters, engine, text, golden, waits)
        models = _extra_models(options, context)
        server = _http_server(options, context, models, spans)
        if options.golden_check != "off":
            checking = asyncio.create_task(_check_golden(options, engine, text, golden, loading))
        settle()
        loading.add_done_callback(lambda task: _stop_if_failed(task, server))
        if models is not None:
            pinning = asyncio.create_task(models.load_pinned())
            pinning.add_done_callback(lambda task: _stop_if_failed(task, server))
        announce = partial(_announce, options, address_of(options, listening), loading, started, text)
        # An adapter may still be refused by the model, and the server then ends.
        server.when_listening = partial(_once_loaded, loading, announce) if adapters.loading else announce
        if manager is not None:
            starts: list[asyncio.Task] = [loading] if pinning is None else [loading, pinning]
            trouble = partial(engine.trouble, options.stall_seconds)
            watching = _told_to(manager, server, partial(manager.watch, options.names[0], starts, trouble))
        failing.add_done_callback(lambda _: setattr(server, "should_exit", True))
        if waits:
            await asyncio.wait([loading, failing], return_when=asyncio.FIRST_COMPLETED)
        await server.serve(sockets=[listening])
    finally:
        failed = failing.done()  # whoever restarts servers sees a status, and others not a server without an engine
        ending: list[asyncio.Task] = [task for task in (loading, checking, pinning, *watching) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(engine.close(), *([] if models is None else [models.close()]))
        failing.cancel()
        if spans is not None:
            spans.close()
    for start in (loading, pinning):
        if start is not None and not start.cancelled() and (failure := start.exception()) is not None:
            raise failure
    if failed:
        raise RooflineError(f"the engine is gone: {failing.result()}")


def _told_to(
    manager: ServiceManager, server: "DrainingServer", watch: "Callable[[], Coroutine[object, object, None]]"
) -> "list[asyncio.Task[None]]":
    """Have `watch` run once the server listens; the list then has its task."""
    announce, watching = server.when_listening, list[asyncio.Task[None]]()

    def begin() -> None:
        announce()
        watching.append(asyncio.create_task(watch()))

    server.when_listening, server.when_stopping = begin, manager.stopping
    return watching


def _golden_state() -> "GoldenState":
    from roofline.server.golden import GoldenState

    return GoldenState()


async def _check_golden(
    options: ServeOptions, engine: "AsyncEngine", text: "TextSide", state: "GoldenState", loading: "asyncio.Task[Ready]"
) -> None:
    from roofline.server.golden import GoldenCheck

    check = GoldenCheck(state, engine, options.model, options.load)
    await asyncio.wait([loading])
    if not loading.cancelled() and loading.exception() is None:
        await check.run(text)


def adapters_of(options: ServeOptions, engine: "AsyncEngine") -> "ServedAdapters":
    """What will be served beside the model. Raises ConfigError for an adapter that is not given as NAME=PATH."""
    from roofline.server.adapters import ServedAdapters, named_path

    first = [named_path(spelling) for spelling in options.adapter or ()]
    return ServedAdapters(engine, options.names, options.effective_limits().adapter_bytes, first)


async def _start(engine: "AsyncEngine", adapters: "ServedAdapters") -> "Ready":
    """Load the model, then its adapters."""
    ready = await engine.start()
    await adapters.load_first()
    return ready


def _settle() -> None:
    """What start-up made stays for good, so no collection needs to look at it; what it left behind goes back."""
    gc.collect()
    gc.freeze()
    gc.enable()
    return_freed_memory()


def _tracing(endpoint: str | None) -> "Tracing | None":
    from roofline.server.tracing import tracing

    return tracing(endpoint)


def _context(
    options: ServeOptions,
    adapters: "ServedAdapters",
    engine: "AsyncEngine",
    text: "TextSide",
    golden: "GoldenState",
    waits: bool,
) -> "Context":
    """What the routes work with. waits: requests wait while an engine is started again."""
    from roofline.engine.receipts.signing import Ed25519Signer
    from roofline.server.adapters import named_path
    from roofline.server.context import Context
    from roofline.server.keys import Keys

    return Context(
        engine=engine,
        text=text,
        name=options.names[0],
        aliases=options.names[1:],
        created=int(time.time()),
        host=options.host,
        stall_seconds=options.stall_seconds,
        canary_seconds=options.canary_seconds,
        access_log=options.access_log,
        page=options.page,
        ping_seconds=options.ping_seconds,
        pooling=options.embedding_pooling,
        keys=Keys(options.api_key, options.api_keys),
        open_probes=options.open_probes,
        other_names=tuple(named_path(spelling, "model")[0] for spelling in options.extra_model or ()),
        allowed_origins=frozenset(options.allow_origin or ()),
        response_store=options.response_store,
        limits=options.effective_limits(),
        signer=Ed25519Signer(options.receipt_key) if options.receipt_key is not None else None,
        batch_folder=options.batch_folder,
        batch_at_once=options.batch_at_once,
        adapters=adapters,
        golden=golden,
        waits_for_engine=waits,
    )


def _extra_models(options: ServeOptions, context: "Context") -> "Models | None":
    if not options.extra_model:
        return None
    from roofline.server.extra_models import make_models

    return make_models(options, context)


def _http_server(
    options: ServeOptions, context: "Context", models: "Models | None" = None, spans: "Tracing | None" = None
) -> "DrainingServer":
    import uvicorn

    from roofline.server import access_log
    from roofline.server.app import create_app
    from roofline.server.drain import DrainingServer
    from roofline.server.protocol import BoundedProtocol
    from roofline.server.tls import Certificate

    if options.access_log:
        access_log.show()
    app = create_app(context, spans, models)

    class Protocol(BoundedProtocol):
        limits, sinks = context.limits, tuple(app.state.record_sinks)

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="none",  # we are inside one
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
    )
    refreshes = [context.keys.refresh] if options.api_keys is not None else []
    if options.tls_certificate is not None and options.tls_key is not None:
        certificate = Certificate(options.tls_certificate, options.tls_key)
        config.load()
        config.ssl = certificate.context
        refreshes.append(certificate.refresh)
    limits = context.limits
    return DrainingServer(config, app.state.queue, limits.drain_seconds, refreshes, limits.read_seconds)


def _stop_if_failed(task: "asyncio.Task", server: "DrainingServer") -> None:
    if not task.cancelled() and task.exception() is not None:
        server.should_exit = True


def _announce(
    options: ServeOptions, address: str, loading: "asyncio.Task[Ready]", started: float, text: "TextSide"
) -> None:
    """Say that connections are taken, and later, or at once, that the model is loaded."""
    log.say(f"Listening on {address}")
    loading.add_done_callback(lambda task: _loaded(options, task, started, text))


def _once_loaded(loading: "asyncio.Task[Ready]", then: Callable[[], None]) -> None:
    loading.add_done_callback(lambda task: None if task.cancelled() or task.exception() is not None else then())


def _loaded(options: ServeOptions, task: "asyncio.Task[Ready]", started: float, text: "TextSide") -> None:
    if task.cancelled() or task.exception() is not None:
        return
    ready = task.result()
    seconds = time.perf_counter() - started
    name = options.names[0]
    weights = f" (weights {options.load.weights})" if options.load.weights else ""
    log.say(f"Ready: {name}{weights}, {ready.max_model_len:,} tokens of context, after {seconds:.2f} s")
    asyncio.get_running_loop().run_in_executor(None, complete_text, text, ready.encoder)
