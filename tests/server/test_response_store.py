"""Kept responses: bounds, owners, chains and files, against a model of them in plain dicts."""

import asyncio
import contextlib
import os
import sqlite3
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, RequestError
from roofline.server.limits import Limits
from roofline.server.options import ServeOptions
from roofline.server.routes.responses.store import ROW_BYTES, Kept, ResponseStore


def kept(name: str, owner: str = "ann", previous: str | None = None, text: str = "", status: str = "completed") -> Kept:
    response = {"id": name, "status": status, "output": [{"out": name}], "background": True}
    return Kept(name, owner, previous, [{"in": name, "text": text}], response)


def keep(store: ResponseStore, *args, **kwargs) -> bool:
    return asyncio.run(store.keep(kept(*args, **kwargs)))


def find(store: ResponseStore, name: str, owner: str = "ann") -> bool:
    try:
        assert asyncio.run(store.find(owner, name))["output"] == [{"out": name}]
    except RequestError as error:
        return error.status != 404
    return True


def history(store: ResponseStore, name: str, owner: str = "ann") -> bytes:
    return b"".join(asyncio.run(store.history(owner, name)))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "responses.db"


def test_a_file_outlives_the_server_and_is_nobody_else_s(file):
    store = ResponseStore(file)
    assert keep(store, "one")
    assert keep(store, "two", previous="one", text="ü")
    assert keep(store, "open", status="in_progress")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    store.close()
    again = ResponseStore(file)
    assert (
        history(again, "two")
        == '[{"in":"one","text":""}][{"out":"one"}][{"in":"two","text":"ü"}][{"out":"two"}]'.encode()
    )
    interrupted = asyncio.run(again.find("ann", "open"))
    assert (interrupted["status"], interrupted["error"]["code"]) == ("failed", "server_error")
    again.close()
    again.close()


def test_a_file_is_written_ahead_overwritten_and_this_process_s(file):
    store = ResponseStore(file)
    settings = {name: store._open.execute(f"pragma {name}").fetchone()[0] for name in PRAGMAS}
    store.close()
    assert settings == PRAGMAS


PRAGMAS = {
    "locking_mode": "exclusive",
    "journal_mode": "wal",
    "synchronous": 1,  # normal: a crash of the machine may cost the latest answers, and never the file
    "secure_delete": 1,
    "application_id": int.from_bytes(b"Rofl"),
    "user_version": 1,
}


