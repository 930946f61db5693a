"""Files and batches by OpenAI's own package, over a fake engine: answers to lines, idle time, restarts, owners."""

import asyncio
import json
from functools import partial

import httpx
import msgspec
import openai
import pytest

from roofline.common.errors import RequestError
from roofline.server.batches.files import page_of
from roofline.server.keys import Keys
from roofline.server.limits import Limits
from tests.server.batch_client import CHAT, RESPONSES, TEXT, create, ended, jsonl, line, lines_of, serve, stop_at, until

NAME = "".join(chr(97 + i % 26) for i in range(300))


@pytest.fixture
def serving(make_context, tmp_path):
    """serving(**context) -> (application, client of OpenAI's for it), until the block ends as a server does."""
    return partial(serve, make_context, tmp_path / "kept")


def lasting(answer):
    """An answer without its ids and times; keys stay in their order."""
    if isinstance(answer, list):
        return [lasting(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    passing = ("id", "created", "created_at", "completed_at")
    return {key: lasting(value) for key, value in answer.items() if key not in passing}


@pytest.mark.parametrize("url", [CHAT, TEXT, RESPONSES])
def test_lines_have_the_answers_that_the_server_gives(serving, url):
    async def run():
        async with serving() as (_, client):
            lines = [line("a", url), line("bad", url, top_k="many"), line("stream", url, stream=True)]
            batch = await create(client, *lines, endpoint=url, metadata={"of": "test"})
            assert (batch.status, batch.metadata) == ("validating", {"of": "test"})
            batch = await ended(client, batch)
            direct = await client.post(url.removeprefix("/v1"), body=lines[0]["body"], cast_to=httpx.Response)
            good, bad = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
            return batch, direct.json(), good, bad

    batch, direct, good, bad = asyncio.run(run())
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 1, 2)
    assert batch.completed_at
    assert batch.errors is None
    answer = good.pop("a")
    assert (good, answer["error"], answer["response"]["status_code"]) == ({}, None, 200)
    assert json.dumps(lasting(answer["response"]["body"])) == json.dumps(lasting(direct))
    assert bad["bad"]["response"]["status_code"] == 400
    assert bad["bad"]["response"]["body"]["error"]["param"] == "top_k"
    assert bad["stream"]["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("content", "number", "code"),
    [
        (jsonl(line("a")) + b'{"custom_id": "b"\n', 2, "invalid_json_line"),
        (jsonl(line("a")) + b'\n\n{"custom_id": "b"}\n', 4, "invalid_request"),
        (jsonl(line("a"), line("b", CHAT)), 2, "invalid_url"),
        (jsonl(line("a"), line("b"), line("a")), 3, "duplicate_custom_id"),
        (jsonl(line("a"), {**line("b"), "method": "GET"}), 2, "invalid_method"),
        (jsonl({**line("b"), "body": "text"}), 1, "invalid_body"),
        (jsonl({**line("b"), "more": 1}), 1, "invalid_request"),
        (jsonl(line("a"), line("b", prompt="x" * 9000)), 2, "line_too_long"),
        (b'{"a":' * 500 + b"\n", 1, "invalid_json_line"),
        (jsonl(*(line(str(i)) for i in range(5))), 5, "too_many_lines"),
        (b" \n\n", None, "empty_file"),
    ],
)
def test_a_line_that_is_no_request_fails_the_batch_by_its_number(serving, engine, content, number, code):
    async def run():
        async with serving(limits=Limits(body_bytes=4096, batch_lines=4)) as (_, client):
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
            return await ended(client, batch)

    batch = asyncio.run(run())
    assert batch.status == "failed"
    assert [(each.line, each.code) for each in batch.errors.data] == [(number, code)]
    assert not engine.submitted


def test_lines_wait_while_any_other_request_is_open(serving, engine):
    async def run():
        engine.gate.clear()
        async with serving() as (app, client):
            batch = await create(client, *(line(str(i), prompt=f"line {i}") for i in range(3)))
            await until(lambda: len(engine.open) == 3)
            request = asyncio.create_task(client.completions.create(model="tiny", prompt="a person's"))
            await until(lambda: bytes(engine.submitted[-1][0]) == b"a person's" and len(engine.open) == 1)
            await asyncio.sleep(0.05)
            submitted = [bytes(ids) for ids, _ in engine.submitted]
            assert submitted[-1] == b"a person's"
            assert (app.state.queue.waiting, app.state.queue.held) == (1, 0)
            engine.gate.set()
            await request
            return await ended(client, batch)

    batch = asyncio.run(run())
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
    assert len(engine.aborted) == 3  # each was begun anew


def test_a_fresh_server_goes_on_with_what_has_no_answer(serving, engine, tmp_path):
    async def run():
        prompts = [f"line {i}" for i in range(4)]
        async with serving(batch_at_once=1) as (_, client):
            stop_at(engine, 3)
            batch = await create(client, *(line(each, prompt=each) for each in prompts))
            await until(lambda: len(engine.submitted) == 3)
        folder = tmp_path / "kept" / "batches"
        written = (folder / f"{batch.id}.output").read_bytes()
        assert written.count(b"\n") == 2
        (folder / f"{batch.id}.output").write_bytes(written + b'{"id":"batch_req_3_0123456789abcdef","cus')  # killed
        (tmp_path / "kept" / "files" / f"{'0' * 32}.part").write_bytes(b"half an upload")
        engine.submitted = []
        engine.gate.set()
        async with serving() as (_, client):
            batch = await ended(client, await client.batches.retrieve(batch.id))
            return batch, prompts, (await client.files.content(batch.output_file_id)).content, written

    batch, prompts, content, written = asyncio.run(run())
    assert batch.status == "completed"
    assert [bytes(ids).decode() for ids, _ in engine.submitted] == prompts[2:]
    assert content.startswith(written)
    assert [json.loads(each)["custom_id"] for each in content.splitlines()] == prompts
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.suffix in (".part", ".output", ".errors")]


