"""The workloads are the peers' to the id; the figures follow from what was timed and counted."""

import pytest

from roofline.bench import workloads
from roofline.bench.adjacent_roofs import AdjacentRoofs, Roof
from roofline.bench.engine import REPEATS, SERVE_REPEATS, Bench, Repeat, Watched, best_of, report, row_record
from roofline.common.errors import ConfigError, RooflineError
from roofline.engine.events import Event
from roofline.engine.stats import EngineStats
from roofline.hardware.roofs import TRIES, Roofs

KEYS = [
    "prefill_128_tok_s", "prefill_512_tok_s", "prefill_2000_tok_s", "decode_ctx8_tok_s", "decode_ctx1024_tok_s",
    "serve_1x128+64_out_tok_s", "serve_8x128+64_out_tok_s", "serve_64x128+64_out_tok_s", "serve_32x700+40_out_tok_s",
]  # fmt: skip


def test_ids_are_the_same_everywhere():
    """The first ids are fixed for good: published figures of other engines were taken with them."""
    assert workloads.token_ids(3) == [17136, 2895, 18544]
    state, expected = 7919 + 12345, []
    for _ in range(4):
        state = (state * 1103515245 + 12345) % 2147483648
        expected.append(5 + state % 29995)
    assert workloads.token_ids(4, seed=1) == expected
    assert all(5 <= token < 300 for token in workloads.token_ids(1000, 2, 300))


def test_keys_are_the_peers():
    assert list(workloads.WORKLOADS) == KEYS


def test_rows_are_chosen_by_parts_of_their_names():
    assert workloads.chosen(None, serve=True) == KEYS
    assert workloads.chosen(None, serve=False) == KEYS[:5]
    assert workloads.chosen(["decode", "prefill_128"], serve=False) == [KEYS[0], KEYS[3], KEYS[4]]
    assert workloads.chosen(["nothing"], serve=True) == []


def repeat(seconds, **counted):
    return Repeat(seconds, EngineStats(**counted))


def roofs(scale=1.0):
    return Roofs(3e12 * scale, 1e12 * scale, 5e11 * scale, ((1000, 1e11 * scale),))


def test_report():
    runs = [
        repeat(2.0, weight_bytes=6e10, kv_bytes=2e10, flops=3e12, steps=7),
        repeat(1.0, weight_bytes=6e10, kv_bytes=2e10, flops=3e12, steps=7),
    ]
    row = row_record(KEYS[1], runs, Roof(1000, roofs(0.5), roofs(), limit_seconds=0.85))
    assert (row["gb_s"], row["gop_s"], row["steps"], row["bytes_per_token"]) == (80.0, 3000.0, 7, 156250000)
    assert (row["share_of_roof"], row["read_share"], row["read_roof_gb_s"]) == (0.85, 0.8, 100.0)
    assert (row["roofs"]["before"]["int8_ops"], row["roofs"]["after"]["int8_ops"]) == (1.5e12, 3e12)
    assert row["seconds"] == [2.0, 1.0]
    assert row["tok_s"] == [256.0, 512.0]
    record = report({KEYS[1]: row}, {"engine": "roofline", "load_s": 0.4})
    assert list(record) == ["engine", "load_s", KEYS[1], "rows"]
    assert record[KEYS[1]] == 512.0
    assert best_of(runs) is runs[1]


class TimedChip:
    """Steps take `work` operations at the int8 roof; the roofs are measured as `scales`."""

    weight_bytes, page_bytes = 900, 50

    def __init__(self, scales):
        self.scales, self.asked = iter(scales), []

    def measure_roofs(self, reads):
        self.asked.append(reads)
        return roofs(next(self.scales))

    def limit_seconds(self, works, best, working_set):
        assert working_set == 1000
        return sum(work[0] for work in works) / best.int8_ops


@pytest.mark.parametrize(("scales", "limit"), [([1, 0.5], 0.8), ([0.5, 1], 0.8), ([0.5, 0.6, 0.7, 1], 0.8)])
def test_the_higher_roof_counts(scales, limit):
    """Whether a neighbour hid the roof before or after; and one that seems broken is measured again."""
    beside = AdjacentRoofs(TimedChip(scales), tokens=17)
    roof = beside.roof(1.0, [(1.2e12,), (1.2e12,)])
    assert roof.limit_seconds == pytest.approx(limit)
    assert roof.best.int8_ops == 3e12


def test_more_than_the_roof_raises_it_to_what_was_reached():
    chip = TimedChip([1.0] * 9)
    roof = AdjacentRoofs(chip, tokens=17).roof(1.0, [(3.6e12,)])
    assert chip.asked == [(1000,)] * (2 + TRIES)
    assert roof.best.correction == pytest.approx(1.2)
    row = roof.record(1.0, 1e15)  # bytes that no memory moves in a second
    assert (row["share_of_roof"], row["read_share"]) == (1.0, 1.0)
    assert row["correction"].startswith("roofs raised by 20% to what was reached")


