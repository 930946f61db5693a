"""Whatever the schedule, chunking, page count, sharing, pre-emption or aborts: the same ids, and nothing leaks."""

from collections import Counter

import pytest
from engine_fakes import FakeExecutable, QueueingFake, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import CapacityError, RequestError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.schedule.fill import logit_rows, step_ids
from roofline.engine.schedule.rows import RowBuilder
from roofline.ops.batch import PAGE_TOKENS, Batch, Segment

NAIVE = EngineConfig(scheduler="naive", cache="naive")
WHOLE = EngineConfig(long_prompt_tokens=0)  # prompts of any length have whole steps


class Watched:
    """An engine whose every step is checked: buffer and rows equal the naive ones, no page written that is shared."""

    def __init__(self, config, toy=FakeExecutable, **executable):
        self.executable = toy(**executable)
        self.engine = LocalEngine(self.executable, config)
        self.outputs, self.ended, self.arrivals = {}, {}, []
        self.before = {}  # by answer: how many ids it began with
        self.wrong = []  # what a check has said within a step, where the engine takes it for a failure of its own
        self.executable.before_forward = self.note_checks
        stepper = self.engine._stepper
        schedule = stepper.schedule

        def watched_schedule(state):
            before = [s for s in state.running if len(s.ids) < s.end and len(s.ids) - s.computed > 1]
            pending = {s: len(s.ids) - s.computed for s in before}
            passed_over = {s: s.passed_over for s in state.running}
            plan = schedule(state)
            if config.scheduler == "continuous":
                self.check_shares(state, plan, [s for s in before if s.pages], pending, passed_over)
            return plan

        stepper.schedule = watched_schedule
        fill, build = stepper._filler.fill, stepper._rows.build

        def recording_fill(plan):
            self.plan = plan
            fill(plan)

        def recording_build(sequences):
            self.rows = build(sequences)
            return self.rows

        stepper._filler.fill, stepper._rows.build = recording_fill, recording_build

    def check_shares(self, *facts):
        check_shares(*facts)

    def note_checks(self, executable):
        try:
            self.check_step(executable)
        except AssertionError as error:
            self.wrong.append(error)

    def check_step(self, executable):
        plan, batch, state = self.plan, executable.batch, self.engine.state
        expected = Batch(batch.limits)
        moves = [planned.move for planned in plan.moves] or [None] * len(plan.sequences)
        segments = [
            Segment(step_ids(s, count), s.computed, s.pages, state=move)
            for s, count, move in zip(plan.sequences, plan.counts, moves, strict=True)
        ]
        expected.fill(segments, logit_rows(plan))
        tokens, n, rows, pages = expected.header[:4].tolist()
        sizes = {"header": 16, "ids": tokens, "positions": tokens, "adapters": tokens, "seg_start": n + 1}
        sizes |= {"page_start": n + 1, "context_len": n, "pages": pages, "logit_rows": rows}
        sizes |= dict.fromkeys(("state_in", "state_out", "save_at", "save_to"), n if plan.moves else 0)
        for name, size in sizes.items():
            assert getattr(batch, name)[:size].tolist() == getattr(expected, name)[:size].tolist(), name
        fresh = RowBuilder().build(plan.sampled)
        for name, array in vars(fresh).items():
            if array is not None:
                assert getattr(self.rows, name).tolist() == array.tolist(), name
        assert plan.tokens <= state.limits.tokens
        assert plan.table_pages <= state.limits.table_pages
        tables = [s.pages for s in state.running]
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            written = sequence.pages[
                sequence.computed // PAGE_TOKENS : (sequence.computed + count - 1) // PAGE_TOKENS + 1
            ]
            for page in written:
                assert sum(table.count(page) for table in tables) == 1, "a page is written while shared"

    def submit(self, ids, params, **kw):
        self.arrivals.append(self.engine.submit(ids, params, **kw))

    def resume(self, name, ids, params, answers):
        """Go on with answers that have these ids."""
        self.before |= {(name, index): len(each) for index, each in answers.items()}
        self.arrivals.append(self.engine.submit(ids, params, answers, request_id=name))

    def step(self):
        events = self.engine.step()
        if self.wrong:
            raise self.wrong[0]
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.ended, "an event after the last"
            self.outputs.setdefault(key, []).extend(event.ids)
            if event.finish_reason:
                self.ended[key] = event
                assert event.usage.completion_tokens == self.before.get(key, 0) + len(self.outputs[key])
        state = self.engine.state
        check_pages(state.cache, [s.pages for s in state.running])
        assert not any(s.pages for s in state.waiting)

    def run(self, limit=5000):
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < limit, "the engine does not finish"
        state = self.engine.state
        check_pages(state.cache, [])
        assert state.cache.used == 0
        assert not self.engine._requests
        counted = self.engine.stats()
        assert counted.requests == len(self.arrivals)
        assert counted.finished == Counter(last.finish_reason for last in self.ended.values()), "each answer once"
        return self.outputs


