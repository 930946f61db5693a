"""What a request asks of sampling, what ends it, and what a failing backend may take with it."""

import numpy as np
import pytest
from engine_fakes import FakeExecutable

from roofline.backends.base import StepCost
from roofline.common.errors import RequestError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.schedule.rows import History


def collect(engine):
    ids, last = {}, {}
    while engine.has_work:
        for event in engine.step():
            ids.setdefault((event.request_id, event.index), []).extend(event.ids)
            if event.finish_reason:
                last[event.request_id, event.index] = event
    return ids, last


def generate(prompt, eos_ids=(), executable=None, **params):
    engine = LocalEngine(executable or FakeExecutable())
    engine.submit(prompt, SamplingParams(**params), eos_ids=eos_ids, request_id="a")
    ids, last = collect(engine)
    return ids["a", 0], last["a", 0]


PLAIN, _ = generate([1, 2, 3], temperature=0, max_tokens=40)


def test_eos_ends_and_can_be_ignored():
    eos = PLAIN[5]
    ids, last = generate([1, 2, 3], [eos], temperature=0, max_tokens=40)
    assert ids == PLAIN[: PLAIN.index(eos) + 1]
    assert (last.finish_reason, last.stop_id) == ("stop", eos)
    ids, last = generate([1, 2, 3], [eos], temperature=0, max_tokens=40, ignore_eos=True)
    assert (ids, last.finish_reason, last.stop_id) == (PLAIN, "length", None)
    ids, last = generate([1, 2, 3], [eos], temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[eos])
    assert ids[-1] == eos
    assert last.finish_reason == "stop"


def test_min_tokens_bans_what_would_end_the_answer():
    eos = PLAIN[2]
    ids, last = generate([1, 2, 3], [eos], temperature=0, max_tokens=40, min_tokens=10, logit_bias={eos: 90.0})
    assert eos not in ids[:10]
    assert ids[10] == eos, "the ban is lifted at once: the bias takes over"
    assert len(ids) == 11
    assert last.finish_reason == "stop"


def test_a_seed_is_drawn_reported_and_reproduces():
    ids, last = generate([1, 2, 3], temperature=1.0, max_tokens=30)
    again, _ = generate([1, 2, 3], temperature=1.0, max_tokens=30, seed=last.usage.seed)
    other, other_last = generate([1, 2, 3], temperature=1.0, max_tokens=30)
    assert ids == again
    assert other_last.usage.seed != last.usage.seed
    assert ids != other


def test_negative_seeds_are_64_bit_patterns():
    assert generate([1], seed=-1, max_tokens=20)[0] == generate([1], seed=2**64 - 1, max_tokens=20)[0]


def test_penalties_act_on_the_ids_of_the_answer():
    ids, _ = generate([1, 2, 3], temperature=0, max_tokens=40, presence_penalty=2.0, frequency_penalty=2.0)
    assert len(set(ids)) > len(set(PLAIN))


def test_the_repetition_penalty_acts_on_the_prompt_too():
    pairs = ([p, q] for p in range(50) for q in range(50))
    prompt, first = next(
        (pair, ids[0]) for pair in pairs if (ids := generate(pair, temperature=0, max_tokens=1)[0])[0] in pair
    )
    assert first in prompt
    assert generate(prompt, temperature=0, max_tokens=1, presence_penalty=2.0)[0] == [first], "presence: answers only"
    assert generate(prompt, temperature=0, max_tokens=1, repetition_penalty=1000.0)[0] != [first]


def test_history_counts_prompt_ids_as_zero_and_grows():
    history = History([5, 5, 7])
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {5: 0, 7: 0}
    for token in [5, *range(100, 150), 100]:
        history.add(token)
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {5: 1, 7: 0, 100: 2} | dict.fromkeys(range(101, 150), 1)


def test_logprobs_are_those_of_the_raw_logits():
    engine = LocalEngine(FakeExecutable())
    engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=3, logprobs=4), request_id="a")
    engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=3), request_id="b")
    while engine.has_work:
        for event in engine.step():
            if event.request_id == "b":
                assert event.logprobs is None
                continue
            (entry,) = event.logprobs
            assert entry.id == event.ids[0] == entry.top[0][0], "greedy takes the most likely"
            assert entry.logprob == pytest.approx(entry.top[0][1])
            assert len(entry.top) == 4
            assert sorted((p for _, p in entry.top), reverse=True) == [p for _, p in entry.top]


