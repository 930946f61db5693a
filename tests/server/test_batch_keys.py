"""The key of a batch after it was created, and the books on files of keys that several threads write in."""

import asyncio
import threading
from collections import Counter

import pytest

from roofline.common.errors import RequestError
from roofline.server.batches.files import Files
from roofline.server.keys import Keys
from roofline.server.limits import Limits
from tests.server.batch_client import create, line, serve, stop_at, until

ANN = '[[keys]]\nname = "ann"\nkey = "a"\n'
BOB = '[[keys]]\nname = "bob"\nkey = "b"\n'


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(ANN + BOB)
    return path


@pytest.fixture
def batch_after(make_context, engine, tmp_path, keys_file):
    """batch_after(text of the keys' file) -> the batch at its end, whose second line of four had begun when the file
    changed."""

    async def run(text):
        keys = Keys(file=keys_file)
        async with serve(make_context, tmp_path / "kept", key="a", keys=keys, batch_at_once=1) as (app, client):
            stop_at(engine, 2)
            created = await create(client, *(line(each) for each in "abcd"))
            await until(lambda: len(engine.submitted) == 2)
            batch = app.state.batches.records.get("ann", created.id)
            keys_file.write_text(text)
            keys.refresh(force=True)
            engine.gate.set()
            await until(lambda: batch.ended)
            return batch

    return lambda text: asyncio.run(run(text))


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (ANN + 'scopes = ["admin"]\n' + BOB, "insufficient_scope", "no longer the scope 'use'"),
        (BOB, "key_gone", "not among the server's any more"),
    ],
    ids=["scope", "key"],
)
def test_a_batch_whose_key_lost_its_rights_fails_and_computes_no_more(batch_after, engine, text, code, message):
    batch = batch_after(text)
    assert (batch.status, [problem.code for problem in batch.problems]) == ("failed", [code])
    assert message in batch.problems[0].message
    assert len(engine.submitted) == 2  # the line that was being computed is answered
    assert (batch.completed, batch.output_file_id is None) == (2, False)


def test_a_line_is_computed_as_the_key_is_now(batch_after, engine):
    batch = batch_after(ANN.replace('key = "a"', 'key = "new"') + BOB)
    assert (batch.status, batch.completed) == ("completed", 4)
    first, second, *later = engine.salts
    assert first == second
    assert first not in later
    assert len(set(later)) == 1


@pytest.fixture
def files(tmp_path):
    files = Files(tmp_path, Limits(key_file_bytes=100, key_files=1))
    yield files
    files.close()


def in_thread(task, *words) -> threading.Thread:
    thread = threading.Thread(target=task, args=words)
    thread.start()
    return thread


def test_files_are_listed_while_another_thread_keeps_one(files, tmp_path):
    def keep(name):
        (tmp_path / name).write_bytes(b"data")
        files.keep(tmp_path / name, "ann", name, "batch")

    class Ann(str):
        """A name during whose comparison a file comes in."""

        __hash__ = str.__hash__

        def __eq__(self, other):
            in_thread(keep, f"{len(files.of('ann'))}.part").join()
            return str(self) == other

    keep("first.part")
    assert [file.filename for file in files.of(Ann("ann"))] == ["first.part"]
    assert len(files.of("ann")) == 2


def test_a_key_has_room_up_to_its_last_byte_and_file(files, tmp_path):
    """100 bytes and one file, as the fixture allows."""
    files.charge("ann", 0)
    files.charge("ann", 99)
    assert not files.full("ann")
    files.charge("ann", 1)
    assert files.full("ann")
    files.charge("ann", 0)  # nothing needs no room
    with pytest.raises(RequestError, match="more than 100 bytes together") as refused:
        files.charge("ann", 1)
    assert (refused.value.status, refused.value.code) == (413, "storage_full")
    assert not files.full("bob")
    with pytest.raises(RequestError, match="more than 100 bytes together"):
        files.charge("bob", 101)
    files.charge("bob", 100)
    with files.receive("bob"), pytest.raises(RequestError, match="has 1 files, and may have no more") as refused:
        files.receive("bob")
    assert (refused.value.status, refused.value.code) == (413, "too_many_files")
    files.count("bob", -100)
    with files.receive("bob") as receiving:
        receiving.write(b"x" * 60)
        file = receiving.keep("n" * 256, "batch")
    assert (file.filename, file.bytes, files._used["bob"], files._uploads["bob"]) == ("n" * 255, 60, 60, 0)
    with pytest.raises(RequestError, match="has 1 files"):
        files.receive("bob")
    files.delete(file)
    files.delete(file)  # again: nothing is given back twice
    assert files._used["bob"] == 0
    assert list((tmp_path / "files").iterdir()) == []


class Interrupted(Counter):
    """Numbers between whose reading and writing another thread does `task` once, where it may."""

    def __init__(self, task) -> None:
        super().__init__()
        self.task, self.thread = task, None

    def __getitem__(self, owner):
        value = super().__getitem__(owner)
        if self.thread is None:
            self.thread = in_thread(self.task)
            self.thread.join(0.2)  # where it must wait for us, it goes on afterwards
        return value


def test_bytes_that_two_threads_count_are_all_counted(files):
    files._used = Interrupted(lambda: files.count("ann", 30))
    files.count("ann", 30)
    files._used.thread.join()
    assert files._used["ann"] == 60


@pytest.mark.parametrize(
    ("books", "call", "refusal"),
    [
        ("_used", lambda files: files.charge("ann", 60), "storage_full"),
        ("_uploads", lambda files: files.receive("ann"), "too_many_files"),
    ],
)
def test_two_threads_do_not_share_the_last_room(files, books, call, refusal):
    outcomes = []

    def take():
        try:
            call(files)
            outcomes.append("taken")
        except RequestError as error:
            outcomes.append(error.code)

    interrupted = Interrupted(take)
    setattr(files, books, interrupted)
    take()
    interrupted.thread.join()
    assert sorted(outcomes) == sorted(["taken", refusal])