def check_shares(state, plan, before, pending, passed_over):
    """Assert that a plan divides its tokens as it should among prompts.

    before: the sequences whose prompts had begun, pending: how many ids of each were to be computed, passed_over: how
    many steps before this one had passed each over.
    """
    limits, counts = state.limits, dict(zip(plan.sequences, plan.counts, strict=True))
    bound = limits.tokens if limits.long_tokens is None else limits.long_tokens
    prompts = plan.sequences[plan.decodes :]
    room = limits.tokens - sum(plan.counts[: plan.decodes])
    enough = plan.rows < limits.rows and plan.table_pages < limits.table_pages
    short = [s for s in before if counts.get(s, 0) < pending[s]]  # who has not all that is to be computed

    def arrival(sequence):
        return sequence.request.arrival, sequence.index

    def is_bounded(sequence):
        """A sequence whose prompt takes so many steps that they may not be whole ones."""
        known = sequence.cached_tokens if sequence.pages else 0
        return limits.long_tokens is not None and len(sequence.ids) - known > 4 * limits.tokens

    def at_depth(sequence, tokens):
        depth = limits.doubling_depth
        return tokens if depth is None else max(-(-tokens // 4), tokens * depth // (depth + sequence.computed))

    assert sum(counts[s] for s in prompts if is_bounded(s)) <= bound, "very long prompts have their part together"
    for sequence in filter(is_bounded, prompts):
        assert counts[sequence] <= at_depth(sequence, bound), "and less of it where the context is long"

    if before and enough and room > 0:
        oldest = min(before, key=arrival)
        older = [s for s in prompts if s not in pending and arrival(s) < arrival(oldest)]  # it was waiting until now
        if not older:
            share = (plan.tokens - limits.tokens + room) // 4 if len(prompts) > 1 else room
            if is_bounded(oldest):
                share = min(room, at_depth(oldest, bound))
            overtaken = any(arrival(s) > arrival(oldest) for s in prompts)
            if is_bounded(oldest) and oldest not in counts and overtaken:
                assert oldest.passed_over == passed_over[oldest] + 1 <= 3, "it has every fourth step"
            else:
                assert counts.get(oldest, 0) >= max(1, min(pending[oldest], share)), "the oldest has its share"
    if short and enough and plan.tokens < limits.tokens:
        latest = max(map(arrival, prompts))
        held_back = [
            s for s in (*before, *prompts, *state.waiting) if arrival(s) < latest and len(s.ids) > limits.tokens
        ]
        held_back += [s for s in (*before, *prompts, *state.waiting) if len(s.ids) > 4 * limits.tokens]
        assert held_back, "nobody but a long prompt that is overtaken, or very long, leaves tokens unused"
    if before and len(state.waiting) == 0 and len(prompts) == 1 and set(before) <= set(prompts):
        limit = min(room, at_depth(prompts[0], bound)) if is_bounded(prompts[0]) else room
        assert counts[prompts[0]] == min(pending.get(prompts[0], limit), limit) or not enough, "one alone has it all"
    for sequence in prompts:  # who is more urgent has all it can use, but for the share of the oldest
        for other in short:
            urgent = other.request.priority < sequence.request.priority and sequence.generated == 0
            overtaken = any(
                arrival(s) > arrival(other) for s in prompts if s.request.priority <= other.request.priority
            )
            if (
                urgent
                and enough
                and not overtaken
                and not is_bounded(other)
                and sequence is not min((*before, *prompts), key=arrival)
            ):
                raise AssertionError("a less urgent prompt was computed before a more urgent one")


def test_rows_of_so_many_shapes_are_kept_while_the_sequences_stay_the_same():
    engine, builder = LocalEngine(FakeExecutable()), RowBuilder()
    assert (builder.histories, builder.digests) == (False, False), "before there are any"
    engine.submit([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    engine.step()
    (sequence,) = engine.state.running
    for drafted in range(16):
        sequence.draft = [4] * drafted
        rows = builder.build([sequence])
        assert builder.build([sequence]) is rows
        assert rows.position.tolist() == [len(sequence.ids) + j for j in range(drafted + 1)]
        assert len(builder._rows_by_shape) == drafted + 1
    sequence.draft = [4] * 16
    assert len(builder.build([sequence]).position) == 17
    assert len(builder._rows_by_shape) == 1, "all others have gone"


PROMPTS = (
    st.integers(1, 60)
    .flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, 2))  # a few families of prefixes, so that prompts share them
    )
    .map(lambda t: [(5 * i + t[1] * (i // 20)) % 50 for i in range(t[0])])
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.integers(1, 24),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    stop_token_ids=st.sampled_from([(), (3, 4, 5)]),
    logit_bias=st.sampled_from([(), ((7, 2.0),)]),
)
REQUESTS = st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=8)
# (step, request, index of the answer or None for all) of each abort; the steps that fail.
ABORTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7), st.sampled_from([None, 0, 1])), max_size=6)
FAILURES = st.sets(st.integers(1, 20), max_size=2)
CONFIGS = st.builds(
    EngineConfig,
    max_batch_tokens=st.sampled_from([1, 3, 16, 17, 64]),
    max_running=st.integers(1, 6),
    long_prompt_tokens=st.sampled_from([0, None, 1, 5]),
    prefix_cache=st.booleans(),
    max_model_len=st.just(84),
    cache=st.sampled_from(["paged", "paged", "naive"]),
    scheduler=st.sampled_from(["continuous", "continuous", "naive"]),
)


def alone(requests):
    watched = Watched(NAIVE)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
    return watched.run()


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    num_pages=st.integers(6, 20),
    late=st.integers(0, 8),
    toy=st.sampled_from([FakeExecutable, QueueingFake]),
    priorities=st.lists(st.sampled_from([0, 0, -1, 2]), min_size=8, max_size=8),
)
def test_outputs_do_not_depend_on_the_schedule(requests, config, num_pages, late, toy, priorities):
    watched = Watched(config, toy, num_pages=num_pages)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i), priority=priorities[i])
        if i >= late:
            watched.step()
    assert watched.run() == alone(requests)
    expected = {(str(i), k) for i, (_, params) in enumerate(requests) for k in range(params.n)}
    assert set(watched.ended) == expected, "every answer ends exactly once"