def test_a_share_within_the_clocks_error_is_all_of_the_roof():
    roof = AdjacentRoofs(TimedChip([1.0] * 2), tokens=17).roof(1.0, [(3.03e12,)])
    assert roof.record(1.0, 1.0)["share_of_roof"] == 1.0
    assert roof.record(1.0, 1.0)["correction"] == ""


def test_tokens_counted():
    assert [workloads.WORKLOADS[key].tokens for key in KEYS] == [128, 512, 2000, 64, 64, 64, 512, 4096, 1280]
    assert [workloads.WORKLOADS[key].tokens_held for key in KEYS] == [64, 256, 1000, 40, 1056, 160, 1280, 10240, 23040]


class StepEngine:
    """Gives every open request one id a step, the first after one step of prompt."""

    under_way = False

    def __init__(self):
        self.open: list[list] = []
        self.submitted: list[tuple[int, int]] = []
        self.counted = EngineStats()

    @property
    def has_work(self):
        return bool(self.open)

    def submit(self, ids, params):
        assert params.ignore_eos
        assert params.temperature == 0
        self.submitted.append((len(ids), params.max_tokens))
        self.open.append([True, params.max_tokens])

    def step(self):
        events = []
        for request in self.open:
            if request[0]:
                request[0] = False
                continue
            request[1] -= 1
            self.counted.decode_tokens += 1
            events.append(Event("r", 0, [1], finish_reason=None if request[1] else "length"))
        self.open = [request for request in self.open if request[1]]
        return events

    def stats(self):
        return EngineStats(decode_tokens=self.counted.decode_tokens)


def stepped_bench():
    bench = Bench.__new__(Bench)
    bench.engine, bench.vocab, bench.watched = StepEngine(), 300, Watched(None)
    return bench


def test_workloads_submit_what_they_say():
    bench = stepped_bench()
    assert bench.decode(8, 64).stats.decode_tokens == 64  # the first token is the prompt's
    assert bench.engine.submitted == [(8, 65)]
    bench.engine.submitted.clear()
    assert bench.generate(3, 20, 5).stats.decode_tokens == 15
    assert bench.engine.submitted == [(20, 5)] * 3
    bench.engine.submitted.clear()
    bench.warm_up()
    assert [len(bench.run(key)) for key in (KEYS[0], KEYS[5])] == [REPEATS, SERVE_REPEATS]
    assert bench.engine.submitted == [(32, 1), *[(128, 1)] * 3, *[(128, 64)] * 2]


def test_several_prompts_of_a_decode_fit_into_one_step(executable):
    """Else the clock would begin with the first token while the others' prompts are computed."""
    bench = Bench(executable, 64)
    assert bench.decode(30, 2, 2).stats.decode_tokens == 4
    with pytest.raises(ConfigError, match="3 prompts of 30 tokens are more than the 64 of a step"):
        bench.decode(30, 2, 3)


def test_a_failed_answer_ends_the_bench():
    bench = stepped_bench()
    bench.engine.step = lambda: [Event("r", 0, [], finish_reason="error", error="broken kernel")]
    with pytest.raises(RooflineError, match="broken kernel"):
        bench.generate(1, 5, 5)


def test_the_sizes_of_the_steps_timed_are_kept(executable):
    """Priced again at the roofs they were priced at, they take as long; at twice the roofs, half."""
    bench = Bench(executable)
    bench.warm_up()
    done = bench.decode(8, 5)
    assert len(done.works) == done.stats.steps == 5
    assert [work[1] for work in done.works] == [1] * 5
    known = roofs()
    once = executable.limit_seconds(done.works, known, 1000)
    assert once > 0
    assert executable.limit_seconds(done.works, roofs(2.0), 1000) == pytest.approx(once / 2)
    assert executable.limit_seconds(done.works[:2], known, 1000) < once


@pytest.fixture(scope="module")
def executable():
    """A small random model on the CPU backend."""
    from concurrent.futures import Future

    from roofline.backends.capacity import Capacity
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.models import registry
    from roofline.models.config import ModelConfig
    from roofline.ops.batch import BatchLimits
    from roofline.program import target
    from roofline.program.compile import compile_program
    from roofline.weights.random_weights import random_checkpoint

    shape = {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 128, "vocab": 300}
    rope = {"rope_theta": 10000.0, "rope_scaling": None, "rope_style": "half", "max_position": 256}
    rest = {"norm_eps": 1e-5, "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None}
    source = random_checkpoint({"family": "llama", **shape, **rope, **rest}, seed=1, form="Q4_0")
    identity: Future[str] = Future()
    identity.set_result("test")
    config = ModelConfig.of(source.config)
    made = CpuExecutable.from_program(
        compile_program(registry.get("llama"), config, source.tensors, target.CPU),
        source,
        Capacity(BatchLimits(tokens=512, segments=4, rows=4, pages=64), max_context=256, num_pages=16),
        weights_hash=identity,
        isa="portable",
        threads=1,
    )
    yield made
    made.close()
