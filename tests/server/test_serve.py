"""A start and an end of the server without sockets or models: what is closed, raised and said, and in which order."""

import asyncio
import ctypes
import errno
import gc
import json
import logging
import os
import queue
import re
import resource
import signal
import socket
import threading
import time
import weakref
from types import SimpleNamespace

import httpx
import pytest
from uvicorn.lifespan.on import LifespanOn

from roofline.backends.options import LoadOptions
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.engine.config import EngineConfig
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.replicas import EngineReplicas
from roofline.server import serve as module
from roofline.server import text_side
from roofline.server.complete_text import complete_text
from roofline.server.listening import address_of, listening_on
from roofline.server.options import ServeOptions


class Engine:
    """Starts once `loaded` says so, with what `outcome` is."""

    def __init__(self, steps, outcome=None):
        self.steps, self.outcome, self.loaded, self.gone = steps, outcome, asyncio.Event(), asyncio.Event()

    async def start(self):
        await self.loaded.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def failed(self):
        await self.gone.wait()
        return "it died (SIGSEGV); given up after 5 restarts"

    async def close(self):
        self.steps.append("close")


class SlowToStop(Engine):
    """Its start takes a moment to end when it is cancelled."""

    async def start(self):
        try:
            await super().start()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            self.steps.append("start is over")


class Server:
    """Serves until it is told to stop, or all is built; `at_start` is called first."""

    def __init__(self, steps, at_start):
        self.steps, self.at_start, self.should_exit = steps, at_start, False
        self.when_listening = None

    async def serve(self, sockets):
        self.steps.append("serve")
        self.when_listening()
        self.at_start(self)
        while not self.should_exit and "complete" not in self.steps:
            await asyncio.sleep(0.001)


@pytest.fixture
def run(monkeypatch):
    """run(outcome, at_start(server, engine)) -> what happened, in order."""

    def once(outcome, at_start, make=Engine, options=ServeOptions(), notice=""):
        steps = []

        async def serving():
            engine = make(steps, outcome)
            server = Server(steps, lambda server: at_start(server, engine))
            monkeypatch.setattr(module, "_http_server", lambda *_: server)
            text = SimpleNamespace(complete=lambda: steps.append("complete"), chat_notice=notice, tools_notice="")
            settle = lambda: steps.append("settle")  # noqa: E731
            listening = SimpleNamespace(family=socket.AF_INET, getsockname=lambda: ("127.0.0.1", 8000))
            await module._serve(options, listening, engine, time.perf_counter(), lambda: text, settle)

        try:
            asyncio.run(serving())
        except RooflineError as error:
            steps.append(str(error))
        return steps

    return once


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(run):
    steps = run(ConfigError("there is no such model"), lambda server, engine: engine.loaded.set())
    assert steps == ["settle", "serve", "close", "there is no such model"]


def test_a_loaded_model_is_announced_and_the_rest_built(run, capsys):
    """By the name that requests give."""
    ready, began = SimpleNamespace(name="tiny+random:7", max_model_len=1000, encoder=False), time.perf_counter()
    steps = run(ready, lambda server, engine: engine.loaded.set(), options=ServeOptions("tiny"))
    assert steps == ["settle", "serve", "complete", "close"]
    told = re.fullmatch(
        r"Listening on http://127.0.0.1:8000\nReady: tiny, 1,000 tokens of context, after (\d+\.\d\d) s\n",
        capsys.readouterr().err,
    )
    assert told is not None
    assert float(told[1]) <= time.perf_counter() - began + 0.01


@pytest.mark.parametrize("encoder", [False, True])
def test_a_model_without_a_chat_template_is_told(run, caplog, monkeypatch, encoder):
    monkeypatch.setattr(logging.getLogger("roofline"), "propagate", True)
    ready = SimpleNamespace(name="tiny", max_model_len=1000, encoder=encoder)
    run(ready, lambda server, engine: engine.loaded.set(), notice="chats are refused")
    assert caplog.messages == ["chats are refused"] * (not encoder), "encoders have no chats anyway"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "(ulimit -n)"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (ConfigError("its template is broken"), "its template is broken"),
        (KeyError("merges"), "tries again"),
    ],
)
def test_what_cannot_be_built_for_later_is_one_line_of_the_log(caplog, monkeypatch, error, told):
    """It runs on a thread that nobody waits for: an exception would be told as one that was never retrieved."""
    monkeypatch.setattr(logging.getLogger("roofline"), "propagate", True)

    def complete():
        raise error

    text = SimpleNamespace(complete=complete, chat_notice="", tools_notice="")
    complete_text(text, encoder=False, about="model b: ")
    (line,) = caplog.messages
    assert line.startswith("model b: ")
    assert line.endswith(told)