def check_answers_amid_aborts(watched, requests, aborts, reference):
    """aborts: (step before which, number of the request, index or None for all of its answers)."""
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
    for step in range(13):
        for at, request, index in aborts:
            if at == step:
                watched.engine.abort(str(request), index)
        watched.step()
    outputs = watched.run()
    for key, last in watched.ended.items():
        ids = outputs[key]
        assert ids == reference[key][: len(ids)]
        if last.finish_reason in ("stop", "length"):
            assert ids == reference[key]
    assert set(watched.ended) == set(reference)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    num_pages=st.integers(6, 20),
    aborts=ABORTS,
    failures=FAILURES,
    unfetched=st.none() | st.sets(st.integers(1, 20), max_size=2),
)
def test_aborts_and_failing_steps_free_everything_and_disturb_nobody(
    requests, config, num_pages, aborts, failures, unfetched
):
    watched = Watched(config, FakeExecutable if unfetched is None else QueueingFake, num_pages=num_pages)
    watched.executable.fail_at, watched.executable.fail_fetch = failures, unfetched
    check_answers_amid_aborts(watched, requests, aborts, alone(requests))


@pytest.mark.parametrize("toy", [FakeExecutable, QueueingFake])
def test_pre_emption_happens_and_changes_nothing(toy):
    requests = [([i] * 20, SamplingParams(temperature=0.8, seed=i, max_tokens=60)) for i in range(4)]
    watched = Watched(EngineConfig(max_batch_tokens=16), toy, num_pages=9)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
    outputs = watched.run()
    assert watched.engine.stats().preemptions > 0
    assert outputs == alone(requests)


