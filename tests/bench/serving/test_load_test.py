"""What all points of a load test share: the requests that are sent, the limit, what is told of each load."""

import pytest

from roofline.bench.load.targets import Target
from roofline.bench.results.limits import ModelLimits
from roofline.bench.results.point import Device, Host
from roofline.bench.serving import load_test
from roofline.bench.serving.load_test import LoadTest, Settings
from roofline.bench.traffic.presets import preset_traffic
from roofline.bundle.shape import open_shape
from roofline.cli.measure.load_options import load_of_plan
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


def test_the_limit_of_a_load_is_known_before_where_its_size_is(make, limits):
    test = make(limits=limits)
    single, many = (test.most_tokens_per_s(test.plan(8, concurrency=workers)) for workers in (1, 8))
    assert 0 < single < many
    guessing = make(limits=limits, tokens_per_step=2.0)
    assert guessing.most_tokens_per_s(test.plan(8)) > single
    assert test.most_tokens_per_s(test.plan(8, arrivals="poisson")) is None
    assert make(stop="natural", limits=limits).most_tokens_per_s(test.plan(8)) is None
    assert make().most_tokens_per_s(test.plan(8)) is None