def test_a_batch_that_is_cancelled_keeps_its_answers(serving, engine):
    async def run():
        async with serving(batch_at_once=1) as (_, client):
            stop_at(engine, 2)
            batch = await create(client, line("a"), line("b"), line("c"))
            second = await create(client, line("d"))
            await until(lambda: len(engine.submitted) == 2)
            assert (await client.batches.cancel(second.id)).status == "cancelled"  # it had not begun
            batch = await client.batches.cancel(batch.id)
            assert batch.status == "cancelling"
            batch = await ended(client, batch)
            with pytest.raises(openai.ConflictError, match="cancelled"):
                await client.batches.cancel(batch.id)
            good, bad = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
            return batch, good, bad

    batch, good, bad = asyncio.run(run())
    assert (batch.status, list(good), sorted(bad)) == ("cancelled", ["a"], ["b", "c"])
    assert {each["error"]["code"] for each in bad.values()} == {"batch_cancelled"}
    assert not engine.open


def test_a_batch_whose_window_ends_says_which_lines_have_no_answer(serving, engine):
    async def run():
        engine.gate.clear()
        async with serving(batch_at_once=1) as (app, client):
            batch = await create(client, line("a"), line("b"))
            await app.state.batches.close()
            app.state.batches.records.get("", batch.id).expires_at = 1
        async with serving() as (app, client):  # its own record says tomorrow, so it waits
            record = app.state.batches.records.get("", batch.id)
            assert record.expires_at - record.created_at == 24 * 3600
            await until(lambda: len(engine.open) == 2)
            await app.state.batches.close()
            record.expires_at = 1
            app.state.batches.records.save(record)
        async with serving() as (_, client):
            batch = await ended(client, await client.batches.retrieve(batch.id))
            return batch, await lines_of(client, batch.error_file_id)

    batch, bad = asyncio.run(run())
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert {name: each["error"]["code"] for name, each in bad.items()} == dict.fromkeys("ab", "batch_expired")


KEYS = '[[keys]]\nname = "ann"\nkey = "a"\n[[keys]]\nname = "bob"\nkey = "b"\n'


