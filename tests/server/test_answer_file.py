"""A file of requests answered without a server, over a fake engine: what is written, what a second run computes, what
is refused; the command's words and exit status."""

import gc
import itertools
import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.cli import main
from roofline.common.errors import ConfigError, RooflineError
from roofline.engine.adapter_info import AdapterInfo
from roofline.server import answer_file as module
from roofline.server.answer_file import Job, answer_file
from roofline.server.batches import lines as lines_module
from roofline.server.batches.endpoints import RouteReply
from roofline.server.batches.lines import AnswerFiles, RequestFile, Rules
from roofline.server.limits import Limits
from roofline.server.options import ServeOptions
from roofline.text.replies.reply_format import ReplyFormat
from tests.server.batch_client import line
from tests.server.conftest import BytesText, FakeEngine

URL = "/v1/completions"


class OfflineEngine(FakeEngine):
    def launch(self):
        """It is there."""


@pytest.fixture
def engine(monkeypatch):
    engine = OfflineEngine()
    monkeypatch.setattr(module, "make_engine", lambda options: engine)
    monkeypatch.setattr(module, "load_text", lambda *_: BytesText())
    return engine


def request(custom_id: str, prompt: str = "Hi", **changes) -> bytes:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, **changes}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode() + b"\n"


@pytest.fixture
def run(tmp_path, engine):
    """run(bytes of the requests, **changes of the job) -> progress at the end; answers in out.jsonl."""

    def answer(content: bytes, **changes):
        (tmp_path / "in.jsonl").write_bytes(content)
        job = {"requests": tmp_path / "in.jsonl", "answers": tmp_path / "out.jsonl", "errors": None, "at_once": 4}
        options = ServeOptions(
            model="tiny", pooling=changes.pop("pooling", "last"), adapter=changes.pop("adapter", None)
        )
        return answer_file(options, Job(**{**job, **changes}), lambda progress: None)

    return answer


def lines_of(path) -> list[dict]:
    return [json.loads(each) for each in path.read_bytes().splitlines()]


def test_a_second_run_computes_what_has_no_answer(run, engine, tmp_path):
    content = b"".join(request(str(i), f"line {i}") for i in range(9)) + request("bad", top_k=0.5)
    end = run(content)
    assert (end.done, end.before, end.errors, end.total) == (10, 0, 1, 10)
    out = tmp_path / "out.jsonl"
    whole = lines_of(out)
    assert sorted(each["custom_id"] for each in whole) == sorted([*map(str, range(9)), "bad"])
    ends = [at.end() for at in re.finditer(b"\n", out.read_bytes())]
    complete = out.read_bytes()
    for size in (ends[3], ends[3] + 1, ends[4] - 1, ends[8], 0):  # where kill -9 may have left it
        out.write_bytes(complete[:size])
        engine.submitted = []
        kept = complete[:size].count(b"\n")
        assert run(content).before == kept
        again = lines_of(out)
        assert again[:kept] == whole[:kept]
        assert sorted(each["custom_id"] for each in again) == sorted(each["custom_id"] for each in whole)
        assert len(engine.submitted) == sum(each["response"]["status_code"] == 200 for each in again[kept:])
    engine.submitted = []
    assert run(content).before == 10
    assert not engine.submitted


def test_errors_have_a_file_of_their_own(run, tmp_path):
    end = run(request("a") + request("b", n=0), errors=tmp_path / "errors.jsonl")
    assert (end.done, end.errors) == (2, 1)
    assert [each["custom_id"] for each in lines_of(tmp_path / "out.jsonl")] == ["a"]
    assert [each["response"]["status_code"] for each in lines_of(tmp_path / "errors.jsonl")] == [400]


