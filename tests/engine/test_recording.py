"""Recordings of steps: run again alone they have the same logits, however they were cut into files."""

import os
from dataclasses import replace

import msgspec
import pytest
from engine_fakes import FakeExecutable, QueueingFake
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.engine.adapters import Adapters
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.recording import entries as entries_module
from roofline.engine.recording.entries import (
    MAGIC,
    MAX_FILE,
    AdapterPlaced,
    Arrival,
    End,
    Lead,
    Named,
    Step,
    files_of,
    frame,
    has_end,
    read_entries,
)
from roofline.engine.recording.recorder import MIN_PLACES, StepRecorder
from roofline.engine.recording.replay import replay
from roofline.engine.schedule.plan import StepPlan
from roofline.engine.schedule.sequence import Request
from tests.engine.test_scheduling import CONFIGS, REQUESTS

PLAIN = [([1, 2, 3] * 9, SamplingParams(seed=1, max_tokens=20, n=2)), ([4, 5], SamplingParams(seed=2, max_tokens=9))]


def record(folder, requests, config, toy=FakeExecutable, most=None, **sizes):
    """Compute requests twice, so that the second finds prefixes in the cache; most: bytes of the folder."""
    sizes = {"num_pages": 20, "rows": 32, **sizes}
    engine = LocalEngine(toy(**sizes), replace(config, record=str(folder)))
    if most is not None:
        engine._recorder._most = most
    for _ in range(2):
        for ids, params in requests:
            engine.submit(ids, params)
        while engine.has_work:
            assert not any(event.error for event in engine.step())
    engine.close()
    return sizes


def no_adapters(executable):
    return Adapters(executable, EngineConfig(), lambda slot: False)


def again(folder, sizes, **changes):
    return [list(replay(path, FakeExecutable(**{**sizes, **changes}))) for path in files_of(folder)]


@settings(max_examples=6, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    speculate=st.sampled_from(["off", "ngram"]),
    num_pages=st.integers(6, 20),
    toy=st.sampled_from([FakeExecutable, QueueingFake]),
    most=st.sampled_from([None, 16000, 1 << 20]),
)
def test_every_file_replays_to_the_same_bits(tmp_path_factory, requests, config, speculate, num_pages, toy, most):
    """Chunks, prefixes, pre-emption, guesses; files of a few steps, whose beginnings the cache had from before."""
    folder = tmp_path_factory.mktemp("record")
    config = replace(config, speculate=speculate, speculate_always=True, record_ids=True, record=str(folder))
    sizes = record(folder, requests, config, toy, most, num_pages=num_pages)
    for outcomes in again(folder, sizes):
        for outcome in outcomes:
            assert outcome.recorded is not None
            assert outcome.recorded_error is outcome.replayed_error is None
            assert outcome.first_row is None
            assert len(outcome.answers) == len(outcome.replayed)
    if most is not None:
        assert sum(path.stat().st_size for path in files_of(folder)) < 2 * most


def test_files_are_cut_and_stand_alone(tmp_path):
    sizes = record(tmp_path, PLAIN, EngineConfig(record=str(tmp_path), record_ids=True), most=16000)
    entries = [list(read_entries(path)[1]) for path in files_of(tmp_path)]
    assert len(entries) > 2
    assert all(any(isinstance(entry, Lead) for entry in each) for each in entries[1:])
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_of(tmp_path))
    assert all(outcome.first_row is None for each in again(tmp_path, sizes) for outcome in each)


def test_another_bit_is_found_with_its_answer(tmp_path):
    sizes = record(tmp_path, PLAIN[:1], EngineConfig(record=str(tmp_path), record_ids=True))
    (outcomes,) = again(tmp_path, sizes, weights=1)
    first = next(outcome for outcome in outcomes if outcome.recorded)
    assert first.first_row == 0
    assert first.answers[0][1] == 0
    executable, (path,) = FakeExecutable(**sizes), files_of(tmp_path)
    executable.fail_at = {1}
    first, *others = replay(path, executable)
    assert first.replayed_error == "RuntimeError: the toy was told to fail"
    assert others
    assert not any(outcome.replayed_error for outcome in others)


def test_without_ids_there_are_none_and_the_shapes_are_the_same(tmp_path):
    sizes = record(tmp_path, PLAIN, EngineConfig(record=str(tmp_path)), most=16000)
    steps = []
    for path in files_of(tmp_path):
        _, entries = read_entries(path)
        for entry in entries:
            assert not isinstance(entry, Lead) or entry.ids is None
            if isinstance(entry, Step):
                assert all(part.ids is None for part in entry.parts)
                steps.append(sum(part.count for part in entry.parts))
    assert [outcome.tokens for each in again(tmp_path, sizes) for outcome in each] == steps


