"""Our engine in the process of the load generator: the events that it writes, over a toy executable."""

import gc
import signal
import sys
import time

import pytest
from engine_fakes import loaded_text

from roofline import LLM, SamplingParams
from roofline.bench.load.in_process import EngineThread, _keywords, open_engine
from roofline.bench.load.plan import Probe
from roofline.bench.load.targets import backend_of, open_target
from roofline.bench.traffic.traffic import TrafficRequest
from roofline.common.errors import ConfigError
from roofline.text.streaming import stops

PROMPTS = ("abc", "bcd", "cde", "abcd", "zyx", "xyz")


@pytest.fixture
def engine():
    """engine(options of the toy...) -> a thread with its engine."""
    made = []

    def make(**options):
        llm = LLM(loaded_text(**options))
        made.append(EngineThread(llm))
        return made[-1], llm

    yield make
    for each in made:
        each.close()


def requests(*prompts, most=8):
    return [TrafficRequest(prompt=prompt, prompt_tokens=len(prompt), max_tokens=most) for prompt in prompts]


def test_its_fingerprint_is_the_executables(engine):
    thread, llm = engine()
    assert thread.fingerprint == llm.engine.executable.fingerprint != ""


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"arrivals": "poisson", "rate": 200.0}])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_events_are_what_the_engine_answers(engine, make_plan, load, route):
    thread, _ = engine()
    events = thread.run(make_plan("engine:toy", requests(*PROMPTS), route=route, keep_text=True, **load))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(loaded_text()) as other:
        for record in events.requests:
            prompt = PROMPTS[record.request]
            chat = [{"role": "user", "content": prompt}]
            answer = other.generate(prompt, params)[0] if route == "completions" else other.chat(chat, params)
            assert (record.text, record.completion_tokens) == (answer.text, 8)
            assert record.prompt_tokens == len(answer.prompt_ids)
            assert (record.finish, record.error, record.cached_tokens) == ("length", None, 0)
            assert sum(record.characters) == len(answer.text)
            assert record.scheduled <= record.dispatched < record.first_text == record.chunks[0]
            assert record.chunks == sorted(record.chunks)
            assert record.end >= record.chunks[-1]
            assert (record.sent, record.headers, record.first_byte, record.status) == (None, None, None, 0)
    assert len(events.requests) == 6
    assert events.head.client_cpu is None


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_answers_begin_a_text_in_chat_alone(engine, make_plan, monkeypatch, route):
    starts, plain = [], stops.TextStream
    monkeypatch.setattr(
        stops, "TextStream", lambda *of, at_start: (starts.append(at_start), plain(*of, at_start=at_start))[1]
    )
    thread, _ = engine()
    thread.run(make_plan("engine:toy", requests("abc"), route=route))
    assert starts == [route == "chat"]


def test_probes_end_where_the_model_ends_them(engine, make_plan):
    thread, llm = engine()
    (expected,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=30))
    events = thread.run(make_plan("engine:toy", requests(*PROMPTS), probes=[Probe("abc", 30)], probe_every=3))
    assert [each.text for each in events.requests if each.probe] == [expected.text] * 2


def test_what_the_engine_refuses_is_an_error(engine, make_plan):
    thread, _ = engine(max_context=16)
    short, long = thread.run(make_plan("engine:toy", requests("abc", "a" * 40))).requests
    assert short.completed
    assert long.error.startswith("refused: ")
    assert long.end is not None


def test_a_request_that_takes_too_long_is_ended(engine, make_plan):
    thread, _ = engine(step_seconds=0.05)
    slow, quick = requests("abc", most=200) + requests("bcd", most=2)
    told = []
    first, second = thread.run(make_plan("engine:toy", [slow, quick], timeout=0.6), told.append).requests
    assert {now.cpu for now in told} == {None}, "it would be the engine's"
    assert first.error == "no complete answer within 0.6 s"
    assert second.completed
    until = time.monotonic() + 60
    while thread._open:
        assert time.monotonic() < until, "the engine goes on with a request that was ended"
        time.sleep(0.01)


def test_a_failed_step_is_told(engine, make_plan):
    thread, llm = engine()
    llm.model.executable.fail_at = {2}
    first, second = thread.run(make_plan("engine:toy", requests("abc", "bcd"), concurrency=1)).requests
    assert "the toy was told to fail" in first.error
    assert second.completed


def test_an_engine_that_is_lost_answers_nothing_more(engine, make_plan):
    thread, llm = engine()
    llm.engine.step = lambda: 1 // 0
    events = thread.run(make_plan("engine:toy", requests("abc", "bcd", "cde"), concurrency=2))
    assert [each.error.partition(":")[0] for each in events.requests] == ["the engine failed"] * 3


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_behind_a_load_signals_do_what_they_did_before(engine, make_plan, monkeypatch, loop):
    if loop == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        engine()[0].run(make_plan("engine:toy", requests("abc")))
        after = {number: signal.getsignal(number) for number in handlers}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after == handlers


def test_a_process_without_collections_stays_so(engine, make_plan):
    gc.disable()
    try:
        engine()[0].run(make_plan("engine:toy", requests("abc")))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_options_are_those_of_the_engine(monkeypatch):
    flags = {"threads": "2", "max-running": "8", "no-prefix-cache": "", "profile": "", "isa": "avx2"}
    told = {"threads": 2, "max_running": 8, "prefix_cache": False, "profile": True, "isa": "avx2"}
    assert _keywords(flags) == told
    with pytest.raises(ConfigError, match="threads='many' cannot be used"):
        _keywords({"threads": "many"})
    with (
        pytest.raises(ConfigError, match="LLM has no option 'thread'; did you mean 'threads'"),
        open_engine("smollm2-135m", {"thread": "2"}),
    ):
        pass
    assert (backend_of("engine:m --backend gpu"), backend_of("engine:m")) == ("gpu", "cpu")


def test_a_target_without_a_model_is_told():
    with pytest.raises(ConfigError, match="a target is empty"), open_target("engine:"):
        pass