def test_keys_see_their_own_files_and_batches_alone(serving, engine, tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)

    async def run():
        async with serving(key="a", keys=Keys(file=tmp_path / "keys.toml")) as (_, ann):
            batch = await ended(ann, await create(ann, line("a")))
            bob = ann.with_options(api_key="b")
            assert [each.id async for each in bob.files.list()] == [each.id async for each in bob.batches.list()] == []
            assert len([each async for each in ann.files.list()]) == 2
            for refused in (
                bob.files.retrieve(batch.input_file_id),
                bob.files.content(batch.output_file_id),
                bob.files.delete(batch.input_file_id),
                bob.batches.retrieve(batch.id),
                bob.batches.cancel(batch.id),
                bob.batches.create(input_file_id=batch.input_file_id, endpoint=TEXT, completion_window="24h"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await refused
            return engine.salts

    salts = asyncio.run(run())
    assert salts
    assert all(salts)  # the prefixes of its lines are the key's own


def test_lists_come_in_pages_and_files_go_when_they_are_deleted(serving, engine, tmp_path):
    async def run():
        engine.gate.clear()
        async with serving() as (_, client):
            batches = [await create(client, line("a")) for _ in range(3)]
            page = await client.batches.list(limit=2)
            assert [each.id for each in page.data] == [batches[2].id, batches[1].id]
            assert [each.id async for each in page] == [batch.id for batch in reversed(batches)]
            with pytest.raises(openai.ConflictError, match=batches[0].id):
                await client.files.delete(batches[0].input_file_id)
            engine.gate.set()
            for batch in batches:
                await ended(client, batch)
            files = [each.id async for each in client.files.list(limit=1, order="asc")]
            assert len(files) == 6
            for file in files:
                assert (await client.files.delete(file)).deleted
            assert [each async for each in client.files.list()] == []

    asyncio.run(run())
    assert list((tmp_path / "kept" / "files").iterdir()) == []


def form(*parts: tuple[str, str, bytes]) -> tuple[bytes, dict[str, str]]:
    body = b"".join(
        f'--xx\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"
        for name, more, data in parts
    )
    return body + b"--xx--\r\n", {"content-type": "multipart/form-data; boundary=xx"}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("", None),
        ("limit=1", None),
        ("limit=10000", None),
        ("limit=0", "limit: is not a number from 1 to 10000"),
        ("limit=10001", "limit: is not a number from 1 to 10000"),
        ("limit=-1", "limit: is not a number from 1 to 10000"),
        ("limit=٣", "limit: is not a number from 1 to 10000"),
        ("order=up", "order: is neither asc nor desc"),
        ("after=file-none", "after: there is no 'file-none'"),
        ("colour=red", "Unknown parameter: colour"),
    ],
)
def test_a_page_of_a_list_has_bounds_and_begins_after_what_is_there(call, make_context, tmp_path, query, problem):
    response = call("GET", f"/v1/files?{query}", context=make_context(batch_folder=tmp_path))
    if problem is None:
        assert (response.status_code, response.json()["data"], response.json()["has_more"]) == (200, [], False)
        return
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, query.partition("=")[0])
    assert error["message"].startswith(problem)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"files?{NAME}=1", f"Unknown parameter: {NAME[:100]}."),
        (f"batches?{NAME}=1", f"Unknown parameter: {NAME[:100]}."),
        (f"files?after={NAME}", f"after: there is no {NAME[:100]!r}."),
        (f"files/{NAME}", f"There is no file {NAME[:100]!r}."),
        (f"batches/{NAME}", f"There is no batch {NAME[:100]!r}."),
    ],
    ids=["files", "batches", "after", "file", "batch"],
)
def test_names_in_refusals_are_cut(call, make_context, tmp_path, path, message):
    refused = call("GET", f"/v1/{path}", context=make_context(batch_folder=tmp_path))
    error = refused.json()["error"]
    assert error["message"] == message
    assert refused.status_code == (404 if path in (f"files/{NAME}", f"batches/{NAME}") else 400)
    if error["code"] == "unknown_parameter":
        assert error["param"] == NAME[:100]


