"""The workloads are the peers' to the id; the figures follow from what was timed and counted."""

import pytest

from roofline.bench import workloads
from roofline.bench.engine import REPEATS, SERVE_REPEATS, Bench, Repeat, report, tokens_of
from roofline.common.errors import RooflineError
from roofline.engine.events import Event
from roofline.engine.stats import EngineStats

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
    assert workloads.row_names() == KEYS


def test_rows_are_chosen_by_parts_of_their_names():
    assert workloads.chosen(None, serve=True) == KEYS
    assert workloads.chosen(None, serve=False) == KEYS[:5]
    assert workloads.chosen(["decode", "prefill_128"], serve=False) == [KEYS[0], KEYS[3], KEYS[4]]
    assert workloads.chosen(["nothing"], serve=True) == []


def repeat(seconds, **counted):
    return Repeat(seconds, EngineStats(**counted))


def test_report():
    runs = [
        repeat(2.0, limit_seconds=0.8, priced_seconds=1.9, weight_bytes=6e10, kv_bytes=2e10, flops=3e12, steps=7),
        repeat(1.0, limit_seconds=0.8, priced_seconds=0.9, weight_bytes=6e10, kv_bytes=2e10, flops=3e12, steps=7),
    ]
    record = report({KEYS[1]: runs, KEYS[3]: [repeat(0.5)]}, {"engine": "roofline", "load_s": 0.4})
    assert list(record)[:4] == ["engine", "load_s", KEYS[1], KEYS[3]]
    assert record[KEYS[1]] == 512.0
    assert record[KEYS[3]] == 128.0
    row = record["rows"][KEYS[1]]
    assert (row["gb_s"], row["gop_s"], row["share_of_roof"], row["steps"]) == (80.0, 3000.0, 0.8, 7)
    assert row["seconds"] == [2.0, 1.0]
    assert row["tok_s"] == [256.0, 512.0]
    assert record["rows"][KEYS[3]]["share_of_roof"] is None


def test_more_than_the_roof_is_an_error():
    with pytest.raises(RooflineError, match="doctor --measure"):
        report({KEYS[0]: [repeat(1.0, limit_seconds=1.2, priced_seconds=1.0)]}, {})


def test_tokens_counted():
    assert [tokens_of(key) for key in KEYS] == [128, 512, 2000, 64, 64, 64, 512, 4096, 1280]


class StepEngine:
    """Gives every open request one id a step, the first after one step of prompt."""

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


def test_workloads_submit_what_they_say():
    bench = Bench.__new__(Bench)
    bench.engine, bench.vocab = StepEngine(), 300
    assert bench.decode(8, 64).stats.decode_tokens == 64  # the first token is the prompt's
    assert bench.engine.submitted == [(8, 65)]
    bench.engine.submitted.clear()
    assert bench.generate(3, 20, 5).stats.decode_tokens == 15
    assert bench.engine.submitted == [(20, 5)] * 3
    bench.engine.submitted.clear()
    figures = bench.run([KEYS[0], KEYS[5]])
    assert [len(figures[key]) for key in (KEYS[0], KEYS[5])] == [REPEATS, SERVE_REPEATS]
    assert bench.engine.submitted == [(32, 1), *[(128, 1)] * 3, *[(128, 64)] * 2]


def test_a_failed_answer_ends_the_bench():
    bench = Bench.__new__(Bench)
    bench.engine, bench.vocab = StepEngine(), 300
    bench.engine.step = lambda: [Event("r", 0, [], finish_reason="error", error="broken kernel")]
    with pytest.raises(RooflineError, match="broken kernel"):
        bench.generate(1, 5, 5)