def test_a_server_that_ends_while_it_loads_ends_in_peace(run, capsys):
    steps = run(None, lambda server, engine: setattr(server, "should_exit", True))
    assert steps == ["settle", "serve", "close"]
    assert "Ready" not in capsys.readouterr().err


def test_an_engine_is_closed_once_its_start_is_over(run):
    def stop_soon(server, engine):
        asyncio.get_running_loop().call_later(0.01, setattr, server, "should_exit", True)

    steps = run(None, stop_soon, SlowToStop)
    assert steps == ["settle", "serve", "start is over", "close"]


def test_a_pinned_model_that_cannot_be_loaded_ends_the_server_with_its_error(run, monkeypatch):
    steps = []

    async def load_pinned():
        raise ConfigError("the pinned model is not there")

    async def close():
        steps.append("models")

    models = SimpleNamespace(load_pinned=load_pinned, close=close)
    monkeypatch.setattr(module, "_extra_models", lambda *_: models)
    assert run(None, lambda *_: None) == ["settle", "serve", "close", "the pinned model is not there"]
    assert steps == ["models"]


def test_spans_are_sent_and_nobody_waits_for_the_engine_when_the_server_ends(run, monkeypatch):
    closed, waiting = [], []
    monkeypatch.setattr(module, "_tracing", lambda _: SimpleNamespace(close=lambda: closed.append(True)))

    class Watched(Engine):
        async def failed(self):
            try:
                await super().failed()
            except asyncio.CancelledError:
                waiting.append("cancelled")
                raise

    def stop_soon(server, engine):
        asyncio.get_running_loop().call_later(0.01, setattr, server, "should_exit", True)

    assert run(None, stop_soon, Watched) == ["settle", "serve", "close"]
    assert (closed, waiting) == ([True], ["cancelled"])


@pytest.mark.parametrize("end", ["loaded", "refused", "cancelled"])
def test_golden_prompts_are_checked_once_the_model_is_loaded(monkeypatch, end):
    made, checked = [], []

    class Check:
        def __init__(self, *words):
            made.append(words)

        async def run(self, text):
            checked.append(text)

    monkeypatch.setattr("roofline.server.golden.GoldenCheck", Check)
    options = ServeOptions("m", load=LoadOptions(threads=1))

    async def main():
        loading = asyncio.get_running_loop().create_future()
        checking = asyncio.create_task(module._check_golden(options, "engine", "text", "state", loading))
        await asyncio.sleep(0.01)
        assert not checking.done()
        if end == "loaded":
            loading.set_result(None)
        elif end == "refused":
            loading.set_exception(ConfigError("no model"))
        else:
            loading.cancel()
        await checking

    asyncio.run(main())
    assert made == [("state", "engine", "m", options.load)]
    assert checked == (["text"] if end == "loaded" else [])


@pytest.mark.parametrize(("check", "begun"), [("later", True), ("off", False)])
def test_golden_prompts_are_checked_unless_that_is_off(run, monkeypatch, check, begun):
    checks = []

    async def check_golden(*words):
        checks.append(words)

    monkeypatch.setattr(module, "_check_golden", check_golden)
    ready = SimpleNamespace(name="tiny", max_model_len=1000, encoder=False)
    run(ready, lambda _, engine: engine.loaded.set(), options=ServeOptions(golden_check=check))
    assert bool(checks) == begun


def test_a_model_is_loaded_before_its_adapters():
    steps = []

    async def step(name):
        steps.append(name)
        return name

    engine, adapters = (
        SimpleNamespace(start=lambda: step("start")),
        SimpleNamespace(load_first=lambda: step("adapters")),
    )
    assert asyncio.run(module._start(engine, adapters)) == "start"
    assert steps == ["start", "adapters"]