def test_nothing_is_started_that_would_be_pre_empted_at_once():
    watched = Watched(EngineConfig(), num_pages=3)
    watched.submit([1] * 17, SamplingParams(max_tokens=30), request_id="a")
    watched.step()
    watched.submit([2] * 4, SamplingParams(max_tokens=40), request_id="b")
    watched.step()
    assert len(watched.engine.state.waiting) == 1, "a page is free, and the running sequence will need it"
    watched.run()
    assert watched.engine.stats().preemptions == 0


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks():
    watched = Watched(EngineConfig(max_batch_tokens=16, long_prompt_tokens=0))
    watched.submit([1] * 4, SamplingParams(temperature=0, max_tokens=30), request_id="a")
    watched.step()
    watched.submit([2] * 100, SamplingParams(temperature=0, max_tokens=2), request_id="b")
    for generated in range(2, 8):
        watched.step()
        assert len(watched.outputs["a", 0]) == generated, "each step decodes"
        assert watched.plan.tokens == 16, "and computes 15 tokens of the prompt"
    watched.run()


def test_first_come_first_served_and_nobody_starves():
    watched = Watched(EngineConfig(max_batch_tokens=64), num_pages=8, tokens=64)
    watched.submit([1] * 16, SamplingParams(max_tokens=40), request_id="first")
    watched.step()
    watched.submit([2] * 100, SamplingParams(max_tokens=4), request_id="big")
    for i in range(6):
        watched.submit([3] * 4, SamplingParams(max_tokens=4), request_id=f"small{i}")
    watched.run()
    order = [request for request, _ in watched.ended]
    assert order[:2] == ["first", "big"], "the small ones do not overtake the big one"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_answers_of_one_request_share_its_prompt(prefix_cache):
    watched = Watched(EngineConfig(prefix_cache=prefix_cache))
    watched.submit([(3 * i) % 50 for i in range(100)], SamplingParams(n=4, seed=1, max_tokens=8), request_id="a")
    watched.run()
    # 100 tokens once, the 4 after the last full page again for each of three siblings, 7 decodes for each answer.
    assert watched.executable.tokens_computed == 100 + 3 * 4 + 4 * 7
    assert len({tuple(ids) for ids in watched.outputs.values()}) == 4, "sample_index tells the answers apart"


@pytest.mark.parametrize("toy", [FakeExecutable, QueueingFake])
def test_a_known_prefix_is_not_computed_again_and_is_reported(toy):
    watched = Watched(EngineConfig(), toy)
    ids = [(3 * i) % 50 for i in range(64)]
    for name in "ab":
        watched.submit(ids, SamplingParams(temperature=0, max_tokens=1), request_id=name)
        watched.run()
    assert watched.ended["a", 0].usage.cached_tokens == 0
    assert watched.ended["b", 0].usage.cached_tokens == 48, "the page with the last prompt token is computed"
    assert watched.executable.tokens_computed == 64 + 16
    assert (watched.engine.stats().prefix_queries, watched.engine.stats().prefix_hits) == (128, 48)
    watched.submit(ids, SamplingParams(temperature=0, max_tokens=1), request_id="c", salt="another tenant")
    watched.run()
    assert watched.ended["c", 0].usage.cached_tokens == 0


