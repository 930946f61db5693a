"""The simulated backend: times against rates computed op by op, through the real engine and the real loader."""

import time

import numpy as np
import pytest

from roofline import bundle
from roofline.backends.base import Executable
from roofline.backends.fit import split_on_host, split_on_product
from roofline.backends.prices import PriceTable, StepPrices
from roofline.backends.simulated.backend import roofs_of
from roofline.backends.simulated.calibration import Calibration, fitted
from roofline.backends.simulated.clock import VirtualClock
from roofline.backends.simulated.step_times import LinkTraffic, SimulatedStepTimes
from roofline.bench.plan.plan import shape_of
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.schedule.sequence import noise_seed
from roofline.hardware.chips.products import sheet_roofs, titled
from roofline.ops.batch import Batch, BatchLimits, Segment
from roofline.program.ir import Program
from roofline.program.passes.price import amount as amount_of
from roofline.program.passes.price import mixture, price, seconds, step_work, work_of
from roofline.program.rates import ProgramSpeeds

SHEET = sheet_roofs(titled("MI300X"))
LIMITS = BatchLimits(tokens=512, segments=64, rows=64, pages=4096)


def program_of(model: str, devices: int = 1) -> Program:
    return split_on_product(*shape_of(model, ""), titled("MI300X"), devices).parts[0].program


LLAMA = program_of("llama-3.2-1b")


