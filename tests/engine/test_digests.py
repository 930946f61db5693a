"""Digests of logits: one for each id, the same whatever the schedule, and nothing for who wants none."""

import hashlib

import numpy as np
from engine_fakes import FakeExecutable, QueueingFake
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.engine.config import EngineConfig
from roofline.engine.digests import digests_of
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from tests.engine.test_scheduling import CONFIGS, NAIVE, REQUESTS


def digests(requests, config, toy=FakeExecutable, cut=None, **sizes):
    """(ids, digests) of each answer; cut: of a resumed one, the ids that are known already."""
    engine = LocalEngine(toy(**sizes), config)
    for number, (ids, params) in enumerate(requests):
        params = SamplingParams(**{**vars(params), "digests": True})
        engine.submit(ids, params, cut and cut.get(number), request_id=str(number))
    told = {}
    while engine.has_work:
        for event in engine.step():
            ids, made = told.setdefault((event.request_id, event.index), ([], []))
            assert len(event.ids) == len(event.digests or [])
            ids += event.ids
            made += event.digests or []
    return told


@settings(max_examples=12, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    speculate=st.sampled_from(["off", "ngram"]),
    num_pages=st.integers(6, 20),
    toy=st.sampled_from([FakeExecutable, QueueingFake]),
    cut=st.integers(0, 24),
)
def test_they_do_not_depend_on_the_schedule(requests, config, speculate, num_pages, toy, cut):
    """Chunks, prefixes, pre-emption, speculation, steps that are queued, an answer that another process began."""
    alone = digests(requests, NAIVE)
    config = EngineConfig(**{**vars(config), "speculate": speculate, "speculate_always": True})
    assert digests(requests, config, toy, num_pages=num_pages, rows=32) == alone
    first = [ids for (name, _), (ids, _) in alone.items() if name == "0"]
    known = {index: ids[:cut] for index, ids in enumerate(first) if cut < len(ids)}
    if known:
        resumed = digests(requests[:1], config, toy, {0: known}, num_pages=num_pages, rows=32)
        assert resumed == {("0", i): tuple(each[cut:] for each in alone["0", i]) for i in known}


def test_a_digest_is_the_start_of_sha256_of_the_row():
    rows = np.array([[1.0, -0.0], [1.0, 0.0]], np.float32)
    assert digests_of(rows) == [hashlib.sha256(row.tobytes()).digest()[:16] for row in rows]
    assert digests_of(rows)[0] != digests_of(rows)[1]


def test_who_wants_none_pays_nothing():
    executable = FakeExecutable()
    executable.logits = None  # which nobody may call
    engine = LocalEngine(executable)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    events = []
    while engine.has_work:
        events += engine.step()
    assert sum(len(event.ids) for event in events) == 4
    assert all(event.digests is None for event in events)
