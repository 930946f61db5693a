"""What all points of a load test share: the requests that are sent, the limit, what is told of each load."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from roofline.bench.load.plan import Probe
from roofline.bench.load.progress import Progress
from roofline.bench.load.targets import Target
from roofline.bench.results.energy import Counter, Meter
from roofline.bench.results.limits import ModelLimits
from roofline.bench.results.point import Device, Host
from roofline.bench.serving import load_test
from roofline.bench.serving.load_test import LoadTest, Settings
from roofline.bench.serving.measure import measure, point_of
from roofline.bench.traffic.presets import preset_traffic
from roofline.bundle.shape import open_shape
from roofline.cli.measure.load_options import load_of_plan, tell_points
from roofline.common.errors import ConfigError
from roofline.hardware.roofs import Roofs
from roofline.models.registry import configure
from roofline.program.compile import compile_program
from roofline.program.target import CPU
from tests.bench.results.events import request, run

ROOFS = Roofs(int8_ops=4e12, bf16_flops=1e12, f32_flops=5e11, reads=((1 << 20, 100e9), (1 << 30, 50e9)), chip="test")
HOST = Host(chip="c", cores=2, memory_bytes=1)


@pytest.fixture
def make(tmp_path):
    """make(stop of the traffic, limits) -> a load test."""

    def of(stop="ignored", limits=None, **settings):
        traffic = preset_traffic("typical", 20, 0, stop)
        target = Target("http://x", "http://x/v1", "m")
        return LoadTest(Settings("http://x", **settings), target, traffic, tmp_path, HOST, None, limits)

    return of


@pytest.fixture(scope="module")
def limits():
    shape = open_shape("preset:smollm2-135m")
    program = compile_program(*configure(shape.config), shape.tensors, CPU)
    return ModelLimits("smollm2-135m", program, ROOFS, "test", None, Device(name="c", vendor="v"))


def test_a_load_is_told_before_it_is_sent(make, monkeypatch):
    told, test = [], make()
    monkeypatch.setattr(
        load_test, "run_plan", lambda plan, key, on_progress: told.append(on_progress) or run([request(at=0, first=1)])
    )
    test.on_start = lambda plan: told.append(load_of_plan(plan))
    test.on_progress = print
    test.send(test.plan(4, concurrency=2))
    test.send(test.plan(3, arrivals="poisson", rate=2.5))
    test.send(test.plan(3, arrivals="trace"))
    assert told == ["2 workers", print, "2.5/s poisson", print, "trace", print]
    assert test.sent == 10


def test_a_chip_that_is_below_its_roofs_is_flagged(make, limits):
    for below, flagged in (((), False), (("bf16", "f32"), True)):
        test = make(limits=replace(limits, below=below))
        test.limits = replace(test.limits, again=lambda roofs: roofs)
        told = point_of(test, "curve", test.plan(1), run([request(at=0, first=1000)]))
        assert ("the chip was below its roofs before: bf16, f32" in told.validity.flags) is flagged


def test_the_limit_of_another_device_is_not_this_cpus(monkeypatch):
    monkeypatch.setattr(load_test, "limits_here", lambda model, kv_cache_dtype, dtype: model)
    for backend, limits in (("", "m"), (" --backend reference", "m"), (" --backend gpu", None)):
        assert load_test._limits(Settings(f"roofline:m{backend}"), "m") == limits
    assert load_test._limits(Settings("http://x", model_here="m"), "m") == "m"


def test_the_limit_and_the_point_have_the_format_of_the_servers_cache(make, monkeypatch, limits):
    asked = []
    monkeypatch.setattr(load_test, "limits_here", lambda model, cache, dtype: asked.append(cache) or limits)
    for options, expected in (({}, "auto"), ({"kv-cache-dtype": "int8"}, "int8")):
        target = Target("roofline:m", "http://127.0.0.1:1/v1", "m", options=options, local_model="m")
        monkeypatch.setattr(load_test, "open_target", lambda *_, target=target: nullcontext(target))
        monkeypatch.setattr(load_test, "_warm_up", lambda test: None)
        settings = Settings("roofline:m", probe=False, certify=False)
        monkeypatch.setattr(load_test, "tokenizer_of", lambda model: None)
        monkeypatch.setattr(load_test, "_meter", lambda settings: None)
        with load_test.open_load_test(settings, preset_traffic("typical", 2), 1):
            assert asked.pop() == expected
    test = make(limits=limits)
    test.limits = replace(test.limits, again=lambda roofs: roofs)
    system = point_of(test, "curve", test.plan(1), run([request(at=0, first=1000)])).system
    assert (system.kv_format, system.replicas, system.fingerprint) == ("", 1, ""), (
        "another server may keep it otherwise"
    )
    test.target = replace(test.target, local_model="m", replicas=2, fingerprint="f")
    system = point_of(test, "curve", test.plan(1), run([request(at=0, first=1000)])).system
    assert (system.kv_format, system.replicas, system.fingerprint) == ("bf16", 2, "f")


class Counted(Counter):
    """A counter that has ten joules more each time that it is read."""

    def __init__(self):
        super().__init__("rapl", [], [])
        self.reads = 0

    def read(self):
        self.reads += 1
        return 10.0 * self.reads


def test_an_engine_in_this_process_runs_plans_itself(make):
    test, plans = make(), []
    answered = run([request(at=0, first=1)])
    engine = SimpleNamespace(run=lambda plan, on_progress: plans.append(plan) or answered)
    test.target = replace(test.target, in_process=engine)
    plan = test.plan(1)
    assert test.send(plan) is answered
    assert plans == [plan]


def test_joules_around_each_load_are_in_its_point(make, monkeypatch):
    def run_plan(plan, key, on_progress):
        for half_seconds in range(1, 301):
            on_progress(Progress(
                elapsed=half_seconds / 2 + 0.01, completed=0, failed=0, in_flight=0, tokens_per_s=0, cpu=0, slip_ms=0
            ))  # fmt: skip
        probe = request(at=0, first=1, tokens=2, probe=True)
        return run([request(at=0, first=1, tokens=18), probe, request(at=0, first=1, tokens=9, error="status 500")])

    monkeypatch.setattr(load_test, "run_plan", run_plan)
    clock = iter((100.0, 102.0))
    monkeypatch.setattr(load_test, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    test, told = make(), []
    test.meter, test.on_progress, test.probes = Meter(Counted(), idle=5.0), told.append, [Probe("", 2, "x")]
    plan = test.plan(2)
    point = point_of(test, "curve", plan, test.send(plan))
    assert test.meter.counter.reads == 2 + 2, "at the ends, and after one and two of 2.5 minutes"
    assert (point.energy.source, point.energy.joules, point.energy.seconds) == ("rapl", 30.0, 2.0)
    assert (point.energy.idle_joules, point.energy.joules_per_token) == (10.0, 1.0)
    assert len(told) == 300
    test.meter = None
    assert point_of(test, "curve", plan, run([request(at=0, first=1)])).energy is None


def test_counters_are_of_what_computes_on_this_machine(monkeypatch):
    monkeypatch.setattr(load_test, "find_meter", lambda of, seconds: of)
    targets = {
        "roofline:m": "cpu", "roofline:m --backend gpu": "gpu", "roofline:m --backend simulated": None,
        "http://localhost:80": "any", "http://[::1]/v1": "any", "serve --port {port}": "any",
        "http://10.0.0.1/v1": None,
    }  # fmt: skip
    assert {target: load_test._meter(Settings(target)) for target in targets} == targets
    assert load_test._meter(Settings("http://127.0.0.1", model_here="m")) == "cpu"
    assert load_test._meter(Settings("http://127.0.0.1", model_here="m", chip="MI210")) == "any"


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ("r.jsonl", "Aborted! The 2 points measured by then are in {}."),
        (None, "Aborted! The 2 points measured by then are in the output alone: there was no --out."),
    ],
)
def test_after_ctrl_c_it_is_told_where_points_are(make, monkeypatch, tmp_path, capsys, results, told):
    runs = [run([request(at=0, first=1)]), run([request(at=0, first=1)])]
    runs[1].head = msgspec.structs.replace(runs[1].head, interrupted=True)
    monkeypatch.setattr(load_test, "run_plan", lambda plan, key, on_progress, left=iter(runs): next(left))
    out = results and tmp_path / results
    test = make(results=out)
    with pytest.raises(KeyboardInterrupt) as abort:
        tell_points(test, (measure(test, "curve", test.plan(1)) for _ in range(3)), as_json=True)
    assert str(abort.value) == told.format(out)
    lines = capsys.readouterr().out.splitlines()
    flags = [json.loads(line)["validity"]["flags"] for line in lines]
    assert ["interrupted" in each for each in flags] == [False, True]
    assert out is None or out.read_text().splitlines() == lines


def test_answers_without_a_text_are_none(make, monkeypatch):
    empty = request(at=0, first=1)
    empty.chunks = []
    monkeypatch.setattr(load_test, "run_plan", lambda plan, key, on_progress: run([empty]))
    test = make()
    with pytest.raises(ConfigError, match="no request was answered; none was sent in time, or answers had no text"):
        tell_points(test, (measure(test, "curve", test.plan(1)) for _ in range(1)), as_json=True)


@pytest.mark.parametrize(
    ("good", "bad", "overload", "status"),
    [
        ([20, 20], [0, 2], False, None),  # 5 %
        ([20, 1], [0, 19], False, "19 of 40 requests were not answered, more than 10%; the last one that failed: no"),
        ([20, 1], [0, 19], True, None),  # a sweep goes on until the server fails
        ([1], [19], True, "19 of 20 requests were not answered"),
    ],
)
def test_many_requests_without_an_answer_are_an_error(make, monkeypatch, good, bad, overload, status):
    runs = iter(
        run([*[request(at=0, first=1)] * answered, *[request(at=0, first=1, error="no", chunks=[])] * failed])
        for answered, failed in zip(good, bad, strict=True)
    )
    monkeypatch.setattr(load_test, "run_plan", lambda plan, key, on_progress: next(runs))
    test = make()
    with nullcontext() if status is None else pytest.raises(ConfigError, match=status):
        points = (measure(test, "curve", test.plan(1)) for _ in good)
        tell_points(test, points, as_json=True, overload=overload)


def test_answers_without_a_text_among_others_are_an_error_too(make, monkeypatch):
    requests = [*[request(at=0, first=1)] * 5, *[request(at=0, first=1, chunks=[])] * 5]
    monkeypatch.setattr(load_test, "run_plan", lambda plan, key, on_progress: run(requests))
    test = make()
    with pytest.raises(ConfigError, match=r"5 of 10 requests were not answered.*their answers had no text"):
        tell_points(test, (measure(test, "curve", test.plan(1)) for _ in range(1)), as_json=True)


def test_the_limit_of_a_load_is_known_before_where_its_size_is(make, limits):
    test = make(limits=limits)
    single, many = (test.most_tokens_per_s(test.plan(8, concurrency=workers)) for workers in (1, 8))
    assert 0 < single < many
    guessing = make(limits=limits, tokens_per_step=2.0)
    assert guessing.most_tokens_per_s(test.plan(8)) > single
    assert test.most_tokens_per_s(test.plan(8, arrivals="poisson")) is None
    assert make(stop="natural", limits=limits).most_tokens_per_s(test.plan(8)) is None
    assert make().most_tokens_per_s(test.plan(8)) is None