def test_a_step_that_a_crash_cut_off_is_run_and_told(tmp_path):
    sizes = record(tmp_path, PLAIN, EngineConfig(record=str(tmp_path), record_ids=True))
    (path,) = files_of(tmp_path)
    whole = path.read_bytes()
    end = len(frame(End(1000)))
    assert has_end(path)
    path.write_bytes(whole[: -end - 8])  # within the last step's digests
    assert not has_end(path)
    (outcomes,) = again(tmp_path, sizes)
    assert (outcomes[-1].recorded, outcomes[-1].recorded_error) == (None, "it never ended")
    assert outcomes[-1].replayed is not None
    path.write_bytes(whole[:-60] + b"\xc1" * 60)
    with pytest.raises(ConfigError, match="is damaged after"):
        again(tmp_path, sizes)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, caplog):
    config = EngineConfig(record=str(tmp_path), record_ids=True)
    engine = LocalEngine(FakeExecutable(), config)

    class Full:
        def write(self, data):
            raise OSError(28, "full")

        def close(self):
            """Nothing."""

    engine._recorder._stream = Full()
    engine.submit([1, 2], SamplingParams(max_tokens=5, seed=1))
    ids = [token for _ in range(6) for event in engine.step() for token in event.ids]
    assert len(ids) == 5
    assert [r.message for r in caplog.records if "not recorded any more" in r.message] != []
    engine.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"num_pages": 5}, "cache_tokens"), ({"vocab_size": 49}, "vocabulary"), ({"tokens": 8}, "max_batch")],
)
def test_an_engine_that_does_not_fit_is_refused(tmp_path, change, words):
    sizes = record(tmp_path, PLAIN, EngineConfig(record=str(tmp_path), record_ids=True))
    with pytest.raises(ConfigError, match=words):
        again(tmp_path, sizes, **change)


@settings(max_examples=25, deadline=None)
@given(place=st.integers(17, 3000), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_told_but_never_breaks(recording, place, byte):
    path, sizes, whole = recording
    data = bytearray(whole)
    data[place % len(data)] = byte
    path.write_bytes(data)
    try:
        for outcome in replay(path, FakeExecutable(**sizes)):
            assert outcome.tokens <= 64  # of a step of this engine
    except ConfigError as error:
        told = str(error)
        assert str(path) in told
    else:
        assert bytes(data) == whole or not has_end(path), "the end itself was changed"


def test_a_changed_length_is_no_cut(recording):
    path, sizes, whole = recording
    data = bytearray(whole)
    data[len(MAGIC) + 2] = 255  # of the head, and so beyond the end
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="has no such length"):
        list(replay(path, FakeExecutable(**sizes)))


@settings(max_examples=25, deadline=None)
@given(size=st.integers(200, 3000))
def test_a_cut_recording_has_no_end(recording, size):
    path, sizes, whole = recording
    path.write_bytes(whole[: min(size, len(whole) - 1)])
    assert not has_end(path)
    list(replay(path, FakeExecutable(**sizes)))


def test_entries_that_are_missing_in_the_middle_are_noticed(recording):
    path, sizes, whole = recording
    path.write_bytes(whole)
    head, entries = read_entries(path)
    kept = [entry for entry in entries if not isinstance(entry, Arrival)]
    path.write_bytes(MAGIC + b"".join(map(frame, [head, *kept])))
    with pytest.raises(ConfigError, match="its end tells of"):
        list(replay(path, FakeExecutable(**sizes)))


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    sizes = record(folder, PLAIN, EngineConfig(record=str(folder), record_ids=True))
    (path,) = files_of(folder)
    return path, sizes, path.read_bytes()