@pytest.mark.parametrize("refused", [False, True])
def test_listening_is_said_of_a_server_whose_adapters_the_model_takes(run, capsys, refused):
    class Adapting(Engine):
        async def load_adapter(self, path, max_bytes):
            if refused:
                raise UnsupportedError("adapters of experts", "they are not computed")
            return SimpleNamespace(rank=8, nbytes=100, digest="d")

    ready = SimpleNamespace(name="tiny", max_model_len=1000, encoder=False)
    steps = run(ready, lambda _, engine: engine.loaded.set(), Adapting, ServeOptions(adapter=["a=x"]))
    assert steps[:2] == ["settle", "serve"]
    said = [line.partition(" ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ([] if refused else ["Listening", "Ready:"])
    assert ("adapters of experts is not supported: they are not computed." in steps) == refused


@pytest.mark.parametrize(
    ("given", "names"), [(None, ["m"]), (["shown"], ["shown"]), (["shown", "also"], ["shown", "also"])]
)
def test_adapters_stand_beside_the_name_that_the_model_is_served_by(given, names):
    limits = EngineConfig(adapter_bytes=7)
    options = ServeOptions("m", served_model_name=given, adapter=["a=x"], engine=limits)
    served = module.adapters_of(options, "engine")
    assert (served._engine, list(served._models), served._max_bytes, served._first) == (
        "engine",
        names,
        7,
        (("a", "x"),),
    )
    assert served.loading
    with pytest.raises(ConfigError):
        module.adapters_of(ServeOptions("m", served_model_name=given, adapter=[f"{names[-1]}=x"]), "engine")


def test_an_engine_that_is_given_up_ends_the_server_with_the_reason(run):
    steps = run(None, lambda server, engine: engine.gone.set())
    assert steps == ["settle", "serve", "close", "the engine is gone: it died (SIGSEGV); given up after 5 restarts"]


@pytest.fixture
def free():
    """A port of this machine that is taken while the test runs, and its socket."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_taken_address_is_a_mistake_of_the_user(free):
    for options, message in (
        (ServeOptions(port=free), rf"cannot listen on 127\.0\.0\.1:{free}: .*Choose another --port"),
        # of no machine (RFC 5737)
        (
            ServeOptions(host="192.0.2.1", port=0, api_key="k"),
            r"cannot listen on 192\.0\.2\.1:0: .*Choose another --host",
        ),
    ):
        with pytest.raises(ConfigError, match=message), listening_on(options):
            pass


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        *(("127.0.0.1", None, False), ("127.8.8.8", None, False), ("localhost", None, False)),
        *(("0.0.0.0", None, True), ("0.0.0.0", "k", False)),
    ],
)
def test_an_open_address_without_a_key_is_warned_of(host, key, warned, caplog):
    options = ServeOptions(host=host, port=0, api_key=key)
    with listening_on(options) as listening:
        port = listening.getsockname()[1]
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)  # a server may be started again at once
        assert address_of(options, listening) == f"http://{host}:{port}"
    assert ("can be reached from other machines" in caplog.text) == warned


@pytest.mark.parametrize(
    "fields",
    [
        *({"api_key": ""}, {"api_key": "  "}, {"api_key": "ключ"}, {"port": -1}, {"data_parallel": 0}),
        *({"draft": "m"}, {"engine": EngineConfig(speculate="draft")}),
    ],
)
def test_options_that_do_not_fit_are_refused(fields):
    with pytest.raises(ConfigError):
        ServeOptions(**fields)


def test_options_that_fit_are_taken():
    assert ServeOptions(api_key="k").api_key == "k"
    assert ServeOptions(draft="m", engine=EngineConfig(speculate="draft")).draft == "m"
    defaults = ServeOptions()
    assert (defaults.host, defaults.port, defaults.data_parallel, defaults.local) == ("127.0.0.1", 8000, 1, True)


def test_ports_have_their_ends():
    assert (ServeOptions(port=0).port, ServeOptions(port=65535).port) == (0, 65535)
    with pytest.raises(ConfigError):
        ServeOptions(port=65536)


def test_one_engine_loads_what_the_options_say():
    load, config = LoadOptions(threads=2, max_running=3), EngineConfig(speculate="ngram", speculate_tokens=3)
    engine = module.make_engine(ServeOptions("m", load=load, engine=config))
    assert isinstance(engine, RemoteEngine)
    spec = engine.spec
    assert (spec.source, spec.config, spec.draft, spec.cores) == ("m", config, None, [])
    assert spec.options == {"threads": 2, "max_running": 3, "draft_tokens": 3, "text": False}
    assert spec.draft_options == {"threads": 2, "max_running": 3}


def test_each_of_several_engines_has_a_place_of_its_own():
    engines = module.make_engine(ServeOptions("m", data_parallel=2, load=LoadOptions(threads=2)))
    assert isinstance(engines, EngineReplicas)
    share = {"threads": 1, "text": False}
    assert [each.spec.options for each in engines.engines] == [share | {"replica": (n, 2)} for n in (0, 1)]
    assert [each.spec.draft_options["replica"] for each in engines.engines] == [(0, 2), (1, 2)]
    assert [each.spec.config for each in engines.engines] == [EngineConfig()] * 2
    config = EngineConfig(cache_file="kept", record="steps")
    engines = module.make_engine(ServeOptions("m", data_parallel=2, load=LoadOptions(threads=2), engine=config))
    assert [each.spec.config.cache_file for each in engines.engines] == ["kept.0", "kept.1"]
    assert [each.spec.config.record for each in engines.engines] == ["steps/0", "steps/1"]


def test_a_file_of_the_cache_is_refused_before_anything_is_loaded():
    for load in (LoadOptions(backend="gpu"), LoadOptions(tensor_parallel=2)):
        with pytest.raises(UnsupportedError, match="cache_file"):
            module.make_engine(ServeOptions("m", load=load, engine=EngineConfig(cache_file="kept")))


@pytest.fixture
def outcome_of_visit(monkeypatch):
    """outcome_of_visit(start, visit) -> what visit(client) returned in a thread while start() served in this one, until
    the SIGTERM that visit sends."""

    def fail(*_):
        raise AssertionError("the signal did not reach the server")

    before = signal.signal(signal.SIGTERM, fail)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    lines = queue.Queue()
    monkeypatch.setattr(module.log, "say", lines.put)
    outcome = []

    def visiting(visit):
        try:
            address = re.fullmatch(r"Listening on (\S+)", lines.get(timeout=60))[1]
            assert lines.get(timeout=60).startswith("Ready: ")
            with httpx.Client(base_url=address, transport=httpx.HTTPTransport(retries=5), timeout=60) as client:
                outcome.append(visit(client))
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    def run(start, visit):
        visitor = threading.Thread(target=visiting, args=(visit,))
        visitor.start()
        start()
        visitor.join(60)
        assert {number: signal.getsignal(number) for number in handlers} == handlers, "handlers of the caller"
        return outcome[0]

    yield run
    signal.signal(signal.SIGTERM, before)


def visit(client):
    """The names of the models, the headers of an answer, and the last lines of a stream that the signal falls into."""
    models = client.get("/v1/models")
    body = {"model": "shown", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(os.getpid(), signal.SIGTERM)
        rest = list(lines)
    return [model["id"] for model in models.json()["data"]], models.headers, rest


def test_a_signal_ends_the_server_after_the_answers_that_run(outcome_of_visit, engine, make_context, capfd):
    engine.delay = 0.01
    options = ServeOptions("m", port=0, served_model_name=["shown"])
    names, headers, rest = outcome_of_visit(lambda: module.serve_engine(options, engine, make_context().text), visit)
    assert names == ["shown"]
    assert "server" not in headers
    assert "".join(capfd.readouterr()) == ""  # no line for each request
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"stop"' in rest[-4]
    assert engine.steps == ["start", "close"]


def test_the_engine_is_launched_first_and_collections_wait_for_the_end_of_the_start(
    outcome_of_visit, engine, make_context, monkeypatch
):
    engine.delay = 0.01
    collects = []
    monkeypatch.setattr(engine, "launch", lambda: collects.append(("launch", gc.isenabled())), raising=False)

    def load_text(model, backend, form):
        collects.append((model, backend, gc.isenabled()))
        return make_context().text

    monkeypatch.setattr(text_side, "load_text", load_text)
    monkeypatch.setattr(module, "make_engine", lambda _: engine)
    monkeypatch.setattr(module, "_settle", lambda: (collects.append("settle"), gc.enable()))
    names, _, _ = outcome_of_visit(lambda: module.serve(ServeOptions("shown", port=0)), visit)
    assert names == ["shown"]
    assert collects == [("launch", False), ("shown", "cpu", False), "settle"]


def test_connections_are_bounded_by_more_than_the_shells_limit_of_files(
    outcome_of_visit, engine, make_context, monkeypatch
):
    monkeypatch.setattr(engine, "launch", lambda: None, raising=False)
    monkeypatch.setattr(text_side, "load_text", lambda *_: make_context().text)
    monkeypatch.setattr(module, "make_engine", lambda _: engine)
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        outcome_of_visit(lambda: module.serve(ServeOptions("shown", port=0)), visit)
        soft, still = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    assert still == hard
    assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


@pytest.mark.slow
def test_what_the_start_left_is_given_back_and_what_it_made_is_kept_out_of_collections(monkeypatch):
    class Node:
        pass

    garbage = Node()
    garbage.itself, reference, trims = garbage, weakref.ref(garbage), []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trims.append))
    gc.unfreeze()  # what the tests' own start has kept out
    gc.disable()
    try:
        del garbage
        module._settle()
        assert reference() is None
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
    assert trims == [0]  # all of it
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # not every C library has it
    module._settle()


@pytest.mark.parametrize(("signals", "seconds"), [([signal.SIGTERM], 0), ([signal.SIGINT, signal.SIGINT], 30)])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_cut_off_says_so(outcome_of_visit, engine, make_context, signals, seconds, stream):
    engine.delay, engine.answer = 0.01, b"x" * 900
    options = ServeOptions("m", port=0, served_model_name=["shown"], drain_seconds=seconds)

    def visit_of_one_who_is_cut_off(client):
        body = {"model": "shown", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        for pause, number in enumerate(signals, 1):  # signals that come at once are one
            threading.Timer(0.3 * pause, os.kill, (os.getpid(), number)).start()
        response = client.post("/v1/chat/completions", json=body)
        return response.status_code, response.text

    start = lambda: module.serve_engine(options, engine, make_context().text)  # noqa: E731
    status, text = outcome_of_visit(start, visit_of_one_who_is_cut_off)
    if not stream:
        assert (status, json.loads(text)["error"]["code"]) == (503, "server_stopping")
        return
    *tokens, error, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert (status, done, json.loads(error)["error"]["code"]) == (200, "[DONE]", "server_stopping")
    assert len(tokens) > 2
    assert {json.loads(each)["choices"][0]["finish_reason"] for each in tokens} == {None}
    assert not engine.open


def test_nobody_new_is_taken_while_answers_finish(outcome_of_visit, engine, make_context):
    engine.delay, engine.answer = 0.01, b"x" * 900
    options = ServeOptions("m", port=0, served_model_name=["shown"], drain_seconds=30)

    def visit_late(client):
        body = {"model": "shown", "prompt": "Hi", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in lines:
                try:
                    socket.create_connection((client.base_url.host, client.base_url.port), timeout=5).close()
                except ConnectionRefusedError:
                    return True
            return False

    start = lambda: module.serve_engine(options, engine, make_context().text)  # noqa: E731
    assert outcome_of_visit(start, visit_late)


def test_the_length_of_the_queue_is_an_option(outcome_of_visit, engine, make_context, monkeypatch):
    ends, end = [], LifespanOn.shutdown
    monkeypatch.setattr(LifespanOn, "shutdown", lambda lifespan: (ends.append(lifespan), end(lifespan))[1])
    options = ServeOptions("m", port=0, max_queued_requests=1, drain_seconds=0)

    def visit_of_two(client):
        engine.gate.clear()
        body, path = {"model": "m", "prompt": "Hi"}, "/v1/completions"
        with client.stream("POST", path, json={**body, "stream": True}) as waiting:
            refused = client.post(path, json=body)
            os.kill(os.getpid(), signal.SIGTERM)
            return refused, waiting.read()

    start = lambda: module.serve_engine(options, engine, make_context().text)  # noqa: E731
    refused, cut_off = outcome_of_visit(start, visit_of_two)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert b"server_stopping" in cut_off
    assert len(ends) == 1  # what the application itself does at its end
