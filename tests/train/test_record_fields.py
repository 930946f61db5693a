"""What of a record no reader uses: it stands in the prompt, is refused by its name, or is named with its count."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.bundle import load_text_of
from roofline.common.errors import ConfigError
from roofline.train.data.record_fields import RecordFields, unused_words
from roofline.train.data.record_files import records, skipped_files
from roofline.train.data.tokenize import documents
from roofline.train.finetune.forms import read, recognise
from roofline.train.finetune.prepare import ABOUT, Data, Preprocess, prepare, read_prepared, samples
from roofline.train.finetune.samples import Chat, Continuation
from roofline.train.preference.pair_files import pair
from roofline.train.preference.prepare import PAIRS, write_pairs
from tests.train import sft

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def of(record: dict[str, Any], form: str | None = None) -> tuple[Any, list[str]]:
    """The sample of a record, and what of it is not used."""
    fields = RecordFields(record)
    sample = read(fields, "f: line 7", form or recognise(record, "f: line 7"))
    return sample, fields.unused


def messages(record: dict[str, Any], form: str | None = None) -> list[dict[str, object]]:
    sample, unused = of(record, form)
    assert isinstance(sample, Chat)
    assert unused == []
    return [dict(message) for message in sample.messages]


@pytest.mark.parametrize(
    ("record", "form", "before"),
    [
        ({"question": "q", "context": "c", "answer": "a"}, None, [Q | {"content": "c\n\nq"}]),
        ({"question": "q", "contexts": ["c", "d"], "answer": "a"}, None, [Q | {"content": "c\n\nd\n\nq"}]),
        ({"question": "Of c: q", "context": "c", "answer": "a"}, None, [Q | {"content": "Of c: q"}]),
        ({"question": "q", "system": "s", "answer": "a"}, None, [SYSTEM, Q]),
        ({"question": "q", "system_prompt": "s", "response": "a"}, None, [SYSTEM, Q]),
        (
            {"prompt": "q", "system": "s", "context": "c", "completion": "a"},
            "instruct",
            [SYSTEM, {**Q, "content": "c\n\nq"}],
        ),
        ({"prompt": [Q], "system": "s", "completion": [A]}, None, [SYSTEM, Q]),
        ({"messages": [Q, A], "system": "s"}, None, [SYSTEM, Q]),
        ({"messages": [SYSTEM, Q, A], "system": "s"}, None, [SYSTEM, Q]),
        ({"messages": [Q, A], "system": "", "system_prompt": "s", "tools": [], "functions": []}, None, [SYSTEM, Q]),
        ({"instruction": "q", "output": "", "response": "a"}, None, [Q]),
        ({"conversation": [Q, A], "system_prompt": "s"}, None, [SYSTEM, Q]),
        ({"instruction": "q", "input": "", "context": "c", "output": "a"}, None, [Q | {"content": "q\n\nc"}]),
    ],
)
def test_what_belongs_to_a_prompt_stands_in_it(record: dict[str, Any], form: str | None, before: list[Any]) -> None:
    assert messages(record, form) == [*before, A]


@pytest.mark.parametrize(
    ("record", "form", "message"),
    [
        (
            {"prompt": "q", "completion": "a", "system": "s"},
            None,
            "system would not be read.*--format instruct makes a chat",
        ),
        ({"prompt": "q", "completion": "a", "context": "c"}, None, "context would not be read"),
        (
            {"question": "q", "answer": "b", "choices": ["x", "y"]},
            None,
            "choices would not be read.*write it into question",
        ),
        ({"question": "q", "answer": "a", "input": "i"}, None, "input would not be read"),
        ({"question": "q", "answer": "a", "context": {"x": 1}}, None, "context is an object, not a text"),
        ({"instruction": "q", "input": "i", "context": "c", "output": "a"}, None, "context would not be read"),
        ({"instruction": "q", "history": "Q: A:", "output": "a"}, None, "history is the string"),
        (
            {"messages": [SYSTEM, Q, A], "system": "other"},
            None,
            "system is another text than that of the first message",
        ),
        ({"messages": [Q, A], "images": ["x.png"]}, None, "images would not be read.*images and audio"),
        ({"context": "c", "continuation": "d", "system": "s"}, None, "system would not be read"),
        ({"prompt": "q", "completion": "a", "label": False}, None, "label is false, as in data for KTO"),
        ({"messages": [Q, A], "kto_tag": False}, None, "kto_tag is false, as in data for KTO"),
        ({"messages": [Q, A], "label": True}, None, "label is true, as in data for KTO"),
        ({"prompt": "q", "completion": "a", "label": "False"}, "instruct", "label is false, as in data for KTO"),
        ({"prompt": "q", "completion": "a", "label": 0}, None, "label is 0, as in data for KTO"),
        ({"prompt": "q", "completion": "a", "weight": 0}, None, "weight is 0, which says that the record is not"),
        ({"prompt": "q", "completion": "a", "weight": "0.0"}, "instruct", "weight is 0.0, which says"),
        ({"messages": [Q, A], "sample_weight": -1}, None, "sample_weight is -1, which says"),
        ({"messages": [Q, A], "is_bad": True}, None, "is_bad is true, which says"),
        ({"instruction": "q", "output": "a", "train": False}, None, "train is false, which says"),
        ({"text": "t", "weight": 0}, None, "weight is 0, which says"),
        ({"messages": [Q, A | {"weight": -1}]}, None, "message 1: its weight is -1, and nothing is trained away"),
        ({"messages": [Q, A | {"weight": "nan"}]}, None, "message 1: its weight is nan, and"),
        (
            {"messages": [Q, A | {"weight": "much"}]},
            None,
            "message 1: its weight is the string 'much', neither a number",
        ),
        (
            {"messages": [Q, A | {"train_detail": [{"begin_offset": 0}]}]},
            None,
            "message 1: its train_detail masks parts",
        ),
        (
            {"messages": [Q, A | {"tool_calls": {"name": "f"}}]},
            None,
            "message 1: its tool_calls are an object, not a list",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(record: dict[str, Any], form: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"f: line 7: {message}"):
        of(record, form)


def test_weights_of_records_that_are_trained_on_are_named() -> None:
    record = {"prompt": "q", "completion": "a", "weight": 0.5, "is_bad": False, "train": True, "loss": 0.0}
    assert of(record)[1] == ["weight", "is_bad", "train", "loss"]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"sample_weight": -2.0}, {"is_bad": True}])
def test_pairs_that_say_that_they_are_not_trained_on_are_refused(mark: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^f: line 7: {next(iter(mark))} is .* the record is not to be trained on"):
        pair({"prompt": "q", "chosen": "a", "rejected": "b"} | mark, "f: line 7", None)


def test_what_the_prompt_has_already_is_used() -> None:
    record = {"prompt": "Of c: x or y?", "completion": "x", "context": "c", "choices": ["x", "y"]}
    assert of(record) == (Continuation("Of c: x or y?", "x"), ["context", "choices"])


@pytest.mark.parametrize(
    ("flags", "answers"),
    [
        ([{"train": False}, {"train": True}], (3,)),
        ([{"training": False}, {}], (3,)),
        ([{"loss": False}, {"loss": True}], (3,)),
        ([{"weight": "0"}, {"weight": 1}], (3,)),
        ([{"weight": 0.0}, {"weight": "1.0"}], (3,)),
        ([{"train": "false"}, {"train": 1}], (3,)),
        ([{"train": True, "weight": 0}, {}], (3,)),
        ([{"train": None}, {"weight": None}], (1, 3)),
    ],
)
def test_answers_that_say_that_they_are_not_trained_on(flags: list[dict[str, Any]], answers: tuple[int, ...]) -> None:
    sample, unused = of({"messages": [Q, A | flags[0], Q, A | flags[1]]})
    assert (sample.answers, unused) == (answers, [])


def test_what_says_what_holds_anyway_is_used() -> None:
    assert of({"messages": [Q | {"weight": 0, "train": False}, A], "prompt": "q", "question": "q"})[1] == []
    assert of({"messages": [Q | {"weight": 1}, A], "prompt": "other"})[1] == ["prompt", "weight of messages"]


def test_what_else_is_there_is_named() -> None:
    record = {
        "messages": [Q | {"time": 1, "weight": 1}, A | {"weight": 0.5, "refusal": None}, Q],
        **{"url": "u", "empty": "", "none": None, "list": [], "zero": 0},
    }
    _, unused = of(record)
    assert unused == [
        *("url", "zero"),
        *("messages behind the last answer that is trained on", "time of messages", "weight of messages"),
        "weights of messages other than 0 and 1 (they count as 1)",
    ]
    assert unused_words({"url": 2000, "id": 2000, "note": 1}) == "url, id (2,000 records); note (1 record)"
    assert unused_words({str(n): 1 for n in range(11)}).endswith("7 and 3 more (1 record)")


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_files_of_all_kinds_are_counted(tmp_path: Path, kind: str) -> None:
    rows = [{"question": "q", "answer": "a", "url": "u", "note": "n" if number else ""} for number in range(3)]
    path = tmp_path / f"d.{kind}"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow", reason="what reads Parquet files")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path)
    elif kind == "csv":
        path.write_text("question,answer,url,note\nq,a,u,\nq,a,u,n\nq,a,u,n\n")
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows))
    unused = Counter[str]()
    assert len(list(samples(Data((path,), 64), unused))) == 3
    assert unused == {"url": 3, "note": 2}


@pytest.mark.parametrize(
    ("change", "version"),
    [
        (lambda about: about.pop("row_length"), "an earlier version"),
        (lambda about: about.update(more=1), "a later version"),
    ],
)
def test_rows_of_another_version_are_prepared_anew_unless_a_run_has_them(
    change: Callable[[dict[str, Any]], Any], version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = load_text_of(str(sft.write_tokenizer(tmp_path / "tokenizer")))
    data = Data((sft.write_lines(tmp_path / "d.jsonl", [sft.question(number) for number in range(4)]),), 64)
    out = tmp_path / "out"
    done = prepare(data, out, *words)
    about = json.loads((out / ABOUT).read_text())
    change(about)
    (out / ABOUT).write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=f"{out} was prepared by {version} of Roofline.* or remove it to have"):
        prepare(data, out, *words)
    assert prepare(data, out, *words, may_replace=True) == done == read_prepared(out)
    assert f"was prepared by {version} of Roofline and is prepared anew" in caplog.text
    for text in ("{", "[]", '{"key": "k", "held_out": null}'):
        (out / ABOUT).write_text(text)
        with pytest.raises(ConfigError, match=f"is missing or damaged: .*: remove {out} to have it prepared anew"):
            read_prepared(out)


def test_rows_know_what_was_not_used_and_what_stands_on_both_sides(tmp_path: Path) -> None:
    words = load_text_of(str(sft.write_tokenizer(tmp_path / "tokenizer")))
    place = tmp_path / "data"
    place.mkdir()
    repeated = [sft.question(number % 2) | {"url": "u"} for number in range(20)]
    sft.write_lines(place / "d.jsonl", [*repeated, sft.question(2)])
    (place / "page.html").write_text("<html>")
    (place / ".hidden").write_text("x")
    done = prepare(Data((place,), 64, share=0.25), tmp_path / "out", *words)
    assert (done.unused, done.skipped) == ({"url": 20}, ["page.html"])
    assert done.held_out is not None
    assert done.shared in (done.held_out.samples, done.held_out.samples - 1)
    assert read_prepared(tmp_path / "out") == done
    apart = sft.write_lines(tmp_path / "e.jsonl", [sft.question(1), sft.question(3)])
    other = prepare(Data((place,), 64, evaluation=(apart,)), tmp_path / "other", *words)
    assert other.shared == 1


@pytest.mark.parametrize("form", [{"question": "q", "answer": "a"}, {"question": "q", "chosen": "a", "rejected": "b"}])
def test_what_stands_beside_a_list_of_data_is_counted(form: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"version": 2, "system": "s", "note": "", "data": [form, form | {"url": "u"}]}))
    expected = {"version beside data": 2, "system beside data": 2, "url": 1}
    words = load_text_of(str(sft.write_tokenizer(tmp_path / "tokenizer")))
    if "chosen" in form:
        data = Data((path,), 64, form=f"{PAIRS} ")
        assert prepare(data, tmp_path / "out", *words, write_pairs).unused == expected
        return
    assert prepare(Data((path,), 64), tmp_path / "out", *words).unused == expected
    unused = Counter[str]()
    swap = Preprocess("swap", "swap", lambda record: record | {"answer": "other"})
    found = [sample for _, _, sample in samples(Data((path,), 64, preprocess=swap), unused)]
    assert ([each.messages[1]["content"] for each in found], unused) == (["other"] * 2, expected)  # type: ignore[union-attr]
    told = Counter[str]()
    assert list(documents([path], "question", told)) == ["q", "q"]
    assert told == expected | {"answer": 2}


def test_broken_files_are_named_where_they_are_broken(tmp_path: Path) -> None:
    for name, content, message in [
        ("a.json", '[\n {"a": 1},\n {"b": 2}\n {"c": 3}\n]\n', "line 4 column 2 is no JSON: Expecting ',' delimiter"),
        ("b.json", '[\n {"a": 1},\n]\n', "line 3 column 1 is no JSON"),
        ("c.json", '{"a": 1}\n{"b"\n', "line 2 is no JSON"),
        ("d.json", '{\n "a": 1\n "b": 2\n}', "line 3 column 2 is no JSON"),
        ("e.jsonl", '{"a": "é"}\n'.encode("utf-16"), "not UTF-8 text but UTF-16; convert it, as `iconv -f utf-16 -t"),
        ("f.csv", "a,b\n1,2\n".encode("utf-16-le"), "but UTF-16; convert it, as `iconv -f utf-16le -t utf-8` does"),
        ("g.txt", "ab".encode("utf-32"), "but UTF-32; convert it, as `iconv -f utf-32 -t utf-8` does"),
        ("i.csv", "a,b,a\n1,2,3\n", "the first line names 'a' twice, of which one would not be read"),
        ("j.jsonl", '{"a": 1}\n{"b": {"c": 1, "c": 2}}\n', "j.jsonl: line 2: the key 'c' appears twice in an object"),
        ("k.json", '[{"a": 1, "a": 1}]', "k.json: the key 'a' appears twice in an object"),
        ("h.csv", "a,b\n1,2\n1,2,3\n", "row 2 has more fields than the 2 of the first line"),
    ]:
        path = tmp_path / str(name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=str(message)):
            list(records(path))


def test_a_long_field_of_a_csv_is_read(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    long = "x" * 150_000
    path = tmp_path / "d.csv"
    path.write_text(f"text,id\n{long},1\nshort,2\n")
    rows = records(path)
    next(rows)
    assert csv.field_size_limit() == before, "the limit of the process is as it was, also between rows"
    assert [record["text"] for _, record in records(path) if isinstance(record, dict)] == [long, "short"]


def test_a_folder_of_saved_data_has_no_files_that_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "notes.html").write_text("")
    assert skipped_files(tmp_path) == []
    assert skipped_files(tmp_path / "notes.html") == []


@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
def test_a_record_that_nests_too_deep_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"prompt": "q", "completion": "a", "m": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ConfigError, match="nests too deep"):
        list(records(path))