def test_a_page_ends_where_there_is_no_more():
    items = list("abcde")
    for after, begin in ((None, 0), ("a", 1), ("c", 3), ("e", 5)):
        for most in range(1, 7):
            assert page_of(items, str, after, most) == (items[begin : begin + most], begin + most < 5)
    with pytest.raises(RequestError, match="after: there is no 'f'"):
        page_of(items, str, "f", 1)


def test_a_batch_says_when_it_came_to_each_status(serving, engine, monkeypatch):
    """What was written to disk, in order: the ids of its files stand there before the files do."""
    written = []

    async def run():
        async with serving() as (app, client):
            records = app.state.batches.records
            save = records.save
            monkeypatch.setattr(
                records, "save", lambda batch: (written.append(msgspec.structs.asdict(batch)), save(batch))[1]
            )
            batch = await ended(client, await create(client, line("a")))
            broken = await ended(client, await create(client, line("a", CHAT)))
            stop_at(engine, 1)
            begun = await create(client, line("a"))
            await until(lambda: len(engine.submitted) == 1)
            begun = await ended(client, await client.batches.cancel(begun.id))
            return batch, broken, begun

    batch, broken, begun = asyncio.run(run())
    steps = {
        each.id: [(w["status"], w["outcome"], w["output_file_id"] is None) for w in written if w["id"] == each.id]
        for each in (batch, broken, begun)
    }
    assert steps[batch.id] == [
        ("validating", None, True),
        ("in_progress", None, True),
        ("finalizing", "completed", False),
        ("completed", "completed", False),
    ]
    assert steps[broken.id] == [
        ("validating", None, True),
        ("validating", "failed", False),
        ("failed", "failed", True),
    ]
    assert steps[begun.id] == [
        ("validating", None, True),
        ("in_progress", None, True),
        ("cancelling", None, True),
        ("cancelling", "cancelled", False),
        ("cancelled", "cancelled", True),
    ]
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.cancelling_at, batch.failed_at, broken.finalizing_at, begun.finalizing_at) == (None,) * 4