@pytest.mark.parametrize("what", ["another line", "another model", "a foreign file", "the requests", "locked"])
def test_answers_of_something_else_are_left_as_they_are(run, engine, tmp_path, what):
    run(request("a"))
    out = tmp_path / "out.jsonl"
    before, content, changes = out.read_bytes(), request("a"), {}
    if what == "another line":
        content = request("a", "Ho")
    elif what == "another model":
        engine.description = engine.description.__class__("tiny", 300, 1000, "other", 12, 1024, 0.1, 7, exact=False)
    elif what == "a foreign file":
        out.write_bytes(before := b"my notes, without a line break")
    elif what == "the requests":
        changes = {"answers": tmp_path / "in.jsonl"}
    else:
        rules = Rules((URL,), Limits())
        other = AnswerFiles(RequestFile.scan(tmp_path / "in.jsonl", rules), out, None, b"tiny feedc0de")
    with pytest.raises(ConfigError, match="name another"):
        run(content, **changes)
    assert out.read_bytes() == before
    assert (tmp_path / "in.jsonl").read_bytes() == content
    if what == "locked":
        other.close()


def embedding(custom_id: str) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": "Hi"}}
    return json.dumps(line).encode() + b"\n"


def test_the_pooling_of_embeddings_is_chosen_and_another_one_does_not_go_on(run, engine):
    content = embedding("a")
    assert run(content, pooling="mean").errors == 0
    assert [params.pooling.kind for _, params in engine.submitted] == ["mean"]
    assert run(content, pooling="mean").before == 1
    with pytest.raises(ConfigError, match="with these settings"):
        run(content)


def test_lines_may_name_adapters(run, engine, tmp_path, monkeypatch):
    digests = {"/a": "first", "/b": "second"}

    async def load(path, max_bytes=None):
        return AdapterInfo(digests[path], path, 8, 14, 100)

    plain, used = engine.submit, []

    async def submit(ids, params, *, adapter="", **options):
        used.append(adapter)
        return await plain(ids, params, **options)

    monkeypatch.setattr(engine, "load_adapter", load)
    monkeypatch.setattr(engine, "submit", submit)
    both = request("a", model="own") + request("b")
    assert run(both, adapter=["own=/a"]).errors == 0
    assert sorted(used) == ["", "first"]
    assert run(both, adapter=["own=/a"]).before == 2, "it goes on"
    with pytest.raises(ConfigError, match="name another"):
        run(both, adapter=["own=/b"])
    (tmp_path / "out.jsonl").unlink()
    assert run(both).errors == 1, "a name that nothing has"


def test_a_setting_that_the_lines_do_not_depend_on_may_change(run, monkeypatch):
    run(request("a"))
    monkeypatch.setattr(BytesText, "chosen_format", ReplyFormat("mistral", thinks=False, takes_tools=True))
    assert run(request("a"), pooling="mean").before == 1


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
def test_answers_that_another_parser_read_are_not_gone_on_from(run, monkeypatch, url):
    content = json.dumps(line("a", url, max_tokens=None)).encode()
    run(content)
    monkeypatch.setattr(BytesText, "chosen_format", ReplyFormat("mistral", thinks=False, takes_tools=True))
    with pytest.raises(ConfigError, match="with these settings"):
        run(content)


@pytest.mark.parametrize("when", ["at a line", "at the end"])
def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on(run, engine, tmp_path, monkeypatch, caplog, when):
    content = b"".join(request(str(i)) for i in range(6))
    write, refused = lines_module._write_all, []

    def full(file, data=b""):
        if not isinstance(file, int) and len(refused) < 1 and b'"custom_id":"0"' in data:
            return write(file, data)
        refused.append(file)
        if data:
            file.write(data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((lines_module, "_write_all") if when == "at a line" else (lines_module.os, "fsync")), full)
        with pytest.raises(RooflineError, match=r"out\.jsonl: .*the disk is full.* run the same command") as error:
            run(content)
    assert "\n" not in str(error.value)
    del error
    gc.collect()
    assert "never retrieved" not in caplog.text
    kept = lines_of(tmp_path / "out.jsonl")
    assert len(kept) == (1 if when == "at a line" else 6)
    end = run(content)
    assert (end.done, end.before, end.errors) == (6, len(kept), 0)
    assert lines_of(tmp_path / "out.jsonl")[: len(kept)] == kept


