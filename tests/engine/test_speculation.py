"""Drafts, right or wrong, change no id, leak no page, and stop where they lose time."""

import random

import pytest
from engine_fakes import FakeExecutable, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.speculation.speculator import REFRESH, RETRY, SOON, SURE, SequenceRecord, Speculator, StepTimes
from tests.engine.test_scheduling import ABORTS, FAILURES, REQUESTS, Watched, alone, check_answers_amid_aborts


class Planted:
    """A drafter that knows the answers: each drafted token is right with probability `right`, else some other id."""

    free = settled = True

    def __init__(self, answers, right=1.0, seed=0, vocab=50):
        self.answers, self.right, self.vocab = answers, right, vocab
        self.random = random.Random(seed)
        self.running = []

    def draft(self, sequences, counts):
        for sequence, count in zip(sequences, counts, strict=True):
            answer = self.answers[sequence.request.id, sequence.index]
            true = answer[sequence.generated : sequence.generated + count]
            sequence.draft = [
                t if self.random.random() < self.right else self.random.randrange(self.vocab) for t in true
            ]

    def keep(self, running):
        self.running = list(running)

    def close(self):
        pass


def plant(engine, drafter, tokens=4, adaptive=False):
    engine._speculator = engine._stepper.speculator = Speculator(drafter, tokens, engine.executable.clock, adaptive)


CONFIGS = st.builds(
    EngineConfig,
    max_batch_tokens=st.sampled_from([1, 3, 16, 17, 64]),
    max_running=st.integers(1, 6),
    prefix_cache=st.booleans(),
    max_model_len=st.just(84),
    cache=st.sampled_from(["paged", "paged", "naive"]),
    scheduler=st.sampled_from(["continuous", "continuous", "naive"]),
)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    num_pages=st.integers(6, 20),
    rows=st.integers(16, 40),
    late=st.integers(0, 8),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    tokens=st.integers(1, 15),
    adaptive=st.booleans(),
)
def test_outputs_do_not_depend_on_drafts(requests, config, num_pages, rows, late, right, tokens, adaptive):
    reference = alone(requests)
    watched = Watched(config, num_pages=num_pages, rows=rows)
    keys = {(str(i), k): reference[str(i), k] for i, (_, params) in enumerate(requests) for k in range(params.n)}
    plant(watched.engine, Planted(keys, right), tokens, adaptive)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
        if i >= late:
            watched.step()
    assert watched.run() == reference
    assert not watched.engine._speculator.drafter.running


@settings(max_examples=25, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    num_pages=st.integers(6, 20),
    aborts=ABORTS,
    failures=FAILURES,
    right=st.sampled_from([0.5, 1.0]),
)
def test_aborts_and_failing_steps_amid_drafts(requests, config, num_pages, aborts, failures, right):
    reference = alone(requests)
    watched = Watched(config, num_pages=num_pages, rows=64)
    watched.executable.fail_at = failures
    plant(watched.engine, Planted(reference, right))
    check_answers_amid_aborts(watched, requests, aborts, reference)


