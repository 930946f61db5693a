"""The folder of files and batches: what is in it beside them, and a disk that refuses for a while."""

import asyncio
from functools import partial

import msgspec
import openai
import pytest

from roofline.engine.pooling import Pooling
from roofline.server.batches import worker
from roofline.server.batches.endpoints import EMBEDDINGS
from roofline.server.batches.files import Files, StoredFile
from roofline.server.limits import Limits
from tests.server.batch_client import create, ended, line, lines_of, serve, stop_at, until


@pytest.fixture
def serving(make_context, tmp_path, monkeypatch):
    """serving(**context) -> (application, client of OpenAI's for it), until the block ends as a server does."""
    monkeypatch.setattr(worker, "STORAGE_SECONDS", 0.01)
    return partial(serve, make_context, tmp_path / "kept")


def test_files_of_somebody_else_stay_in_the_folder(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    identity = f"file-{'a' * 32}"
    foreign = ["settings.json", "table.data", "movie.mkv.part", f"{identity}.json.part", f"{'a' * 31}.part"]
    for name in foreign:
        (folder / name).write_text("precious")
    (folder / f"{identity}.data").write_text("without its facts")
    (folder / f"{'b' * 32}.part").write_text("half an upload")
    (folder / f"{identity}.json.123.part").write_text("half of its facts")
    Files(tmp_path, Limits()).close()
    assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)
    assert {(folder / name).read_text() for name in foreign} == {"precious"}


def test_facts_that_name_another_file_are_not_offered(tmp_path):
    folder, identity = tmp_path / "files", f"file-{'a' * 32}"
    folder.mkdir()
    (folder / f"{identity}.data").write_text("data")
    facts = StoredFile("../../secret", "", "in.jsonl", "batch", 4, 1)
    (folder / f"{identity}.json").write_bytes(msgspec.json.encode(facts))
    files = Files(tmp_path, Limits())
    files.close()
    assert files.of("") == []


def test_a_batch_whose_folder_is_away_waits_and_is_completed_then(serving, engine, tmp_path, caplog):
    folder, away = tmp_path / "kept" / "batches", tmp_path / "away"

    async def run():
        engine.gate.clear()
        async with serving() as (_, client):
            batch = await create(client, *(line(str(i)) for i in range(3)))
            await until(lambda: len(engine.open) == 3)
            folder.rename(away)
            engine.gate.set()
            await until(lambda: "waits" in caplog.text)
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            away.rename(folder)
            batch = await ended(client, batch)
            return batch, await lines_of(client, batch.output_file_id)

    batch, good = asyncio.run(run())
    assert (batch.status, batch.errors, sorted(good)) == ("completed", None, ["0", "1", "2"])
    assert len(engine.submitted) == 3  # what was answered was not computed again


def test_a_status_that_cannot_be_written_is_not_shown(serving, engine, monkeypatch):
    async def run():
        engine.gate.clear()
        async with serving() as (app, client):
            batch = await create(client, line("a"))
            await until(lambda: len(engine.open) == 1)
            records = app.state.batches.records
            record = records.get("", batch.id)
            before = msgspec.json.encode(record)
            monkeypatch.setattr(records, "save", full_disk)
            with pytest.raises(OSError, match="No space"):
                records.to(record, "finalizing", outcome="completed", output_file_id="file-1")
            return before, msgspec.json.encode(record)

    before, after = asyncio.run(run())
    assert after == before


def full_disk(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_batch_ends_once_its_files_can_be_kept(serving, engine, monkeypatch, at_the_end):
    attempts = []

    async def run():
        async with serving() as (app, client):
            place, name = (app.state.batches.records, "save") if at_the_end else (app.state.batches.files, "keep")
            method = getattr(place, name)

            def refused_twice(*words):
                if not at_the_end or words[0].status == "completed":
                    attempts.append(words)
                    if len(attempts) <= 2:
                        full_disk()
                return method(*words)

            stop_at(engine, 1)
            batch = await create(client, line("a"), line("b", n=0))
            await until(lambda: engine.open)
            monkeypatch.setattr(place, name, refused_twice)
            engine.gate.set()
            batch = await ended(client, batch)
            return await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)

    good, bad = asyncio.run(run())
    assert len(attempts) > 2
    assert (list(good), list(bad)) == (["a"], ["b"])


def test_a_cancel_that_cannot_be_written_is_refused_and_works_when_it_can(serving, engine, tmp_path, monkeypatch):
    async def run():
        async with serving(batch_at_once=1) as (app, client):
            stop_at(engine, 2)
            batch = await create(client, line("a"), line("b"))
            await until(lambda: len(engine.submitted) == 2)
            with monkeypatch.context() as patch:
                patch.setattr(app.state.batches.records, "save", full_disk)
                with pytest.raises(openai.APIStatusError, match="could not be stored") as refused:
                    await client.batches.cancel(batch.id)
            assert refused.value.status_code == 507
            assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
            batch = await ended(client, batch)
            return batch, await lines_of(client, batch.output_file_id)

    batch, good = asyncio.run(run())
    assert (batch.status, list(good)) == ("cancelled", ["a"])
    assert not engine.open


def test_a_batch_of_embeddings_does_not_go_on_with_another_pooling(serving, engine):
    body = {"model": "tiny", "input": "Hi"}
    lines = [{"custom_id": each, "method": "POST", "url": EMBEDDINGS, "body": body} for each in "ab"]

    async def run():
        stop_at(engine, 2)
        async with serving(batch_at_once=1) as (_, client):
            batch = await create(client, *lines, endpoint=EMBEDDINGS)
            await until(lambda: len(engine.submitted) == 2)
        engine.gate.set()
        async with serving(pooling=Pooling("mean")) as (_, client):
            return await ended(client, batch)

    batch = asyncio.run(run())
    assert (batch.status, batch.errors.data[0].code) == ("failed", "cannot_go_on")
    assert len(engine.submitted) == 2
