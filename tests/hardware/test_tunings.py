"""The tuning store: what is saved comes back, what cannot be used is put aside or left, with its reason."""

import json
import logging
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.hardware.tuning import store as tunings
from roofline.hardware.tuning.location import elsewhere
from roofline.hardware.tuning.store import Setting, TuningRecord, Tunings, TuningVerdict, VariantChoice

SETTING = Setting("avx512, 2 threads", "abc", "GNU 12")
RECORD = TuningRecord("linear", "64x64 Q4_1", "1 row", SETTING, "2x4", "default", "faster", {"ratio": 0.9}, "today")
VERDICT = TuningVerdict(
    "hash", "model", "1 row", SETTING, (VariantChoice((1, 4), "2x4"),), True, "faster", {"ratio": 0.95}, "today"
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    return tmp_path


def content(**changes) -> Tunings:
    full = Tunings("cpu", "feed", "a chip", {RECORD.key: RECORD}, {VERDICT.key: VERDICT}, {"key": {"stage": 1}})
    return replace(full, **changes)


def test_what_is_saved_comes_back():
    tunings.save(content())
    assert tunings.load("cpu", "feed") == content()


def test_saving_where_possible_says_whether_it_was(home, monkeypatch):
    assert tunings.save_where_possible(content())
    (home / "file").write_text("")
    monkeypatch.setenv("ROOFLINE_HOME", str(home / "file"))
    assert not tunings.save_where_possible(content())
    with pytest.raises(ConfigError, match=r"cannot be written.*set ROOFLINE_HOME to a folder that can"):
        tunings.save(content())


def test_no_store_is_an_empty_one():
    assert tunings.load("cpu", "feed", "a chip") == Tunings("cpu", "feed", "a chip")


def test_a_new_build_replaces_a_record_and_threads_have_their_own():
    tunings.save(content())
    newer = replace(RECORD, setting=replace(SETTING, build="new"), variant="1x8")
    other = replace(RECORD, setting=replace(SETTING, run="avx2, 1 threads"))
    tunings.save(Tunings("cpu", "feed", "a chip", {newer.key: newer, other.key: other}))
    assert tunings.load("cpu", "feed").records == {newer.key: newer, other.key: other}
    assert tunings.load("cpu", "feed").verdicts == {VERDICT.key: VERDICT}


def test_unfinished_entries_go_when_they_are_finished():
    tunings.save(content())
    tunings.save(Tunings("cpu", "feed", "", unfinished={"key": None, "other": 3}))
    assert tunings.load("cpu", "feed").unfinished == {"other": 3}
    assert tunings.load("cpu", "feed").name == "a chip"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        '{"version": 1, "backend": "cpu", "chip": "feed", "name": "", "records": [{}], "verdicts": []}',
        "\xff",
    ],
)
def test_a_damaged_store_is_put_aside(text, caplog):
    path = tunings.save(content())
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "roofline.hardware"):
        assert tunings.load("cpu", "feed", "a chip") == Tunings("cpu", "feed", "a chip")
    assert "damaged" in caplog.text
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == text.encode("latin-1")
    tunings.save(content())
    assert tunings.load("cpu", "feed") == content()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_change_to_a_store_makes_a_load_fail(data):
    tunings.path("cpu", "feed").unlink(missing_ok=True)  # or it would be merged with the last example's
    path = tunings.save(content())
    raw = json.loads(path.read_text())

    def change(value, depth):
        """One place of the tree replaced by something else."""
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
        if not keys or (depth and data.draw(st.booleans())):
            return data.draw(st.sampled_from([None, 0, -1, "x", [], {}, [None], 1.5, True]))
        key = data.draw(st.sampled_from(list(keys)))
        value[key] = change(value[key], depth + 1)
        return value

    path.write_text(json.dumps(change(raw, 0)))
    found = tunings.load("cpu", "feed", "a chip")
    assert all(isinstance(v.kept, bool) for v in found.verdicts.values())
    for aside in path.parent.glob("*.damaged-*"):
        aside.unlink()


def test_another_machines_store_is_left_with_a_reason(caplog):
    path = tunings.save(content())
    copied = tunings.path("cpu", "beef")
    copied.write_bytes(path.read_bytes())
    with caplog.at_level(logging.WARNING, "roofline.hardware"):
        assert not tunings.load("cpu", "beef").records
    assert "was measured on a chip (feed)" in caplog.text
    assert copied.exists()
    assert elsewhere("cpu", "beef") == ["cpu-feed.json"]


def test_another_version_is_left_with_a_reason(caplog):
    path = tunings.save(content())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with caplog.at_level(logging.WARNING, "roofline.hardware"):
        assert not tunings.load("cpu", "feed").records
    assert "version 99" in caplog.text


def test_writers_at_the_same_time_lose_nothing():
    def write(number: int) -> None:
        record = replace(RECORD, shape=f"shape {number}")
        tunings.save(Tunings("cpu", "feed", "a chip", {record.key: record}))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tunings.load("cpu", "feed").records) == 12
    assert not list(tunings.path("cpu", "feed").parent.glob("*.part"))


@pytest.mark.parametrize("field", ["run", "build", "compiler"])
def test_settings_say_how_they_differ(field):
    other = replace(SETTING, **{field: "else"})
    assert SETTING.differs(SETTING) == ""
    assert getattr(SETTING, field) in SETTING.differs(other)
    assert "else" in SETTING.differs(other)