def run(config=None, executable=None, drafter=None, adaptive=False, tokens=4, prompt=(1, 2, 3), **params):
    """Events of one request."""
    engine = LocalEngine(executable or FakeExecutable(rows=64), config)
    if drafter is not None:
        plant(engine, drafter, tokens, adaptive)
    engine.submit(prompt, SamplingParams(**params), request_id="a")
    events = []
    while engine.has_work:
        events += engine.step()
    assert engine.state.cache.used == 0
    return events, engine


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.4, "top_p": 0.9},
        {"temperature": 0.9, "seed": 5, "min_tokens": 20, "stop_token_ids": (3, 4, 5, 6), "logit_bias": {3: 4.0}},
        {"temperature": 0.7, "seed": 1, "top_k": 9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("right", [0.6, 1.0])
def test_ids_and_logprobs_are_equal_under_all_parameters(params, right):
    def flat(events):
        ids = [token for e in events for token in e.ids]
        return ids, [entry for e in events for entry in e.logprobs], events[-1].finish_reason, events[-1].stop_id

    plain, _ = run(max_tokens=40, logprobs=3, **params)
    answers = {("a", 0): flat(plain)[0]}
    guessed, engine = run(max_tokens=40, logprobs=3, drafter=Planted(answers, right), **params)
    assert flat(guessed) == flat(plain)
    assert engine.stats().accepted_tokens > 0
    assert len(guessed) < len(plain)


def test_right_drafts_save_steps_and_are_counted():
    plain, _ = run(temperature=0, max_tokens=41)
    answers = {("a", 0): [token for e in plain for token in e.ids]}
    events, engine = run(temperature=0, max_tokens=41, drafter=Planted(answers))
    stats = engine.stats()
    assert [len(e.ids) for e in events] == [1, *[5] * 8]
    assert (stats.steps, stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (9, 8, 32, 32)
    assert (stats.generated_tokens, stats.decode_tokens, stats.acceptance) == (41, 40, 1.0)
    assert engine.executable.tokens_computed == 3 + 40


def test_pages_of_wrong_drafts_are_given_back_and_never_found():
    """Fifteen drafted tokens need a second page; when they are wrong it is free after the step."""
    executable = FakeExecutable(rows=64)
    engine = LocalEngine(executable)
    wrong = Planted({("a", 0): [49] * 99}, right=1.0)
    plant(engine, wrong, tokens=15)
    engine.submit([1] * 8, SamplingParams(temperature=0, max_tokens=60), request_id="a")
    engine.step()
    held = []
    executable.before_forward = lambda _: held.append(engine.state.cache.used)
    engine.step()
    assert held == [2]
    assert engine.state.cache.used == 1
    while engine.has_work:
        engine.step()
        check_pages(engine.state.cache, [s.pages for s in engine.state.running])
    assert engine.stats().accepted_tokens < 10
    again = LocalEngine(FakeExecutable(rows=64))
    again.submit([1] * 8, SamplingParams(temperature=0, max_tokens=60), request_id="a")
    ids = []
    while again.has_work:
        ids += [token for e in again.step() for token in e.ids]
    assert set(engine.state.cache._page_of) == set(again.state.cache._page_of), (
        "only pages of what was committed can be found"
    )


def test_a_row_that_fails_within_a_draft_ends_the_answer_where_it_would_have_ended():
    plain, _ = run(temperature=0, max_tokens=40)
    answers = {("a", 0): [token for e in plain for token in e.ids]}
    bad = FakeExecutable(rows=64)
    bad.bad_positions = {3 + 8}
    events, _ = run(temperature=0, max_tokens=40, executable=bad, drafter=Planted(answers))
    assert [token for e in events for token in e.ids] == answers["a", 0][:8]
    assert [e.finish_reason for e in events][-2:] == [None, "error"]
    assert events[-1].ids == []


def test_drafts_take_only_what_a_step_has_left():
    """Rows for 16 sequences and no more: four running ones can draft twelve tokens together."""
    requests = [([i] * 9, SamplingParams(temperature=0, max_tokens=30)) for i in range(4)]
    reference = alone(requests)
    watched = Watched(EngineConfig(), rows=16)
    plant(watched.engine, Planted(reference), tokens=15)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
    drafted = []
    while watched.engine.has_work:
        watched.step()
        drafted += [watched.plan.drafted] if watched.plan.decodes == 4 else []
    assert watched.outputs == reference
    assert max(drafted) == 12


def test_steps_with_prompt_tokens_verify_nothing():
    requests = [([i] * 30, SamplingParams(temperature=0, max_tokens=20)) for i in range(4)]
    reference = alone(requests)
    watched = Watched(EngineConfig(max_batch_tokens=16), rows=64)
    plant(watched.engine, Planted(reference))
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
        for _ in range(3):
            watched.step()
            assert watched.plan.decode_only or not watched.plan.drafted
    assert watched.run() == reference
    assert watched.engine.stats().accepted_tokens > 20


def test_ngram_repeats_what_the_text_repeats():
    """Whatever the toy answers, biasing every id towards one makes it repeat itself."""
    bias = {7: 90.0}
    events, engine = run(
        EngineConfig(speculate="ngram", speculate_always=True), temperature=0, max_tokens=40, logit_bias=bias
    )
    assert [token for e in events for token in e.ids] == [7] * 40
    stats = engine.stats()
    assert stats.accepted_tokens > 25
    assert stats.steps < 15


class Clock:
    """Advanced by each forward: a plain step takes 1, each further token `price`."""

    def __init__(self, executable, price):
        self.time, self.price = 0.0, price
        executable.clock, executable.before_forward = self, self.tick

    def now(self):
        return self.time

    def tick(self, executable):
        self.time += 1.0 + self.price * (executable.batch.tokens - executable.batch.segments)


def timed(price, right, max_tokens=300, drafter=None):
    executable = FakeExecutable(rows=64)
    plain, _ = run(temperature=0, max_tokens=max_tokens)
    answers = {("a", 0): [token for e in plain for token in e.ids]}
    clock = Clock(executable, price)
    drafter = drafter or Planted(answers, right)
    drafter.answers = answers
    events, engine = run(temperature=0, max_tokens=max_tokens, executable=executable, drafter=drafter, adaptive=True)
    assert [token for e in events for token in e.ids] == answers["a", 0]
    return clock.time, engine.stats()


class AlwaysWrong(Planted):
    def __init__(self, free):
        super().__init__({})
        self.free, self.made = free, 0

    def draft(self, sequences, counts):
        super().draft(sequences, counts)
        self.made += len(sequences)
        for sequence in sequences:
            sequence.draft = [(token + 1) % 50 for token in sequence.draft]


@pytest.mark.parametrize("free", [True, False])
def test_a_drafter_that_is_always_wrong_is_switched_off(free):
    drafter = AlwaysWrong(free)
    seconds, stats = timed(0.15, 0.0, drafter=drafter)
    assert seconds < 1.03 * (300 + 2 * 0.15), "three percent of the plain time, at most"
    assert 0 < stats.drafts < 30
    assert stats.drafts_held > 250
    if not free:
        assert drafter.made == stats.drafts, "what costs something is not made while it is off"


def test_what_wins_stays_on_and_what_costs_too_much_stays_off():
    seconds, stats = timed(0.15, 0.95)
    assert seconds < 0.5 * 300
    assert stats.acceptance > 0.7
    seconds, stats = timed(1.2, 0.95)
    assert seconds < 1.05 * 300
    assert stats.drafts < 15


def test_drafts_come_back_when_the_text_begins_to_repeat():
    class Later(Planted):
        def draft(self, sequences, counts):
            super().draft(sequences, counts)
            for sequence in sequences:
                if sequence.generated < 150:
                    sequence.draft = [(token + 1) % 50 for token in sequence.draft]

    seconds, stats = timed(0.15, 1.0, drafter=Later({}))
    assert seconds < 150 * 1.06 + 150 * 0.6
    assert stats.accepted_tokens > 80


def test_prices_come_from_measured_steps():
    times = StepTimes()
    assert times.price(3) is None, "a plain step comes first"
    times.add(3, 0, 7.0)
    assert times.price(3) is None, "one behind its like: the first finds the caches cold"
    for seconds in (1.0, 1.0, 9.0):
        times.add(3, 0, seconds)
    assert times.price(3) == pytest.approx(0.12)
    for seconds in (1.8, 30.0, 1.8):  # one busy moment
        times.add(3, 4, seconds)
    assert times.price(3) == pytest.approx(0.2)
    assert times.price(2) is None
    times.doubt(3)
    assert times.price(3) == pytest.approx(0.12)
    for _ in range(REFRESH):
        times.add(3, 4, 1.8)
    assert times.price(3) is None, "the plain step's time is refreshed"
    times.add(3, 0, 7.0)
    assert times.price(3) is None
    times.add(3, 0, 1.0)
    assert times.price(3) == pytest.approx(0.2)
    times.other()
    times.add(3, 0, 7.0)
    assert times.price(3) == pytest.approx(0.2), "nor does one behind a step with prompt tokens count"
    assert RETRY < REFRESH


def test_a_high_price_wants_several_plain_steps_and_new_ones_soon():
    times = StepTimes()
    times.add(1, 0, 1.0)
    for count in range(SURE):
        assert times.price(1) is None or count == 1, "unknown, then a guess, then too dear to believe"
        times.add(1, 0, 1.0)
        times.add(1, 4, 4.2)
        times.add(1, 0, 1.0)
    assert times.price(1) == pytest.approx(0.8)
    for _ in range(SOON):
        times.add(1, 4, 4.2)
    assert times.price(1) is None


def test_a_price_that_nothing_pays_is_doubted_rarely_whatever_the_sequence():
    """Fresh sequences do not each try again what no acceptance would make pay."""
    drafts = []
    executable = FakeExecutable(rows=64)
    clock = Clock(executable, 1.2)
    speculator = Speculator(Planted({}, 1.0), 4, clock)
    for _ in range(3):
        speculator._times.add(1, 0, 1.0)
    speculator._times.add(1, 4, 5.8)
    for _ in range(SURE):
        speculator._times.add(1, 0, 1.0)
    for number in range(40):

        class Fresh:
            speculation = SequenceRecord()

        for _ in range(20):
            ((_, count),) = speculator._chosen([(Fresh, 4)], 1)
            if count:
                drafts.append(number)
                speculator._times.add(1, count, 1.0 + 1.2 * count)
                for _ in range(2):
                    speculator._times.add(1, 0, 1.0)
    assert 2 <= len(drafts) <= 4, "after 64, 128, 256, 512 steps"
    assert speculator.drafts_held > 750


@pytest.mark.parametrize(
    ("field", "value"),
    [("speculate", "yes"), ("speculate_tokens", 0), ("speculate_tokens", 16), ("speculate_tokens", 2.5)],
)
def test_settings_are_checked(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})