def test_what_can_never_fit_is_refused_with_numbers():
    engine = LocalEngine(FakeExecutable(num_pages=4))
    with pytest.raises(CapacityError, match=r"60 tokens with an answer of 5 needs 65 tokens, 64 are available"):
        engine.submit([1] * 60, SamplingParams(max_tokens=5))
    with pytest.raises(CapacityError, match="needs 65 tokens"):
        engine.submit([1] * 64)
    for ids, field in (([], "prompt"), ([50], "prompt"), ([-1], "prompt"), ([1.5], "prompt")):
        with pytest.raises(RequestError) as caught:
            engine.submit(ids)
        assert caught.value.param == field
    for params, field in (
        (SamplingParams(logit_bias={50: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[50]), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit([1], params)
        assert caught.value.param == field
    assert not engine.has_work, "nothing refused leaves a trace"


def test_without_max_tokens_the_answer_goes_on_to_the_models_length():
    watched = Watched(EngineConfig(max_model_len=40))
    watched.submit([1] * 10, SamplingParams(temperature=0), request_id="a")
    assert len(watched.run()["a", 0]) == 30
    assert watched.ended["a", 0].finish_reason == "length"


def test_a_small_page_table_limits_the_step_not_the_answers():
    requests = [([i] * 40, SamplingParams(temperature=0.8, seed=i, max_tokens=20)) for i in range(5)]
    watched = Watched(EngineConfig(max_batch_tokens=64), table_pages=9, max_context=100)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
    assert watched.run() == alone(requests)


def test_a_prompt_may_fill_the_page_table():
    watched = Watched(EngineConfig(max_batch_tokens=64), table_pages=4, max_context=64)
    watched.submit([1] * 63, SamplingParams(max_tokens=1, seed=1), request_id="a")
    watched.step()
    assert len(watched.outputs["a", 0]) == 1


def test_a_device_is_given_the_next_step_before_the_ids_of_this_one_are_fetched():
    watched = Watched(EngineConfig(), QueueingFake)
    watched.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=8), request_id="a")
    watched.step()
    assert (watched.executable.forwards, watched.outputs) == (1, {}), "the first step is under way"
    watched.step()
    assert watched.executable.forwards == 2
    assert len(watched.outputs["a", 0]) == 1, "the first id is told while the second is computed"
    assert watched.run()["a", 0] == alone([([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))])["0", 0]
    assert watched.executable.forwards == 8, "the length is known beforehand: nothing is computed in vain"
    assert watched.executable.most_unfetched == 2


def test_a_stop_id_costs_a_device_one_row_in_vain():
    answer = alone([([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))])["0", 0]
    stop = next(token for i, token in enumerate(answer) if i > 3 and token not in answer[:i])
    watched = Watched(EngineConfig(), QueueingFake)
    watched.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop]), request_id="a")
    ids = watched.run()["a", 0]
    assert ids == answer[: answer.index(stop) + 1]
    assert watched.executable.forwards == len(ids) + 1
    assert watched.executable.unfetched == [len(ids) + 1], "and nobody waits for it"


def test_penalties_wait_for_the_ids_they_count():
    requests = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=12, frequency_penalty=1.5))]
    watched = Watched(EngineConfig(), QueueingFake)
    watched.submit(*requests[0], request_id="a")
    assert watched.run()["a", 0] == alone(requests)["0", 0]
    assert watched.executable.most_unfetched == 1


@pytest.mark.parametrize("config", [EngineConfig(overlap=False), EngineConfig(scheduler="naive"), NAIVE])
def test_without_overlap_each_step_ends_before_the_next(config):
    watched = Watched(config, QueueingFake)
    watched.submit([1, 2, 3], SamplingParams(max_tokens=4), request_id="a")
    watched.step()
    assert len(watched.outputs["a", 0]) == 1
    watched.run()
    assert watched.executable.most_unfetched == 0


GREEDY = SamplingParams(temperature=0, max_tokens=1)
LARGE = {"num_pages": 2000, "max_context": 8192, "tokens": 512, "segments": 16}


def prompt_of(length, first=0):
    """Ids that no other `first` shares a page of."""
    return [(first + 7 * i) % 50 for i in range(length)]


def first_step_of(watched, name):
    """How many steps, and how many tokens in them, until a request has its first id."""
    steps, before = 0, watched.executable.tokens_computed
    while not watched.outputs.get((name, 0)):
        watched.step()
        steps += 1
        assert steps < 100
    return steps, watched.executable.tokens_computed - before


@settings(max_examples=40, deadline=None)
@given(
    long=st.lists(st.integers(2600, 6000), min_size=1, max_size=4),
    shorts=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    steps=st.integers(1, 3),
    urgent=st.booleans(),
)
def test_short_prompts_wait_for_no_long_one(long, shorts, steps, urgent):
    """They are computed whole in the next step, which is not much longer for what is computed beside them."""
    watched = Watched(EngineConfig(max_running=16, long_prompt_tokens=0), **LARGE)
    for number, length in enumerate(long):
        watched.submit(prompt_of(length, number), GREEDY, request_id=f"long{number}")
    for _ in range(steps):
        watched.step()
        assert watched.plan.tokens == 512, "while nobody else waits, a long prompt has whole steps"
    before = sum(s.computed for s in watched.engine.state.running)
    for number, length in enumerate(shorts):
        name = f"short{number}"
        watched.submit(prompt_of(length, 10 + number), GREEDY, request_id=name, priority=-5 if urgent else 0)
    watched.step()
    assert all(watched.outputs.get((f"short{number}", 0)) for number in range(len(shorts)))
    own = sum(shorts)
    assert watched.plan.tokens == own + max(32, own) if own <= 256 else 512
    assert sum(s.computed for s in watched.engine.state.running) == before + max(32, min(own, 512 - own))
    watched.run()
    assert watched.executable.tokens_computed == sum(long) + own, "nothing is computed twice"