def test_a_failing_forward_ends_its_step_only():
    executable = FakeExecutable()
    engine = LocalEngine(executable, EngineConfig(max_running=2))
    for name in "abc":
        engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=40), request_id=name)
    executable.fail_at = {4}
    ids, last = collect(engine)
    assert [last[name, 0].finish_reason for name in "abc"] == ["error", "error", "length"]
    assert "told to fail" in last["a", 0].error
    assert ids["a", 0] == PLAIN[:3]
    assert ids["c", 0] == PLAIN
    assert engine.state.cache.used == 0
    assert engine.stats().finished == {"error": 2, "length": 1}


def test_a_failing_sampler_is_contained():
    executable = FakeExecutable()
    engine = LocalEngine(executable)
    executable.fail_sample = True
    engine.submit([1, 2, 3], SamplingParams(), request_id="a")
    _, last = collect(engine)
    assert last["a", 0].error == "ValueError: the toy cannot sample"
    executable.fail_sample = False
    engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=40), request_id="b")
    assert collect(engine)[0]["b", 0] == PLAIN


def test_one_bad_row_ends_one_request_and_its_pages_are_not_reused():
    executable = FakeExecutable()
    executable.bad_rows = {9}
    engine = LocalEngine(executable)
    engine.submit([9] * 40, SamplingParams(max_tokens=4), request_id="bad")
    engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=40), request_id="good")
    ids, last = collect(engine)
    assert last["bad", 0].finish_reason == "error"
    assert ids["bad", 0] == []
    assert ids["good", 0] == PLAIN
    executable.bad_rows = set()
    engine.submit([9] * 40, SamplingParams(max_tokens=4), request_id="again")
    _, last = collect(engine)
    assert last["again", 0].usage.cached_tokens == 0


def test_an_abort_frees_at_once_and_is_told_once():
    engine = LocalEngine(FakeExecutable())
    engine.submit([1] * 40, SamplingParams(n=2, max_tokens=40), request_id="a")
    for _ in range(4):
        engine.step()
    engine.abort("a", index=0)
    assert [s.index for s in engine.state.running] == [1]
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    assert engine.state.cache.used == 0
    assert engine.has_work
    events = engine.step()
    assert [(e.index, e.finish_reason) for e in events] == [(0, "abort"), (1, "abort")]
    assert not engine.has_work


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    engine = LocalEngine(FakeExecutable())
    engine.submit([1], SamplingParams(max_tokens=1), request_id="a")
    with pytest.raises(RequestError, match="in use"):
        engine.submit([1], SamplingParams(max_tokens=1), request_id="a")
    collect(engine)
    engine.submit([1], SamplingParams(max_tokens=1), request_id="a")


def test_numpy_ids_are_taken():
    assert generate(np.array([1, 2, 3], np.int64), temperature=0, max_tokens=40)[0] == PLAIN


class TickingClock:
    """A simulated backend's clock: only `forward` advances it."""

    time = 0.0

    def now(self):
        return self.time


def test_the_figures_come_from_the_executables_clock_and_prices():
    executable = FakeExecutable(tokens=64)
    executable.clock = TickingClock()

    def tick(_):
        executable.clock.time += 0.5

    executable.before_forward = tick
    executable.step_cost = lambda: StepCost(flops=2.0, weight_bytes=3.0, kv_bytes=4.0, limit_seconds=0.2)
    engine = LocalEngine(executable)
    engine.submit([1] * 100, SamplingParams(max_tokens=11), request_id="a")
    collect(engine)
    stats = engine.stats()
    assert stats.steps == 12, "64 + 36 prompt tokens, then ten decodes"
    assert (stats.prefill_tokens, stats.prefill_tokens_per_second) == (100, 100.0)
    assert (stats.decode_tokens, stats.decode_tokens_per_second) == (10, 2.0)
    assert stats.generated_tokens == 11
    assert stats.share_of_roof == pytest.approx(0.4)
    assert (stats.flops, stats.weight_bytes, stats.kv_bytes) == (24.0, 36.0, 48.0)
    engine.submit([1] * 5, SamplingParams(max_tokens=1))
    collect(engine)
    later = engine.stats().since(stats)
    assert (later.steps, later.prefill_tokens, later.decode_tokens) == (1, 5, 0)
    engine.close()
    assert executable.closed


def test_without_roofs_or_prices_there_is_no_share():
    executable = FakeExecutable()
    executable.step_cost = lambda: StepCost(1.0, 1.0, 1.0, None)
    engine = LocalEngine(executable)
    engine.submit([1], SamplingParams(max_tokens=2))
    collect(engine)
    assert engine.stats().share_of_roof is None
    assert engine.stats().flops == 2.0