def filled(segments: list[tuple[int, int]], rows: int) -> Batch:
    """A batch of (first position, tokens) segments, the last `rows` of which give logits."""
    batch = Batch(LIMITS)
    parts = [Segment([7] * n, first, list(range(-(-(first + n) // 16)))) for first, n in segments]
    ends = np.cumsum([n for _, n in segments]) - 1
    batch.fill(parts, ends[len(ends) - rows :].tolist())
    return batch


MODELS = ("llama-3.2-1b", "gemma-2-2b", "mixtral-8x7b")
STEPS = [
    ([(100, 1)], 1),
    ([(4000, 1), (17, 1), (5, 200), (0, 64)], 3),
]
MORE_STEPS = [  # parts of the last one above
    ([(31, 1)] * 60, 60),
    ([(0, 300)], 1),
]


@pytest.mark.parametrize(
    ("model", "segments", "rows"),
    [
        *((model, *step) for model in MODELS for step in STEPS),
        *(pytest.param(model, *step, marks=pytest.mark.slow) for model in MODELS for step in MORE_STEPS),
    ],
)
def test_a_step_takes_the_sum_over_its_ops(model: str, segments: list[tuple[int, int]], rows: int) -> None:
    program = program_of(model)
    assert SHEET is not None
    batch, priced = filled(segments, rows), price(program)
    work = step_work(batch.tokens, rows, segments, priced.windows, mixture(program))
    assert work_of(batch, priced.windows).windowed == work.windowed
    parts = [(instr, amount_of(cost, work.of(instr))) for instr, cost in priced.instrs]
    least = sum(seconds(instr, spent, SHEET, priced.weight_bytes) for instr, spent in parts)
    took, cost = SimulatedStepTimes([program], SHEET, Calibration()).of(batch)
    assert took == pytest.approx(least, rel=1e-6)
    assert cost.limit_seconds == pytest.approx(least, rel=1e-6)
    halved, _ = SimulatedStepTimes([program], SHEET, Calibration(reads=0.5, arithmetic=0.5, step_seconds=1.0)).of(batch)
    assert halved == pytest.approx(2 * least + 1, rel=1e-6)
    twice, _ = SimulatedStepTimes([program, program], SHEET, Calibration()).of(batch)
    assert twice == pytest.approx(2 * least, rel=1e-6)


def test_decode_and_prefill_take_what_rates_say() -> None:
    assert SHEET is not None
    speeds, times = ProgramSpeeds(LLAMA, SHEET), SimulatedStepTimes([LLAMA], SHEET, Calibration())
    assert times.of(filled([(255, 1)] * 8, 8))[0] == pytest.approx(speeds.decode(8, 256).seconds, rel=1e-9)
    assert times.of(filled([(0, 512)], 1))[0] == pytest.approx(speeds.prefill(512).seconds, rel=1e-9)


def test_reads_and_arithmetic_have_shares_of_their_own() -> None:
    assert SHEET is not None
    decode, prefill = filled([(255, 1)], 1), filled([(0, 512)], 1)
    plain = [SimulatedStepTimes([LLAMA], SHEET, Calibration()).of(batch)[0] for batch in (decode, prefill)]
    slow_reads = [
        SimulatedStepTimes([LLAMA], SHEET, Calibration(reads=0.1)).of(batch)[0] for batch in (decode, prefill)
    ]
    assert slow_reads[0] == pytest.approx(10 * plain[0])
    assert slow_reads[1] < 3 * plain[1]


def test_what_devices_exchange_takes_time() -> None:
    assert SHEET is not None
    shared = program_of("llama-3.2-1b", 4)
    links, batch = LinkTraffic.of(shared), filled([(0, 100)], 1)
    assert links.exchanges > 16
    assert LinkTraffic.of(LLAMA) == LinkTraffic((0, 0, 0), 0)
    alone, _ = SimulatedStepTimes([shared], SHEET, Calibration()).of(batch)
    waits, _ = SimulatedStepTimes([shared], SHEET, Calibration(link_seconds=1e-3)).of(batch)
    assert waits == pytest.approx(alone + 1e-3 * links.exchanges)
    received = links.received[0] + 100 * links.received[1] + links.received[2]
    moves, _ = SimulatedStepTimes([shared], SHEET, Calibration(), 1e9).of(batch)
    assert moves == pytest.approx(alone + received / 1e9)


def test_a_step_is_priced_in_well_under_fifty_microseconds() -> None:
    assert SHEET is not None
    times = SimulatedStepTimes([LLAMA], SHEET, Calibration(reads=0.6))
    for batch in (filled([(255, 1)] * 64, 64), filled([(255, 1)] * 60 + [(0, 400)], 61)):

        def run(batch: Batch = batch) -> float:
            started = time.thread_time()
            for _ in range(200):
                times.of(batch)
            return (time.thread_time() - started) / 200

        assert min(run() for _ in range(5)) < 50e-6


def test_sizes_of_mixed_steps_are_those_of_one_segment_after_the_other() -> None:
    rng = np.random.default_rng(0)
    program = program_of("gemma-2-2b")
    prices = StepPrices(PriceTable.of(program), None, 0)
    windows = price(program).windows
    assert len(windows) == 2
    for _ in range(50):
        segments = [(int(rng.integers(0, 9000)), int(rng.integers(1, 60))) for _ in range(rng.integers(1, 6))]
        batch = filled(segments, 1)
        work = work_of(batch, windows)
        sizes = {0: (work.context, work.pairs), **work.windowed}
        assert prices.of(batch).work[3:] == tuple(count for window in windows for count in sizes[window])


def load(**options: object) -> bundle.LoadedModel:
    keywords = {"backend": "simulated", "device": "mi300x", "weights": "random:1:BF16", "text": False} | options
    return bundle.load("preset:llama-3.2-1b", **keywords)  # type: ignore[arg-type]


def answers(executable: Executable, count: int, **params: object) -> dict[str, list[int]]:
    engine = LocalEngine(executable, EngineConfig(prefix_cache=False))
    ids: dict[str, list[int]] = {}
    for seed in range(count):
        base = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "seed": seed}
        ids[engine.submit(range(5, 105), SamplingParams(**{**base, **params}))] = []  # type: ignore[arg-type]
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            ids[event.request_id] += event.ids
    return ids


def test_the_real_engine_runs_on_its_clock() -> None:
    executable = load().executable
    started = executable.clock.now()
    ids = list(answers(executable, 3).values())
    speeds = ProgramSpeeds(LLAMA, roofs_of("MI300X"))
    starts = [100 + int(np.uint64(noise_seed(seed, list(range(5, 105)))).astype(np.int64)) for seed in range(3)]
    assert ids == [[5 + (start + at) % (128256 - 5) for at in range(8)] for start in starts]
    took = executable.clock.now() - started
    assert 7 * speeds.decode(3, 101).seconds < took < speeds.prefill(300).seconds + 7.1 * speeds.decode(3, 108).seconds


def test_as_many_pages_as_fit_the_device() -> None:
    needs = split_on_product(*shape_of("llama-3.2-1b", ""), titled("T4")).parts[0].needs
    loaded = load(device="T4", max_batch_tokens=2048, max_running=256)
    assert loaded.executable.num_pages == (16 * 2**30 - needs.weights - needs.workspace) // (16 * needs.token)
    assert load(device="T4", cache_tokens=1000).executable.num_pages == 63
    with pytest.raises(CapacityError, match="larger device"):
        load(device="T4", cache_tokens=10_000_000)


@pytest.mark.parametrize(
    ("option", "value", "match"), [("device", "L40", "L40S"), ("device", "Apple M1", "arithmetic")]
)
def test_devices_that_cannot_be_simulated(option: str, value: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(**{option: value})


def test_what_is_not_computed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="adapters of a simulated model"):
        load(max_adapters=2)
    with pytest.raises(UnsupportedError, match="ranks"):
        load(tensor_parallel=2)
    executable = load().executable
    with pytest.raises(UnsupportedError, match="nothing is computed"):
        executable.logits()
    with pytest.raises(UnsupportedError, match="log-probabilities of a simulated model"):
        answers(executable, 1, logprobs=2)


def test_this_machine_needs_its_roofs(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="roofline doctor"):
        load(device="auto")


def test_time_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance(2.0)
    clock.reach(1.0)
    assert clock.now() == 2.0
    clock.reach(3.0)
    assert clock.now() == 3.0
    with pytest.raises(AssertionError):
        clock.advance(-1.0)


def test_a_calibration_has_the_shares_that_steps_reached() -> None:
    rng, true = np.random.default_rng(1), {1: 0.6, 8: 0.3, 64: 0.4, 512: 0.5}
    steps = [(float(rng.uniform(1e-3, 1e-2)), tokens) for tokens in true for _ in range(9)]
    took = [limit / true[tokens] for limit, tokens in steps]
    disturbed = [value * (3.0 if at % 9 in (2, 5) else 1.0) for at, value in enumerate(took)]
    calibration = fitted(steps, disturbed, "here")
    for tokens, share in true.items():
        assert calibration.share_at(tokens) == pytest.approx(share)
        assert calibration.seconds(0.5, 0.5, 1, tokens) == pytest.approx(1 / share)
    assert 0.3 < calibration.share_at(3) < 0.6
    assert calibration.share_at(5000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "match"),
    [({"reads": 0.0}, "reads=0"), ({"step_seconds": -1.0}, "step_seconds"), ({"link_seconds": float("nan")}, "link_")],
)
def test_calibrations_that_mean_nothing(values: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Calibration(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="measured steps"):
        fitted([], [], "")


def test_a_cpu_s_socket_is_one_part() -> None:
    shape = shape_of("smollm2-135m", "")
    product = titled("EPYC 9654").with_memory(64)
    assert split_on_product(*shape, product, 1).parts[0].program.body == split_on_host(*shape).parts[0].program.body
    with pytest.raises(UnsupportedError, match="2 sockets"):
        split_on_product(*shape, product, 2)
