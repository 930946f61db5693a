"""What a request asks of sampling, what ends it, and what a failing backend may take with it."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_fakes import FakeExecutable, QueueingFake

from roofline.backends.base import StepCost
from roofline.common.errors import RequestError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.schedule.continuous import FAILED
from roofline.engine.schedule.rows import History
from roofline.engine.schedule.sequence import noise_seed
from roofline.engine.stats import COMPARED_SECONDS, STEP_EDGES, EngineStats, StatsMeter, total


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


def test_a_fresh_seed_is_exact_in_any_reader_of_json():
    engine = LocalEngine(FakeExecutable())
    for _ in range(64):
        engine.submit([1], SamplingParams(max_tokens=1))
    seeds = [request.seed for request in engine._requests.values()]
    assert 2**52 <= max(seeds) < 2**53


def test_prompts_that_share_a_seed_do_not_share_their_noise():
    """One prompt has the same noise alone and in a list; by the seed alone all prompts have the same."""
    prompts = [[n, 2, 3] for n in range(1, 9)]

    def answers(asked, **options):
        engine, ids = LocalEngine(FakeExecutable()), {}
        for number, prompt in enumerate(asked):
            params = SamplingParams(temperature=1e6, seed=42, max_tokens=3)
            engine.submit(prompt, params, request_id=str(number), **options)
        while engine.has_work:
            for event in engine.step():
                ids.setdefault(event.request_id, []).extend(event.ids)
        return [ids[str(number)] for number in range(len(asked))]

    together = answers(prompts)
    assert len({tuple(ids) for ids in together}) == len(prompts)
    assert [answers([prompt])[0] for prompt in prompts] == together
    assert len({tuple(ids) for ids in answers(prompts, common_noise=True)}) == 1


@pytest.mark.parametrize(
    ("seed", "prompt", "noise"),
    [(0, [5], 0x9A4032D243E48E1C), (-1, [5, 6, 7], 0xB6B4117B49D1F177), (2**64 - 1, [5, 6, 7], 0xB6B4117B49D1F177)],
)
def test_the_number_that_noise_is_drawn_by_is_written_down(seed, prompt, noise):
    """It stands in receipts and in a library of another language, so it must not change unnoticed."""
    assert noise_seed(seed, prompt) == noise


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


def test_a_forward_that_fails_once_costs_nobody_anything():
    executable = FakeExecutable()
    engine = LocalEngine(executable, EngineConfig(max_running=2))
    for name in "abc":
        engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=40), request_id=name)
    executable.fail_at = {4}
    ids, last = collect(engine)
    assert [last[name, 0].finish_reason for name in "abc"] == ["length"] * 3
    assert [ids[name, 0] for name in "abc"] == [PLAIN] * 3
    assert engine.state.cache.used == 0


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


class SteppingClock(TickingClock):
    """Steps take the seconds that a test says, one after the other."""

    def __init__(self, executable, seconds):
        executable.clock, self.seconds = self, list(seconds)
        executable.before_forward = self.tick

    def tick(self, _):
        self.time += self.seconds.pop(0)


@pytest.mark.parametrize("kind", [FakeExecutable, QueueingFake])
def test_an_answer_is_timed_from_the_queue_to_its_last_id(kind):
    """b waits for a's end, then its prompt takes two steps and two more ids come; times by the executable's clock."""
    executable = kind(tokens=64)
    clock = SteppingClock(executable, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    engine = LocalEngine(executable, EngineConfig(max_running=1, prefix_cache=False, overlap=False))
    engine.submit([1], SamplingParams(max_tokens=2), request_id="a")
    clock.time = 10.0
    engine.submit([1] * 100, SamplingParams(max_tokens=3), request_id="b")
    _, last = collect(engine)
    assert last["a", 0].usage[4:] == (10.0, 1.0, 2.0)
    assert last["b", 0].usage[4:] == (3.0, 4.0 + 8.0, 16.0 + 32.0)


def test_what_was_never_scheduled_or_had_no_id_has_no_times_of_that():
    executable = FakeExecutable(tokens=64)
    clock = SteppingClock(executable, [1.0])
    engine = LocalEngine(executable, EngineConfig(max_running=1))
    for name in "ab":
        engine.submit([1] * 100, SamplingParams(max_tokens=3), request_id=name)
    clock.time = 7.0
    engine.step()
    engine.abort_all()
    usages = {event.request_id: event.usage[4:] for event in engine.step()}
    assert usages == {"a": (7.0, None, None), "b": (None, None, None)}


def test_a_preempted_answer_keeps_its_times():
    """Of three sequences that outgrow eight pages the youngest loses its pages and is computed again."""
    executable = FakeExecutable(num_pages=8)
    clock = SteppingClock(executable, [1.0] * 1000)
    engine = LocalEngine(executable, EngineConfig(prefix_cache=False))
    for name in "abc":
        engine.submit([1] * 30, SamplingParams(max_tokens=40, temperature=0), request_id=name)
    _, last = collect(engine)
    assert engine.stats().preemptions > 0
    queue, prefill, decode = last["c", 0].usage[4:]
    assert (queue, prefill) == (0.0, 2.0), "30 of its tokens did not fit the first step beside the others' 60"
    assert decode > last["a", 0].usage.decode_seconds == 39.0
    assert queue + prefill + decode <= clock.time


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [FakeExecutable, QueueingFake])
def test_a_request_that_wants_it_is_told_of_each_part_of_its_prompt(kind, overlap):
    executable = kind(tokens=64)
    SteppingClock(executable, [1.0] * 50)
    engine = LocalEngine(executable, EngineConfig(overlap=overlap))
    wants = SamplingParams(max_tokens=3, temperature=0, prompt_progress=True)
    told = []

    def run(name, params):
        engine.submit([5] * 150, params, request_id=name)
        while engine.has_work:
            told.extend((event.request_id, event.progress, len(event.ids)) for event in engine.step())

    run("a", wants)
    assert [(name, tokens) for name, _, tokens in told] == [("a", 0)] * 3 + [("a", 1)] * 3
    assert [progress[:3] for _, progress, _ in told[:3]] == [(150, 0, 64), (150, 0, 128), (150, 0, 150)]
    seconds = [progress.seconds for _, progress, _ in told[:3]]
    assert seconds == sorted(set(seconds))
    assert seconds[0] == (2.0 if kind is QueueingFake and overlap else 1.0)
    assert all(progress is None for _, progress, _ in told[3:])
    told.clear()
    run("b", wants)
    assert [progress[:3] for _, progress, _ in told if progress] == [(150, 144, 150)], "nine pages were there"
    told.clear()
    run("c", SamplingParams(max_tokens=3))
    assert all(progress is None for _, progress, _ in told)


def test_an_answer_that_another_engine_began_has_no_times():
    engine = LocalEngine(FakeExecutable())
    params = SamplingParams(temperature=0, max_tokens=4, seed=1, n=2)
    engine.submit([1, 2, 3], params, {0: PLAIN[:2], 1: []}, request_id="a")
    ids, last = collect(engine)
    assert ids["a", 0] == PLAIN[2:4]
    assert last["a", 0].usage[4:] == (None, None, None)
    assert None not in last["a", 1].usage[4:], "of this one nothing had been made"


def test_steps_are_counted_by_the_tokens_they_compute():
    engine = LocalEngine(FakeExecutable(tokens=64))
    engine.submit([1] * 100, SamplingParams(max_tokens=3), request_id="a")
    collect(engine)
    stats = engine.stats()
    sizes = dict(zip((*STEP_EDGES, None), stats.step_sizes, strict=True))
    assert {edge: count for edge, count in sizes.items() if count} == {1: 2, 64: 2}, "64, 36, 1 and 1 tokens"
    assert stats.step_tokens == 102
    first = engine.stats()
    engine.submit([1] * 5, SamplingParams(max_tokens=1), request_id="b")
    collect(engine)
    assert engine.stats().since(first).step_sizes == [0, 1, *[0] * 12]


def test_without_roofs_or_prices_there_is_no_share():
    executable = FakeExecutable()
    executable.step_cost = lambda: StepCost(1.0, 1.0, 1.0, None)
    engine = LocalEngine(executable)
    engine.submit([1], SamplingParams(max_tokens=2))
    collect(engine)
    assert engine.stats().share_of_roof is None
    assert engine.stats().flops == 2.0


def test_roofs_that_were_measured_too_low_are_raised_to_what_steps_reached():
    """Measured while the machine was busy, roofs said that a step takes 64 times as long as it then did."""
    meter, plan = StatsMeter(4, 16), SimpleNamespace(drafted=0, decode_only=True, tokens=1)
    slow, fast = 0.5 * COMPARED_SECONDS, 0.25 * COMPARED_SECONDS
    meter.step(plan, [0], [1], fast, 0.0, StepCost(1, 1, 1, 64 * fast))
    assert meter.totals.share_of_roof == 1.0  # too short a time to tell by how much
    assert meter.totals.correction == 1.0
    for _ in range(3):
        meter.step(plan, [0], [1], fast, 0.0, StepCost(1, 1, 1, 64 * fast))
    assert meter.totals.correction == pytest.approx(64)
    assert meter.totals.share_of_roof == pytest.approx(1)
    before = replace(meter.totals)
    for _ in range(4):
        meter.step(plan, [0], [1], slow, 0.0, StepCost(1, 1, 1, 32 * slow))
    assert meter.totals.since(before).share_of_roof == pytest.approx(0.5)
    assert total([before, EngineStats()]).correction == pytest.approx(64)


def test_what_several_engines_count_adds_up_and_what_is_between_two_readings_is_the_difference():
    fresh = asdict(EngineStats())
    empty = [0] * (len(STEP_EDGES) + 1)
    assert fresh == dict.fromkeys(fresh, 0) | {
        "correction": 1.0,
        "finished": {},
        "step_sizes": empty,
        "expert_rows": [],
    }
    lists = {"finished": {"stop": 2, "length": 1}, "step_sizes": [3, *empty[1:]], "expert_rows": [5, 1]}
    numbers = {name: 2**i for i, name in enumerate(fresh)} | lists
    first, second = (
        EngineStats(**numbers),
        EngineStats(**numbers | {"finished": {"stop": 1, "abort": 4}, "expert_rows": [7, 2, 3]}),
    )
    twice = {name: 2 * value for name, value in numbers.items() if name not in lists}
    of_one_model = {name: numbers[name] for name in ("page_bytes", "state_slot_bytes", "correction")}
    sums = {"finished": {"stop": 3, "length": 1, "abort": 4}, "step_sizes": [6, *empty[1:]]}
    assert asdict(total([first, second])) == twice | of_one_model | sums | {"expert_rows": [12, 3, 3]}
    now = {"running", "waiting", "pages_used", "pages_total", "page_bytes", "finished", "correction"}
    now |= {"state_slots", "state_slots_used", "state_slot_bytes"}
    assert asdict(second.since(first)) == fresh | {name: getattr(second, name) for name in now} | {
        "expert_rows": [2, 1, 3]
    }


def test_rates_of_what_was_not_measured_are_none_or_nothing():
    stats = EngineStats(decode_tokens=3, mixed_tokens=2, prefill_tokens=8)
    assert (stats.generated_tokens, stats.decode_tokens_per_second, stats.prefill_tokens_per_second) == (5, 0.0, 0.0)
    assert (stats.share_of_roof, stats.acceptance) == (None, None)
    stats = EngineStats(decode_tokens=3, decode_seconds=2.0, prefill_tokens=8, prefill_seconds=0.5, draft_tokens=4)
    assert (stats.decode_tokens_per_second, stats.prefill_tokens_per_second, stats.acceptance) == (1.5, 16.0, 0.0)
    assert stats.speeds == "prefill: 16.0 tok/s, decode: 1.5 tok/s"
    assert EngineStats(priced_seconds=8.0, limit_seconds=6.0, correction=1.5).share_of_roof == 0.5
    assert EngineStats(priced_seconds=2.0, limit_seconds=6.0).share_of_roof == 1.0


def test_a_meter_counts_each_kind_of_step():
    meter = StatsMeter(8, 1024)
    decode = SimpleNamespace(drafted=6, decode_only=True, tokens=9)
    meter.step(decode, [4, 0, 2], [3, 1, 1], 0.5, 0.1, None)
    totals = meter.totals
    assert (totals.pages_total, totals.page_bytes, totals.steps) == (8, 1024, 1)
    assert (totals.drafts, totals.draft_tokens, totals.accepted_tokens) == (2, 6, 2)
    assert (totals.decode_tokens, totals.decode_seconds, totals.decode_python_seconds) == (5, 0.5, 0.1)
    mixed = SimpleNamespace(drafted=0, decode_only=False, tokens=42, decodes=3, repeated=2)
    meter.step(mixed, [0] * 4, [1] * 4, 2.0, 0.25, StepCost(1.0, 2.0, 3.0, None))
    assert (totals.steps, totals.prefill_tokens, totals.prefill_seconds, totals.mixed_tokens) == (2, 37, 2.0, 4)
    assert (totals.python_seconds, totals.decode_python_seconds, totals.decode_tokens) == (0.35, 0.1, 5)
    assert (totals.flops, totals.weight_bytes, totals.kv_bytes, totals.priced_seconds) == (1.0, 2.0, 3.0, 0.0)
    assert (totals.step_tokens, sum(totals.step_sizes)) == (51, 2)
    meter.step(decode, [2], [0], 0.5, 0.0, None)  # the sequence failed: none of its draft counts
    assert totals.accepted_tokens == 2
    for reason in ("stop", "stop", "abort"):
        meter.ended(reason)
    assert totals.finished == {"stop": 2, "abort": 1}


@pytest.mark.parametrize(("seconds", "correction"), [(0.1999, 1.0), (0.2, 4.0)])
def test_steps_of_a_fifth_of_a_second_are_compared_with_the_roofs(seconds, correction):
    meter, plan = StatsMeter(4, 16), SimpleNamespace(drafted=0, decode_only=True, tokens=1)
    meter.step(plan, [0], [1], seconds, 0.0, StepCost(1, 1, 1, 4 * seconds))
    assert meter.totals.correction == pytest.approx(correction)


def test_the_host_is_at_work_outside_the_backends_calls_alone():
    """Each reading of the clock takes a second: a call of the backend, as the rest of a step, lasts as many."""

    class Counting:
        time = 0.0

        def now(self):
            self.time += 1.0
            return self.time

    executable = FakeExecutable()
    executable.clock = Counting()
    engine = LocalEngine(executable)
    engine.submit([1, 2], SamplingParams(max_tokens=3))
    engine.step()
    stats = engine.stats()
    # started, planned, called, returned, end of the launch; landed, now.
    assert (stats.prefill_seconds, stats.python_seconds) == (6.0, 4.0)
    engine.step()
    assert engine.stats().decode_seconds == 6.0


def test_a_closed_engine_has_aborted_its_requests_and_freed_their_pages():
    class Closed(FakeExecutable):
        """Knows how many pages were in use when it was closed."""

        def close(self):
            self.pages_at_close = engine.stats().pages_used

    executable = Closed()
    engine = LocalEngine(executable)
    for name in ("a", "b"):
        engine.submit([1, 2, 3], SamplingParams(max_tokens=40), request_id=name)
    engine.step()
    assert engine.stats().pages_used > 0
    engine.close()
    assert executable.pages_at_close == 0
    assert {(event.request_id, event.finish_reason) for event in engine.step()} == {("a", "abort"), ("b", "abort")}


def test_ids_at_both_ends_of_the_vocabulary_are_ids_beside_one_that_is_none():
    executable = FakeExecutable()
    last = executable.vocab_size - 1
    check = LocalEngine(executable)._stepper._checked
    assert check(SimpleNamespace(ids=np.array([0, last]))) == [0, last]
    failed = check(SimpleNamespace(ids=np.array([0, last + 1, last, -1])))
    assert failed == [0, FAILED, last, FAILED]
    assert check(None) == []