def test_a_folder_without_recordings_and_ids_without_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no recording"):
        files_of(tmp_path)
    with pytest.raises(ConfigError, match="record_ids needs record"):
        EngineConfig(record_ids=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        LocalEngine(FakeExecutable(), EngineConfig(record=str(tmp_path / "file")))


def test_arrivals_tell_sizes_alone(tmp_path):
    record(tmp_path, PLAIN, EngineConfig(record=str(tmp_path)))
    _, entries = read_entries(files_of(tmp_path)[0])
    arrivals = [entry for entry in entries if isinstance(entry, Arrival)]
    assert [(a.prompt_tokens, a.max_tokens, a.answers) for a in arrivals] == [(27, 20, 2), (2, 9, 1)] * 2


def test_an_answer_that_comes_back_with_other_pages_brings_what_lies_in_them(tmp_path):
    """After a pre-emption the prefix cache may give it pages that another sequence has filled."""
    executable = FakeExecutable()
    recorder = StepRecorder(tmp_path, executable, no_adapters(executable), 1, with_ids=True)
    request = Request("a", list(range(40)), SamplingParams(seed=1, max_tokens=4), frozenset(), 4, 1, b"")
    (sequence,) = request.sequences
    for pages, computed, count in (([3, 4, 5], 0, 40), ([6, 7, 5], 32, 8)):
        sequence.pages, sequence.computed = pages, computed
        plan = StepPlan()
        plan.add(sequence, count)
        recorder.step(plan)
    recorder.close()
    _, entries = read_entries(files_of(tmp_path)[0])
    assert [(lead.count, lead.pages, lead.ids) for lead in entries if isinstance(lead, Lead)] == [
        (32, [6, 7], list(range(32)))
    ]


def test_recordings_of_earlier_runs_count(tmp_path):
    """Each restart begins a file; the folder keeps to its bound all the same, and the latest stay."""
    for number in range(5):
        path = tmp_path / f"{number}.steps"
        path.write_bytes(bytes(1 << 18))
        os.utime(path, (number, number))
    executable = FakeExecutable()
    StepRecorder(tmp_path, executable, no_adapters(executable), 1, with_ids=True).close()
    names = {path.name for path in files_of(tmp_path)}
    assert (len(names), names > {"2.steps", "3.steps", "4.steps"}) == (4, True)


def test_a_file_of_a_large_folder_can_be_read_again(tmp_path):
    executable = FakeExecutable()
    recorder = StepRecorder(tmp_path, executable, no_adapters(executable), 8192, with_ids=True)
    recorder.close()
    assert recorder._part_bytes < MAX_FILE // 2


def test_ended_answers_are_forgotten(tmp_path):
    engine = LocalEngine(FakeExecutable(), EngineConfig(record=str(tmp_path)))
    for number in range(4 * MIN_PLACES):
        engine.submit([1, 2, number % 50], SamplingParams(max_tokens=2))
        while engine.has_work:
            engine.step()
    assert len(engine._recorder._places) <= MIN_PLACES
    engine.close()


def test_a_folder_of_replicas_has_the_recordings_of_all(tmp_path):
    for number in range(2):
        record(tmp_path / str(number), PLAIN, EngineConfig(record_ids=True, record=str(tmp_path)))
    assert sorted(path.parent.name for path in files_of(tmp_path)) == ["0", "1"]


def test_a_step_has_as_many_parts_as_its_engine_takes(tmp_path):
    """Two answers to one prompt, and one to another; then one of them twice."""
    sizes = record(tmp_path, PLAIN, EngineConfig(record=str(tmp_path), record_ids=True), segments=3)
    (path,) = files_of(tmp_path)
    head, entries = read_entries(path)
    entries = list(entries)
    at, step = max(
        ((at, entry) for at, entry in enumerate(entries) if isinstance(entry, Step)),
        key=lambda each: len(each[1].parts),
    )
    assert len(step.parts) == 3
    assert all(outcome.first_row is None for outcome in replay(path, FakeExecutable(**sizes)))
    entries[at] = msgspec.structs.replace(step, parts=[*step.parts, step.parts[0]])
    path.write_bytes(MAGIC + b"".join(map(frame, [head, *entries])))
    with pytest.raises(ConfigError, match=f"step {step.number} has 4 parts"):
        list(replay(path, FakeExecutable(**sizes)))


@pytest.mark.parametrize(("token", "taken"), [(0, True), (49, True), (50, False), (-1, False)])
def test_ids_of_a_recording_are_of_the_vocabulary(recording, tmp_path, token, taken):
    _, sizes, data = recording
    (tmp_path / "a.steps").write_bytes(data)
    head, entries = read_entries(tmp_path / "a.steps")
    entries = list(entries)
    at = next(at for at, entry in enumerate(entries) if isinstance(entry, Step))
    first, *rest = entries[at].parts
    parts = [msgspec.structs.replace(first, ids=[token, *first.ids[1:]]), *rest]
    entries[at] = msgspec.structs.replace(entries[at], parts=parts)
    (tmp_path / "a.steps").write_bytes(MAGIC + b"".join(map(frame, [head, *entries])))
    outcomes = replay(tmp_path / "a.steps", FakeExecutable(**sizes))
    if taken:
        assert next(outcomes).replayed_error is None
        return
    with pytest.raises(ConfigError, match="ids outside the vocabulary"):
        list(outcomes)


def test_entries_cannot_be_changed():
    kinds = [kind for kind in vars(entries_module).values() if isinstance(kind, type(msgspec.Struct))]
    assert {Lead, Named, Step, Arrival, AdapterPlaced} <= set(kinds)
    assert [kind.__name__ for kind in kinds if not kind.__struct_config__.frozen] == []


@pytest.mark.parametrize("slot", [1, 7])
def test_an_adapter_that_was_never_placed_is_refused(recording, tmp_path, slot):
    _, sizes, data = recording
    (tmp_path / "a.steps").write_bytes(data)
    head, entries = read_entries(tmp_path / "a.steps")
    changed = [msgspec.structs.replace(entry, slot=slot) if isinstance(entry, Named) else entry for entry in entries]
    (tmp_path / "a.steps").write_bytes(MAGIC + b"".join(map(frame, [head, *changed])))
    with pytest.raises(ConfigError, match=f"does not say what adapter {slot} is"):
        list(replay(tmp_path / "a.steps", FakeExecutable(**sizes)))
    placed = [head, AdapterPlaced(slot, "ab", "/nowhere"), *changed]
    (tmp_path / "a.steps").write_bytes(MAGIC + b"".join(map(frame, placed)))
    with pytest.raises(ConfigError, match=f"no place for adapter {slot}"):
        list(replay(tmp_path / "a.steps", FakeExecutable(**sizes)))