def test_an_engine_that_is_gone_ends_the_run_and_leaves_what_was_answered(run, engine, tmp_path):
    async def failed():
        while len(engine.submitted) < 3:
            await module.asyncio.sleep(0.001)
        engine.up = False
        return "the engine process died"

    engine.gate.clear()
    engine.failed = failed
    with pytest.raises(RooflineError, match="Run the same command"):
        run(b"".join(request(str(i)) for i in range(5)))
    engine.up, engine.failed = True, FakeEngine().failed
    engine.gate.set()
    assert run(b"".join(request(str(i)) for i in range(5))).errors == 0


def test_few_lines_are_read_ahead(run, engine, monkeypatch):
    ahead, read = [], itertools.count(1)
    lines = RequestFile.lines

    def counted(self, rules, answered):
        for each in lines(self, rules, answered):
            ahead.append(next(read) - sum(answered))
            yield each

    monkeypatch.setattr(RequestFile, "lines", counted)
    run(b"".join(request(str(i)) for i in range(100)))
    assert max(ahead) == 4


@settings(max_examples=60, deadline=None)
@given(answered=st.lists(st.integers(1, 12), unique=True), cut=st.integers(0, 10_000))
def test_a_file_of_answers_is_read_up_to_where_it_is_whole(tmp_path_factory, answered, cut):
    folder = tmp_path_factory.mktemp("answers")
    (folder / "in").write_bytes(b"\n".join(request(f"{i} ü") for i in range(6)))  # every other line is blank
    rules = Rules((URL,), Limits())
    requests, out = RequestFile.scan(folder / "in", rules), folder / "out"
    lines = dict(requests.lines(rules, bytearray(len(requests.hashes))))
    assert list(lines) == [1, 3, 5, 7, 9, 11]
    files = AnswerFiles(requests, out, None, b"salt")
    wanted = [number for number in answered if number in lines]
    for number in wanted:
        files.write(number, lines[number], RouteReply(200, "id", b'{"a":"\\n"}'))
    files.close()
    whole = out.read_bytes()
    out.write_bytes(whole[:cut])
    again = AnswerFiles(requests, out, None, b"salt")
    again.close()
    kept = whole[:cut].count(b"\n")
    assert (again.completed, sum(again.answered)) == (kept, kept)
    assert [number for number, _ in requests.lines(rules, again.answered)] == sorted({*lines} - {*wanted[:kept]})
    assert out.read_bytes() == b"".join(whole.splitlines(keepends=True)[:kept])


def test_the_command_says_what_it_did_by_its_exit_status(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("roofline.cli.run.prepare.prepare", lambda *_: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setattr("roofline.cli.run.batch.PIPE_SECONDS", 0.0)
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ["batch", str(path), "-o", str(out), "-m", "tiny"]
    path.write_bytes(embedding("a"))
    assert main.main([*words, "--pooling", "mean"]) == 0
    assert engine.submitted[0][1].pooling.kind == "mean"
    out.unlink()
    capsys.readouterr()
    path.write_bytes(request("a") + request("b"))
    assert main.main(words) == 0
    said = capsys.readouterr().err
    assert "2 of 2 lines, 0 with errors" in said
    assert "2 answered, 0 with errors" in said
    assert "\x1b" not in said
    path.write_bytes(request("a", n=0))
    out.unlink()
    assert main.main(words) == 3
    out.unlink()
    path.write_bytes(request("a") + b"{\n" + request("a"))
    assert main.main(words) == 1
    assert "line 2: it is not JSON" in capsys.readouterr().err
    path.write_bytes(request("a") + request("b") + request("a"))
    assert main.main(words) == 1
    assert "line 3: custom_id is that of line 1 too" in capsys.readouterr().err
    assert not out.exists()
    assert main.main(words[:2]) == 1
    assert "-o is missing" in capsys.readouterr().err


def test_a_file_that_changed_while_it_was_answered_is_refused(tmp_path):
    line = json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {}}).encode() + b"\n"
    path, rules = tmp_path / "in", Rules((URL,), Limits())
    path.write_bytes(line)
    requests = RequestFile.scan(path, rules)
    assert [number for number, _ in requests.lines(rules, bytearray(1))] == [1]
    for changed, number in ((line.replace(b'"a"', b'"b"'), 1), (line + line.replace(b'"a"', b'"b"'), 2)):
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=f"line {number} changed while the file was being answered"):
            list(requests.lines(rules, bytearray(1)))
