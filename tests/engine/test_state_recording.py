"""Recordings of steps of a model with recurrent state replay to the same bits, slots and all."""

import pytest
from state_fakes import HybridFake, QueueingHybrid

from roofline.common.errors import ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.recording.entries import MAGIC, OLDER, Step, files_of, frame, read_entries
from roofline.engine.recording.replay import replay

SIZES = {"num_pages": 40, "max_context": 512, "tokens": 64, "segments": 8, "rows": 48, "state_slots": 9}
PERIODIC = [1, 2, 3, 4, 5] * 30


def record(folder, toy, fail_late=(), most=None, **options):
    config = EngineConfig(record=str(folder), record_ids=True, **options)
    engine = LocalEngine(toy(**SIZES), config)
    engine.executable.fail_late = set(fail_late)
    if most is not None:
        engine._recorder._most = most
    for _ in range(2):
        for number, length in enumerate((150, 129, 40, 70, 64)):
            params = SamplingParams(seed=number, max_tokens=40, n=1 + number % 2, logit_bias={7: 2.0})
            engine.submit(PERIODIC[number % 2 : length + number % 2], params)
        while engine.has_work:
            engine.step()
    engine.close()
    return engine


@pytest.mark.parametrize(
    ("toy", "options"),
    [
        (HybridFake, {}),
        (QueueingHybrid, {}),
        (HybridFake, {"most": 60000}),
        (HybridFake, {"most": 60000, "speculate": "ngram", "speculate_always": True}),
        (HybridFake, {"fail_late": (9, 30)}),
    ],
)
def test_every_file_replays_to_the_same_bits(tmp_path, toy, options):
    engine = record(tmp_path, toy, **options)
    assert engine.stats().snapshot_hits > 3
    files, failed = files_of(tmp_path), 0
    assert (len(files) > 2) == ("most" in options)
    for path in files:
        for outcome in replay(path, HybridFake(**SIZES)):
            assert outcome.replayed_error is None
            assert outcome.first_row is None
            failed += outcome.recorded is None
    assert (failed > 0) == ("fail_late" in options)


def test_slots_that_no_executable_may_use_are_refused(tmp_path):
    record(tmp_path, HybridFake)
    (path,) = files_of(tmp_path)
    with pytest.raises(ConfigError, match="had slots of recurrent state 9, and this one has 8"):
        list(replay(path, HybridFake(**SIZES | {"state_slots": 8})))
    head, entries = read_entries(path)
    named, step = [], None
    for entry in entries:
        if isinstance(entry, Step):
            step = entry
            break
        named.append(entry)
    part = step.parts[0]
    for move, problem in (
        ((), "says nothing of recurrent state"),
        ((-1, 9, 0, -1), "slots of recurrent state that there are not"),
        ((-1, 0, 0, 3), "slots of recurrent state that there are not"),
        ((2, 0, 0, -1), "begins with no state, or with one that nobody reads"),
    ):
        changed = Step(step.number, step.at, [type(part)(part.answer, 0, part.count, part.pages, part.ids, move)], [])
        path.write_bytes(MAGIC + b"".join(map(frame, [head, *named, changed])))
        with pytest.raises(ConfigError, match=problem):
            list(replay(path, HybridFake(**SIZES)))


def test_recordings_of_the_version_before_replay(tmp_path):
    """They have neither the slots of the engine nor those of parts."""
    from engine_fakes import FakeExecutable

    sizes = {name: size for name, size in SIZES.items() if name != "state_slots"}
    engine = LocalEngine(FakeExecutable(**sizes), EngineConfig(record=str(tmp_path), record_ids=True))
    engine.submit([1, 2, 3], SamplingParams(seed=1, max_tokens=5))
    while engine.has_work:
        engine.step()
    engine.close()
    (path,) = files_of(tmp_path)
    head, entries = read_entries(path)
    shortened = [_without_last(head), *(_without_state(entry) for entry in entries)]
    path.write_bytes(OLDER + b"".join(shortened))
    outcomes = list(replay(path, FakeExecutable(**sizes)))
    assert len(outcomes) == 5
    assert all(outcome.recorded is not None and outcome.first_row is None for outcome in outcomes)


def _framed(values):
    import zlib

    import msgspec

    from roofline.engine.recording.entries import PREFIX

    body = msgspec.msgpack.encode(values)
    return PREFIX.pack(len(body), zlib.crc32(body)) + body


def _without_last(entry):
    import msgspec

    return _framed(msgspec.msgpack.decode(msgspec.msgpack.encode(entry))[:-1])


def _without_state(entry):
    import msgspec

    values = msgspec.msgpack.decode(msgspec.msgpack.encode(entry))
    if isinstance(entry, Step):
        values[3] = [part[:-1] for part in values[3]]
    return _framed(values)