@pytest.mark.parametrize(("characters", "status"), [(0, 415), (1, 200), (70, 200), (71, 415)])
def test_a_boundary_of_an_upload_has_as_many_characters_as_mime_allows(
    call, make_context, tmp_path, characters, status
):
    body, boundary = form(FILE, PURPOSE)[0], b"b" * characters
    headers = {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
    content = body.replace(b"--xx", b"--" + boundary)
    response = call("POST", "/v1/files", context=make_context(batch_folder=tmp_path), content=content, headers=headers)
    assert response.status_code == status


FILE, PURPOSE = ("file", '; filename="../../etc/passwd"', b"{}"), ("purpose", "", b"batch")


@pytest.mark.parametrize(
    ("parts", "change", "status", "param"),
    [
        ([FILE, PURPOSE], lambda body: body, 200, None),
        ([FILE], lambda body: body, 400, "purpose"),
        ([PURPOSE], lambda body: body, 400, "file"),
        ([FILE, ("purpose", "", b"fine-tune")], lambda body: body, 400, "purpose"),
        ([FILE, FILE, PURPOSE], lambda body: body, 400, "file"),
        ([FILE, PURPOSE, ("expires_after", "", b"1")], lambda body: body, 400, "expires_after"),
        ([FILE, PURPOSE], lambda body: body[:-6], 400, None),
        ([FILE, PURPOSE], lambda body: b"{}", 400, None),
        ([("file", '; filename="f"', b"x" * 3000), PURPOSE], lambda body: body, 413, None),  # the key's room
        ([("file", '; filename="f"', b"x" * 9000), PURPOSE], lambda body: body, 413, None),  # the body's size
    ],
)
def test_an_upload_is_a_file_with_its_purpose_or_leaves_nothing(
    call, make_context, tmp_path, parts, change, status, param
):
    body, headers = form(*parts)
    context = make_context(batch_folder=tmp_path, limits=Limits(upload_bytes=8000, key_file_bytes=2000))
    response = call("POST", "/v1/files", context=context, content=change(body), headers=headers)
    assert response.status_code == status
    kept = sorted(path.suffix for path in (tmp_path / "files").iterdir())
    assert kept == ([".data", ".json"] if status == 200 else [])
    if status == 200:
        assert response.json()["filename"] == "../../etc/passwd"  # a label, and no path
    else:
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("parts", "param", "message"),
    [
        ([FILE, ("purpose", "", b"p" * 1024)], "purpose", f"purpose: {'p' * 50!r} is not supported"),
        ([FILE, ("purpose", "", b"p" * 1025)], None, "purpose: is longer than 1024 bytes."),
        ([FILE, PURPOSE, PURPOSE], "purpose", "purpose: is there twice."),
        ([FILE, PURPOSE, (NAME, "", b"")], NAME[:100], f"Unknown field: {NAME[:100]}."),
        ([FILE], "purpose", "purpose is missing."),
        ([PURPOSE], "file", "file is missing."),
    ],
    ids=["other", "long", "twice", "unknown", "no purpose", "no file"],
)
def test_a_form_that_is_no_upload_is_refused_by_its_field(call, make_context, tmp_path, parts, param, message):
    body, headers = form(*parts)
    error = call("POST", "/v1/files", context=make_context(batch_folder=tmp_path), content=body, headers=headers)
    assert error.status_code == 400
    assert error.json()["error"]["param"] == param
    assert error.json()["error"]["message"].startswith(message)
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("more", "name"), [('; filename="a.jsonl"', "a.jsonl"), ('; filename=""', "upload"), ("", "upload")]
)
@pytest.mark.parametrize("end", [b"--xx--\r\n", b"--xx--"])
def test_a_file_without_a_name_is_called_upload(call, make_context, tmp_path, more, name, end):
    body, headers = form(PURPOSE, ("file", more, b"{}"))
    content = body.removesuffix(b"--xx--\r\n").replace(b"Content-Disposition", b"cOnTeNt-dIsPoSiTiOn") + end
    context = make_context(batch_folder=tmp_path)
    told = call("POST", "/v1/files", context=context, content=content, headers=headers).json()
    assert (told["filename"], told["bytes"], told["purpose"], told["object"]) == (name, 2, "batch", "file")


def test_an_upload_is_bounded_while_it_arrives(call, make_context, tmp_path):
    sent = 0

    async def chunks():
        nonlocal sent
        yield form(FILE)[0][:-10]
        while sent < 1000:
            sent += 1
            yield b"x" * 1000

    context = make_context(batch_folder=tmp_path, limits=Limits(upload_bytes=8000))
    response = call("POST", "/v1/files", context=context, content=chunks(), headers=form()[1])
    assert response.status_code == 413
    assert sent < 12
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "721h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"colour": 1}, "colour"),
    ],
)
def test_fields_of_a_batch_that_cannot_be_honoured_are_named(call, make_context, tmp_path, change, param):
    body = {"input_file_id": "file-1", "endpoint": TEXT, "completion_window": "24h", **change}
    response = call("POST", "/v1/batches", context=make_context(batch_folder=tmp_path), json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_without_a_folder_the_routes_say_how_to_have_one(call):
    body = {"input_file_id": "file-1", "endpoint": TEXT, "completion_window": "24h"}
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
        response = call(method, path, json=body if method == "POST" else None)
        assert response.status_code == 501
        assert "--batch-folder" in response.json()["error"]["message"]


def test_answers_have_no_more_room_than_their_key(serving, engine):
    async def run():
        async with serving(limits=Limits(key_file_bytes=1500), batch_at_once=1) as (_, client):
            batch = await ended(client, await create(client, *(line(str(i)) for i in range(5))))
            return batch, await lines_of(client, batch.output_file_id)

    batch, good = asyncio.run(run())
    assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
    assert 0 < len(good) < 5
