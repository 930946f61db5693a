"""The grid: what a cell's figures follow from, in which order rungs run, and the limits they stand against."""

import pytest

from roofline.bench.latency import grid as latency
from roofline.bench.latency.cells import Cell, CellTimes, grid, measure, row, run, spread
from roofline.bench.latency.grid import LatencyPlan, smaller
from roofline.bench.latency.ladder import rungs
from roofline.bench.latency.limits import LatencyLimits, Speed, Speeds, WorkLimit
from roofline.bench.latency.runners import Opened
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.presets import preset

MI210 = Speed(181e12, 1638e9, "data sheet")


class FakeRunner:
    """Takes 100 ms for a prompt and 10 ms for a step, ten times that at first; writes down what it was asked."""

    def __init__(self, name, calls, fails=()):
        self.name, self.calls, self.fails, self.scale = name, calls, fails, 10.0

    def prefill(self, batch, length):
        if (batch, length) in self.fails:
            raise UnsupportedError("this shape", "it is too large")
        self.calls.append((self.name, "prefill", batch, length))
        return 0.1 * self.scale

    def decode(self, batch, context, steps):
        self.calls.append((self.name, "decode", batch, context, steps))
        seconds, self.scale = 0.01 * steps * self.scale, 1.0
        return seconds

    def notes(self):
        return {"from": self.name}


def opened(calls, **fails):
    return Opened({name: FakeRunner(name, calls, fails.get(name, ())) for name in ("eager", "flash")})


def test_the_grid_is_the_published_one():
    cells = grid((1, 8, 16), 2048)
    assert [cell.name for cell in cells] == [
        "prefill 2048 x 1", "prefill 2048 x 8", "prefill 2048 x 16",
        "decode 1+32 x 1", "decode 1+32 x 8", "decode 1+32 x 16",
    ]  # fmt: skip
    most = LatencyPlan(cells, tuple(rungs()), 3).most
    assert (most.batch, most.tokens, most.length, most.started) == (16, 16 * 2049, 2049, 16)


@pytest.mark.parametrize("given", [((), 8), ((0,), 8), ((1, 1), 8), ((1,), 1), ((1,), 8, 1)])
def test_what_is_no_grid_is_refused(given):
    with pytest.raises(ConfigError):
        grid(*given)


def test_latency_is_ttft_and_tpot_of_the_further_tokens():
    times = run(FakeRunner("eager", calls := []), Cell(8, 1, 32))
    assert calls == [("eager", "prefill", 8, 1), ("eager", "decode", 8, 1, 31)]
    assert times.ttft == pytest.approx(1.0)
    assert times.tpot == pytest.approx(0.1)
    assert times.latency == pytest.approx(1.0 + 31 * 0.1)
    assert run(FakeRunner("eager", []), Cell(8, 64, 1)).latency == pytest.approx(1.0)


def test_rungs_take_turns_and_the_first_call_is_kept_apart():
    calls = []
    runs, failed = measure(opened(calls), Cell(1, 1, 5), 2, lambda text: None)
    assert not failed
    assert [len(times) for times in runs.values()] == [3, 3]
    assert runs["eager"][0].latency == pytest.approx(10 * runs["eager"][1].latency)
    order = [call[0] for call in calls if call[1] == "decode"]
    assert order == ["eager", "eager", "flash", "flash", "eager", "flash", "flash", "eager"]


def test_a_rung_that_fails_leaves_the_others():
    runs, failed = measure(opened([], eager=[(8, 64)]), Cell(8, 64, 1), 1, lambda text: None)
    assert list(runs) == ["flash"]
    assert failed == {"eager": "this shape is not supported: it is too large."}


def test_a_rung_that_fails_later_leaves_the_others_too():
    held = opened([])
    calls = iter(range(10))
    first = held.runners["eager"].prefill

    def prefill(batch, length):
        if next(calls) == 3:  # in the second round
            raise UnsupportedError("this shape", "the memory is full")
        return first(batch, length)

    held.runners["eager"].prefill = prefill
    runs, failed = measure(held, Cell(8, 64, 1), 3, lambda text: None)
    assert {name: len(times) for name, times in runs.items()} == {"flash": 4}
    assert "memory is full" in failed["eager"]


def times(*seconds, tpot=None, new=1):
    return [CellTimes(each, tpot, new) for each in seconds]