def test_a_file_that_cannot_be_used_is_one_sentence(file, tmp_path):
    def problem(path) -> str:
        with pytest.raises(ConfigError) as error:
            ResponseStore(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    store = ResponseStore(file)
    assert "is in use by another process" in problem(file)
    keep(store, "one", text="x" * 20_000)
    store.close()
    raw = bytearray(file.read_bytes())
    raw[5000:9000] = b"\xff" * 4000
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(raw)
    assert "is damaged" in problem(damaged)
    damaged.write_text("no database, but a file of some other program")
    assert "is damaged" in problem(damaged)
    assert damaged.read_text().startswith("no database")  # it is left as it was
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("create table mine (x)")
    assert "another program" in problem(other)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("update responses set response = x'00', ended = 0")
        connection.commit()
    assert "is damaged" in problem(file)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("pragma user_version = 9")
    assert "another version" in problem(file)
    assert "a part of the path is a file" in problem(file / "x")
    assert "no such file or folder" in problem(tmp_path / "no" / "x.db")
    assert "cannot be opened" in problem(tmp_path)
    if os.getuid():
        damaged.chmod(0o400)
        assert "permission is missing" in problem(damaged)


def test_a_file_that_fails_later_costs_no_answer(file, caplog):
    store = ResponseStore(file)
    keep(store, "one")
    totals = {"ann": [*store._totals["ann"]]}
    store._open.execute("create trigger full before insert on responses begin select raise(abort, 'x'); end")
    assert not keep(store, "one", text="longer")  # what it was stays
    assert find(store, "one")
    assert store._totals == totals
    store._open.execute("drop table responses")
    assert not keep(store, "two")
    with pytest.raises(RequestError, match="cannot be read") as error:
        asyncio.run(store.find("ann", "one"))
    assert error.value.status == 500
    assert str(file) in caplog.text
    store.close()


def test_a_chain_is_whole_or_refused():
    store = ResponseStore(None, Limits(messages=3, body_bytes=4 * ROW_BYTES))
    keep(store, "r0")
    for number in range(1, 5):
        keep(store, f"r{number}", previous=f"r{number - 1}", text="x" * 600 * (number == 2))
    keep(store, "bob's", owner="bob", previous="r0")
    for name, status, words in (
        ("r2", 400, "bytes"),
        ("r4", 400, "more than 3 responses"),
        ("none", 404, "it is not stored"),
        ("bob's", 404, "a response before it is not stored"),
    ):
        with pytest.raises(RequestError, match=words) as error:
            history(store, name, "bob" if name == "bob's" else "ann")
        assert (error.value.status, error.value.param) == (status, "previous_response_id")
    assert history(store, "r1").count(b"out") == 2
    asyncio.run(store.remove("ann", "r0"))
    with pytest.raises(RequestError, match="a response before it is not stored"):
        history(store, "r1")
    assert find(store, "r1")


def test_what_is_too_old_goes_and_a_conversation_that_goes_on_stays():
    now = 0.0
    store = ResponseStore(None, Limits(stored_seconds=10.0), lambda: now)
    for name in ("one", "other"):
        keep(store, name)
    now = 8.0
    keep(store, "two", previous="one")
    assert history(store, "two")
    now = 15.0
    assert [find(store, name) for name in ("one", "two", "other")] == [True, True, False]
    keep(store, "three")
    assert store._totals["ann"][0] == 3  # the row is gone too
    now = 30.0
    asyncio.run(store.expire())
    assert store._open.execute("select count(*) from responses").fetchone() == (0,)
    assert not store._totals


def test_room_is_made_by_whoever_has_the_most():
    store = ResponseStore(None, Limits(stored_responses=4))
    keep(store, "quiet", owner="bob")
    for number in range(6):
        keep(store, str(number))
    assert find(store, "quiet", "bob")
    assert [find(store, str(number)) for number in range(6)] == [False] * 3 + [True] * 3


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "keep", "remove", "history"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["ann", "bob"]),
        st.sampled_from([None, "a", "b", "c"]),
        st.integers(0, 900),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(ACTIONS)
def test_bounds_hold_and_the_books_agree(actions):
    limits = Limits(stored_responses=3, stored_bytes=4 * ROW_BYTES, messages=5)
    store = ResponseStore(None, limits)
    refusals = set[int]()
    for action, name, owner, previous, size in actions:
        own = f"{owner} {name}"  # ids are unique, as they are made
        if action == "keep":
            before = previous and f"{owner} {previous}"
            stays = keep(store, own, owner, before, "x" * size)
            assert stays == find(store, own, owner)
        else:
            try:
                if action == "remove":
                    asyncio.run(store.remove(owner, own))
                    assert not find(store, own, owner)
                else:
                    assert history(store, own, owner).endswith(b'[{"out":"%s"}]' % own.encode())
            except RequestError as error:
                refusals.add(error.status)
        rows = store._open.execute("select owner, bytes from responses").fetchall()
        assert len(rows) <= 3
        assert sum(size for _, size in rows) <= limits.stored_bytes
        totals = {
            owner: [len(each), sum(each)] for owner in ("ann", "bob") if (each := [s for o, s in rows if o == owner])
        }
        assert store._totals == totals
        assert not find(store, own, "bob" if owner == "ann" else "ann")
    assert refusals <= {400, 404}


def test_limits_are_options():
    options = ServeOptions(max_stored_responses=0, max_stored_bytes=5, stored_response_days=0.5)
    limits = options.effective_limits()
    assert (limits.stored_responses, limits.stored_bytes, limits.stored_seconds) == (0, 5, 43200)
