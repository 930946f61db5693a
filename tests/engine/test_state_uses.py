"""Recurrent state under what an engine does beside answers: vectors, scored prompts, turns with guesses, leaks."""

import random
from dataclasses import replace
from functools import partial

import pytest
from engine_fakes import check_pages
from state_fakes import HybridFake, QueueingHybrid, StateWatched

from roofline.bench.profile.profile import fill
from roofline.engine.config import EngineConfig
from roofline.engine.local import SCHEDULERS, LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling
from roofline.engine.schedule.plan import StepPlan
from tests.engine.test_pooling import run as run_pooled
from tests.engine.test_speculation import Planted, plant

TOYS = pytest.mark.parametrize("toy", [HybridFake, QueueingHybrid])


def text(length, first=0):
    return [first, *[(3 * i + i // 5) % 50 for i in range(length - 1)]]


@TOYS
@pytest.mark.parametrize("tokens", [7, 64, 512])
def test_vectors_do_not_depend_on_what_is_found_nor_on_chunks(toy, tokens):
    requests = []
    for number, kind in enumerate(("mean", "last", "first", "last", "mean", "logits")):
        pooling = Pooling(kind, (1, 2) if kind == "logits" else ())
        for length in (64, 100, 130):
            requests.append((text(length, number % 2), SamplingParams(temperature=0, pooling=pooling)))
        requests.append((text(100, number % 2), SamplingParams(seed=1, max_tokens=4)))
    make = partial(toy, max_context=512, num_pages=160, segments=8, state_slots=12)
    engine = LocalEngine(make(tokens=512), EngineConfig(max_batch_tokens=tokens))
    expected = [
        run_pooled(LocalEngine(HybridFake(tokens=512, max_context=512), EngineConfig(overlap=False)), [request])[0]
        for request in requests
    ]
    assert run_pooled(engine, requests) == expected
    assert run_pooled(engine, requests) == expected
    check_pages(engine.state.slots, [])
    assert engine.stats().snapshot_hits > 0


@TOYS
def test_a_prompt_that_is_scored_goes_back_behind_what_it_has_told(toy):
    """A prompt whose beginning is cached is computed all the same, and its answer is that of one that is not scored."""
    watched = StateWatched(EngineConfig(), toy, tokens=64, max_context=512)
    params = {"temperature": 0, "max_tokens": 6}
    for name, scored in (("a", None), ("b", 1), ("c", None)):
        watched.submit(text(150), SamplingParams(prompt_logprobs=scored, **params), request_id=name)
        watched.run()
    assert watched.outputs["a", 0] == watched.outputs["b", 0] == watched.outputs["c", 0]
    assert [watched.ended[name, 0].usage.cached_tokens for name in "abc"] == [0, 0, 128]


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("tokens", [1, 6])
def test_turns_with_guesses_that_cross_multiples_of_64(right, tokens):
    """Whatever was guessed where a snapshot is due, the next turn that finds it goes on from the right ids."""
    params = SamplingParams(temperature=0, max_tokens=90)
    plain = StateWatched(EngineConfig(), rows=64, tokens=64, max_context=1024, num_pages=70)
    guessed = StateWatched(EngineConfig(), rows=64, tokens=64, max_context=1024, num_pages=70)
    ids = text(40)
    for number in range(4):
        if number:
            ids = [*ids, *plain.outputs[str(number - 1), 0], *text(5 + number)]
        plain.submit(ids, params, request_id=str(number))
        plain.run()
        plant(guessed.engine, Planted(plain.outputs, right, seed=number), tokens)
        guessed.submit(ids, params, request_id=str(number))
        guessed.run()
    assert guessed.outputs == plain.outputs
    found = [guessed.ended[str(number), 0].usage.cached_tokens for number in range(4)]
    assert found == [plain.ended[str(number), 0].usage.cached_tokens for number in range(4)]
    assert found == [0, 128, 192, 320]


def test_a_failed_guess_is_repeated_without_the_state_computed_anew():
    """What it reads it has not written, so nothing else is computed."""
    params = SamplingParams(temperature=0, max_tokens=30)
    plain, guessed = (StateWatched(EngineConfig(), rows=64, tokens=64, max_context=512) for _ in range(2))
    plain.submit(text(50), params, request_id="a")
    plant(guessed.engine, Planted(plain.run()), 4)
    guessed.executable.fail_late = {3}
    for name in "ab":
        guessed.submit(text(50), params, request_id=name, salt=name)
        guessed.engine._speculator.drafter.answers["b", 0] = plain.outputs["a", 0]
    assert guessed.run() == {("a", 0): plain.outputs["a", 0], ("b", 0): plain.outputs["a", 0]}
    assert guessed.executable.tokens_computed == 2 * (50 + 29) + 5 + 5


def test_a_spare_slot_that_a_step_under_way_writes_is_not_found():
    """A resumed answer in chunks: when the first has landed, the second has the slot already."""
    config = EngineConfig(max_batch_tokens=64, long_prompt_tokens=0)
    watched = StateWatched(config, QueueingHybrid, tokens=64, max_context=512)
    ids = text(300)
    watched.resume("a", ids[:10], SamplingParams(temperature=0, max_tokens=400), {0: ids[10:]})
    for _ in range(3):
        watched.step()
    watched.engine.abort("a")
    watched.submit(ids, SamplingParams(temperature=0, max_tokens=3), request_id="b")
    watched.run()
    assert watched.ended["b", 0].usage.cached_tokens == 0


@pytest.mark.parametrize("generated", [1, 80])
def test_what_made_logits_no_numbers_is_not_found(generated):
    """Neither the snapshot of the prompt nor that of the answer: they may hold what is no number."""
    params = SamplingParams(temperature=0, max_tokens=100)
    watched = StateWatched(EngineConfig(), tokens=128, max_context=512)
    watched.executable.bad_positions = {100 + generated - 1}
    watched.submit(text(100), params, request_id="a")
    watched.run()
    assert watched.ended["a", 0].finish_reason == "error"
    watched.executable.bad_positions = set()
    good = 64 if generated > 1 else -1  # whose step was one of numbers
    states = watched.executable.states
    states[:] = [state if state is not None and state[1] == good else None for state in states]
    params = SamplingParams(temperature=0, max_tokens=60)
    for name in "bc":
        watched.submit(text(100), params, request_id=name)
        watched.run()
        watched.submit([*text(100), *watched.outputs[name, 0]], params, request_id=f"{name} goes on")
        watched.run()
    found = [watched.ended[name, 0].usage.cached_tokens for name in ("b", "b goes on", "c", "c goes on")]
    assert found == [64 if generated > 1 else 0, 128, 64, 128]


def test_a_part_of_a_plan_has_the_moves_and_repeated_tokens_of_its_sequences():
    engine = LocalEngine(HybridFake(rows=64))
    for number in range(3):
        engine.submit(text(10, number), SamplingParams(temperature=0, max_tokens=30), request_id=str(number))
    engine.step()
    plan = StepPlan()
    for sequence in engine.state.running:
        sequence.computed, sequence.again = sequence.computed - 2, 2
        plan.add_decode(sequence, 3)
    plan.moves = ["first", "second", "third"]
    first, _, third = plan.sequences
    part = plan.part([third, first])
    assert (part.moves, part.repeated, part.tokens, part.decodes, part.rows) == (["first", "third"], 4, 6, 2, 2)
    assert plan.part(plan.sequences) == plan


def test_a_profiled_step_reads_the_state_of_its_own_context():
    executable = HybridFake(max_context=512, tokens=64)

    class Step:
        context, tokens, batch, pages = 70, 2, 3, 5

    fill(executable, Step)
    executable.forward()
    assert executable.batch.segments == 3


@pytest.mark.slow
def test_a_thousand_mixed_requests_leave_nothing_behind():
    draw = random.Random(7)
    watched = StateWatched(EngineConfig(max_running=6), num_pages=80, state_slots=9, tokens=128, max_context=512)
    for number in range(1000):
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=draw.randint(1, 30), n=draw.choice([1, 1, 2]))
        length = draw.randint(1, 180)
        watched.submit(text(length, draw.randrange(4)), params, request_id=str(number), priority=draw.randint(-1, 1))
        for _ in range(draw.randint(0, 6)):
            watched.step()
        if draw.random() < 0.1:
            watched.engine.abort(str(draw.randrange(number + 1)))
    watched.run(100_000)
    assert watched.engine.stats().snapshot_hits > 200


@pytest.mark.parametrize("scheduler", ["continuous", "naive"])
def test_repeated_tokens_that_do_not_fit_a_step_are_computed_without_guesses(scheduler):
    engine = LocalEngine(HybridFake(rows=64), EngineConfig(scheduler=scheduler))
    engine.submit(text(20), SamplingParams(temperature=0, max_tokens=60))
    for _ in range(6):
        engine.step()
    (sequence,) = engine.state.running
    sequence.computed, sequence.again, sequence.draft = sequence.computed - 3, 3, [7]
    engine.state.limits = replace(engine.state.limits, tokens=3)
    plan = SCHEDULERS[scheduler](engine.state)
    assert (plan.counts, plan.decodes, plan.rows, sequence.draft) == ([3], 0, 0, [])
    assert plan.moves[0].move.source == plan.moves[0].move.target


def test_a_snapshot_of_an_answer_that_was_aborted_while_it_was_written_is_not_found():
    watched = StateWatched(EngineConfig(), QueueingHybrid, tokens=256, max_context=512)
    for first, name in enumerate("ab"):
        watched.submit(text(100, first), SamplingParams(temperature=0, max_tokens=5), request_id=name)
    watched.step()
    assert watched.engine.under_way
    watched.engine.abort("a")
    watched.run()
    for first, name in enumerate("cd"):
        watched.submit(text(100, first), SamplingParams(temperature=0, max_tokens=5), request_id=name)
    watched.run()
    assert [watched.ended[name, 0].usage.cached_tokens for name in "cd"] == [0, 64]