def test_a_row_has_medians_spreads_and_shares():
    kept = row(Cell(1, 64, 1), times(9.0, 1.0, 4.0, 2.0), times(20.0, 4.0, 4.0, 4.0), WorkLimit(0.5, "compute", 1, 1))
    assert kept["first_s"] == 9.0
    assert kept["latency"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert kept["speedup"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert kept["share"] == 0.25
    assert kept["tpot"] is None
    decode = row(Cell(1, 1, 5), times(9.0, 1.0, 1.0, tpot=0.5, new=5), None, WorkLimit(1.0, "bandwidth", 1, 1))
    assert decode["share"] == 0.5  # of the four steps; the prompt's time is not theirs
    assert decode["latency"]["median"] == 3.0
    assert "speedup" not in decode


def test_more_than_the_limit_is_refused_and_said():
    kept = row(Cell(1, 64, 1), times(1.0, 1.0), None, WorkLimit(1.5, "compute", 1, 1))
    assert kept["share"] is None
    assert "faster than the roofs measured beside it" in kept["no_share"]
    assert row(Cell(1, 64, 1), times(1.0, 1.0), None, WorkLimit(1.01, "compute", 1, 1))["share"] == 1.0


def test_limits_of_the_published_model():
    """Llama 2 7B in 16 bits: 27.6 TFLOP for a prompt of 2,048, 8.07 ms of reads for a token on an MI210."""
    limits = LatencyLimits(preset("llama-2-7b"))
    prefill = limits.step(1, 2048, 0, MI210)
    assert prefill.flops == pytest.approx(27.6e12, rel=2e-3)
    assert prefill.bound == "compute"
    assert prefill.seconds / 0.254 == pytest.approx(0.601, abs=1e-3)  # the published 254 ms
    decode = limits.step(1, 1, 0, MI210)
    assert decode.bound == "bandwidth"
    assert decode.seconds == pytest.approx(8.07e-3, rel=1e-3)
    assert limits.kv_token_bytes == 512 << 10
    steps = limits.steps(16, 1, 31, MI210)
    assert steps.bytes == 31 * limits.work(1, 1, 0)[1] + sum(
        (512 << 10) * (16 * (context + 2) - 2) + 15 * 2 * 4096 for context in range(1, 32)
    )
    assert steps.seconds == pytest.approx(steps.bytes / 1638e9)


def test_limits_see_windows_and_grouped_heads():
    base = preset("llama-3-8b")
    assert LatencyLimits(base).kv_token_bytes == 128 << 10
    windowed = LatencyLimits(base | {"sliding_window": 64})
    flops, moved = windowed.work(1, 1, 1000)
    full_flops, full_moved = LatencyLimits(base).work(1, 1, 1000)
    assert full_flops - flops == 4 * 32 * 32 * 128 * (1001 - 64)
    assert full_moved - moved == (128 << 10) * (1001 - 64)


def test_the_higher_roof_counts(monkeypatch):
    found = iter([Speed(2.0, 5.0, "one"), Speed(3.0, 4.0, "two")])
    monkeypatch.setattr("roofline.bench.latency.limits._measure", lambda *asked: next(found))
    assert Speeds("cpu", 1000).best() == Speed(3.0, 5.0, "two")


def test_torch_measures_where_our_loops_are_not_built(monkeypatch):
    pytest.importorskip("torch")
    from roofline.backends.gpu.measure import roofs

    small = roofs.measure_roofs("cpu", copy_bytes=1 << 22, sides=(64, 128, 8192), seconds=0.001)
    assert small.side in (64, 128)
    assert small.copied == 1 << 23
    assert small.flops > 1e7
    assert small.bytes_per_s > 1e7
    monkeypatch.setattr(roofs, "measure_roofs", lambda device: small)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    speed = Speeds("cpu", 1000).best()
    assert (speed.flops, speed.source) == (small.flops, f"torch: a bf16 product of side {small.side}, a copy")


def test_a_cpu_says_what_it_runs_instead():
    subject = latency.subject_of(None, None, latency.DEFAULTS["cpu"])
    assert subject.config["layers"] == 4
    assert "smollm2-135m cut to 4 layers instead of llama-2-7b and prompts of 256" in smaller(subject, None, "cpu")
    assert smaller(None, None, "cpu") == "on a CPU: prompts of 256 instead of 2,048 tokens"
    assert smaller(None, 2048, "cpu") == smaller(subject, None, "cuda") == ""


def test_a_shape_has_a_name_or_a_folder_and_may_be_cut(tmp_path):
    default = latency.DEFAULTS["cpu"]
    whole = latency.subject_of("llama-2-7b", None, default)
    assert (whole.source, whole.name, whole.cut) == ("preset:llama-2-7b", "llama-2-7b", False)
    assert whole.config == preset("llama-2-7b")
    assert latency.subject_of("llama-2-7b", 32, default) == whole
    assert latency.subject_of("llama-2-7b", 3, default).name == "llama-2-7b cut to 3 layers"
    assert latency.subject_of(None, 30, default).name == "smollm2-135m"
    with pytest.raises(ConfigError, match="has 32 layers, not 33"):
        latency.subject_of("llama-2-7b", 33, default)
    with pytest.raises(ConfigError, match="did you mean 'llama-2-7b'"):
        latency.subject_of("lama-2-7b", None, default)
    with pytest.raises(ConfigError):
        latency.subject_of(str(tmp_path), None, default)


def test_spread():
    assert spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "low": 1.0, "high": 10.0}