def test_a_short_prompt_beside_one_of_5000_tokens_waits_for_twice_its_own():
    alone, beside = Watched(WHOLE, **LARGE), Watched(WHOLE, **LARGE)
    beside.submit(prompt_of(5000, 1), GREEDY, request_id="long")
    for _ in range(3):
        beside.step()
    for watched in (alone, beside):
        watched.submit(prompt_of(35), GREEDY, request_id="short")
    assert (first_step_of(alone, "short"), first_step_of(beside, "short")) == ((1, 35), (1, 35 + 35))
    before = beside.executable.forwards
    beside.run()
    assert beside.executable.tokens_computed == 5000 + 35
    assert beside.executable.forwards - before == -(-(5000 - 3 * 512 - 35) // 512), "then it has whole steps again"


def test_a_prompt_of_many_steps_leaves_short_steps_for_those_who_come():
    """Whoever comes waits for a step of a sixth; a prompt of four steps has whole ones."""
    watched = Watched(EngineConfig(), **LARGE)
    watched.submit(prompt_of(2048, 2), GREEDY, request_id="four")
    watched.step()
    assert watched.plan.tokens == 512
    watched.run()
    for number, length in enumerate((3000, 5000)):
        watched.submit(prompt_of(length, 3 + number), GREEDY, request_id=f"long{number}")
    for _ in range(3):
        watched.step()
        assert watched.plan.tokens == 85
    watched.submit(prompt_of(35), GREEDY, request_id="short")
    assert first_step_of(watched, "short") == (1, 35), "it has a step of its own"
    watched.run()
    assert watched.executable.tokens_computed == 2048 + 5000 + 3000 + 35


def test_steps_of_a_prompt_of_many_steps_are_shorter_where_its_context_is_long():
    """A token at the doubling depth counts as two, but a quarter of the first step's tokens is the least."""
    watched = Watched(EngineConfig(), doubling_depth=1000, **LARGE)
    watched.submit(prompt_of(5000, 1), GREEDY, request_id="long")
    depth, counts = watched.engine.limits.doubling_depth, []
    assert depth == pytest.approx(1000, rel=0.02)
    while watched.engine.has_work:
        watched.step()
        counts.append(watched.plan.tokens)
    depths = [sum(counts[:step]) for step in range(len(counts))]
    assert counts[:-1] == [max(22, 85 * depth // (depth + computed)) for computed in depths[:-1]]
    assert (counts[0], counts[-2], sum(counts)) == (85, 22, 5000)


def test_many_short_prompts_leave_a_prompt_of_many_steps_every_fourth_step():
    watched = Watched(EngineConfig(), **LARGE)
    watched.submit(prompt_of(5000, 1), GREEDY, request_id="long")
    watched.step()
    parts = []
    for step in range(40):
        for number in range(6):
            name = f"short{step}.{number}"
            watched.submit(prompt_of(100, step * 6 + number), GREEDY, request_id=name, salt=str(step))
        watched.step()
        counts = {s.request.id: count for s, count in zip(watched.plan.sequences, watched.plan.counts, strict=True)}
        parts.append(counts.get("long", 0))
        assert watched.plan.tokens == 512
    assert parts == [0, 0, 0, 85] * 10
    watched.run()


@pytest.mark.parametrize("tokens", [1, 100, 600])
def test_how_much_of_a_step_very_long_prompts_have_can_be_said(tokens):
    watched = Watched(EngineConfig(long_prompt_tokens=tokens), **LARGE)
    watched.submit(prompt_of(5000, 1), GREEDY, request_id="long")
    watched.step()
    assert watched.plan.tokens == min(tokens, 512)


def test_many_short_prompts_leave_a_long_one_a_quarter():
    watched = Watched(WHOLE, **LARGE)
    watched.submit(prompt_of(5000, 1), GREEDY, request_id="long")
    watched.step()
    for step in range(36):
        for number in range(6):
            name = f"short{step}.{number}"
            watched.submit(prompt_of(100, step * 6 + number), GREEDY, request_id=name, salt=str(step))
        watched.step()
        counts = {s.request.id: count for s, count in zip(watched.plan.sequences, watched.plan.counts, strict=True)}
        assert (counts["long"], watched.plan.tokens) == (128 if step < 35 else 5000 - 512 - 35 * 128, 512)
    assert watched.ended["long", 0]
    watched.run()


@pytest.mark.parametrize("left", [1, 35, 36, 500])
def test_the_last_part_of_a_long_prompt_is_overtaken_too(left):
    watched = Watched(WHOLE, **LARGE)
    watched.submit(prompt_of(1024 + left, 1), GREEDY, request_id="long")
    for _ in range(2):
        watched.step()
    watched.submit(prompt_of(35), GREEDY, request_id="short")
    assert first_step_of(watched, "short") == (1, 35 + min(35, left))
    watched.run()


@pytest.mark.parametrize("lengths", [[300] * 9, [512] * 4, [600] * 9, [1300] * 5, [40] * 30, [100, 500, 30, 350]])
def test_prompts_that_need_as_many_steps_follow_each_other_in_whole_steps(lengths):
    watched = Watched(WHOLE, **LARGE | {"segments": 64})
    for number, length in enumerate(lengths):
        watched.submit(prompt_of(length, number), GREEDY, request_id=str(number))
    left = sum(lengths)
    while watched.engine.has_work:
        watched.step()
        assert watched.plan.tokens == min(512, left)
        left -= watched.plan.tokens
    assert [name for name, _ in watched.ended] == [str(number) for number in range(len(lengths))]


def test_the_more_urgent_prompt_is_computed_first_and_the_oldest_has_its_share():
    watched = Watched(WHOLE, **LARGE)
    for name, length, priority in (("a", 3000, 0), ("b", 3000, 0), ("c", 3000, -1), ("d", 100, 1)):
        watched.submit(prompt_of(length, ord(name)), GREEDY, request_id=name, priority=priority)
    watched.step()
    counts = {s.request.id: count for s, count in zip(watched.plan.sequences, watched.plan.counts, strict=True)}
    assert counts == {"c": 384, "a": 128}
    watched.run()
    assert [name for name, _ in watched.ended] == ["c", "a", "b", "d"]


def test_a_prompt_waits_for_what_it_shares_with_one_that_it_would_overtake():
    watched = Watched(WHOLE, **LARGE)
    watched.submit(prompt_of(1600) + prompt_of(3400, 1), GREEDY, request_id="long")
    watched.step()
    watched.submit(prompt_of(1600) + prompt_of(50, 2), GREEDY, request_id="short")
    assert first_step_of(watched, "short")[0] == 4, "three more steps compute the 1,600 tokens"
    assert watched.ended["short", 0].usage.cached_tokens == 1600
    watched.run()
    assert watched.executable.tokens_computed == 5000 + 50


def test_another_request_does_not_wait_until_answers_can_share_a_prompt():
    watched = Watched(WHOLE, **LARGE)
    watched.submit(prompt_of(5000, 1), SamplingParams(temperature=0, max_tokens=1, n=2), request_id="two")
    watched.step()
    watched.submit(prompt_of(20), GREEDY, request_id="short")
    assert first_step_of(watched, "short")[0] == 1
    watched.run()
    assert watched.executable.tokens_computed == 5000 + 20 + 5000 % 16


def test_a_long_prompt_whose_beginning_is_known_counts_as_short():
    watched = Watched(WHOLE, **LARGE)
    watched.submit(prompt_of(2000), GREEDY, request_id="before")
    watched.run()
    watched.submit(prompt_of(5000, 1), GREEDY, request_id="long")
    watched.step()
    watched.submit(prompt_of(2000) + [3] * 40, GREEDY, request_id="turn")
    assert first_step_of(watched, "turn") == (1, 40 + 40)
    watched.run()


def test_nobody_overtakes_a_prompt_that_waits_for_pages():
    watched = Watched(WHOLE, **LARGE | {"num_pages": 200})
    watched.submit(prompt_of(1600, 1), SamplingParams(temperature=0, max_tokens=3), request_id="first")
    for _ in range(4):
        watched.step()
    watched.submit(prompt_of(2000, 2), GREEDY, request_id="big")
    watched.submit(prompt_of(20, 3), GREEDY, request_id="small")
    watched.step()
    assert len(watched.engine.state.waiting) == 2, "100 pages are in use, and 125 are needed"
    watched.run()
    assert next(name for name, _ in watched.ended) == "first"
    assert watched.engine.stats().preemptions == 0
