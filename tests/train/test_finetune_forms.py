"""Data for fine-tuning: every form of file is read, every form of record is recognised, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from roofline.common.errors import ConfigError
from roofline.train.data.record_files import data_files, records
from roofline.train.finetune.forms import FORMS, PUBMEDQA_TASK, read, recognise
from roofline.train.finetune.options import SAMPLE_FORMS
from roofline.train.finetune.prepare import Data, samples
from roofline.train.finetune.samples import Chat, Continuation, Sample, Text
from tests.train import sft

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


RECORDS: dict[str, tuple[dict[str, Any], str, Sample]] = {
    "openai": (
        {"messages": [{"role": "developer", "content": "s"}, user("q"), assistant("a"), user("r"), assistant("b")]},
        "messages",
        Chat(({"role": "system", "content": "s"}, user("q"), assistant("a"), user("r"), assistant("b")), (), (2, 4)),
    ),
    "openai, a weight of 0, and a last question": (
        {"messages": [user("q"), assistant("a") | {"weight": 0}, user("r"), assistant("b"), user("t")]},
        "messages",
        Chat((user("q"), assistant("a"), user("r"), assistant("b")), (), (3,)),
    ),
    "openai with tools": (
        {
            "messages": [
                user("q"),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
                assistant("two"),
            ],
            "tools": [TOOL],
        },
        "messages",
        Chat(
            (
                user("q"),
                {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                assistant("two"),
            ),
            (TOOL,),
            (1, 3),
        ),
    ),
    "openai's older calls": (
        {
            "messages": [user("q"), {"role": "assistant", "function_call": {"name": "add", "arguments": ""}}],
            "functions": [TOOL["function"]],
        },
        "messages",
        Chat(
            (
                user("q"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
                },
            ),
            (TOOL,),
            (1,),
        ),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s", "id": 4},
        "sharegpt",
        Chat(({"role": "system", "content": "s"}, user("q"), assistant("a")), (), (2,)),
    ),
    "sharegpt's calls": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "two"},
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        "sharegpt",
        Chat(
            (
                user("q"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "2"},
                assistant("two"),
            ),
            (TOOL,),
            (1, 3),
        ),
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1 1", "output": "2"},
        "alpaca",
        Chat((user("Add.\n\n1 1"), assistant("2")), (), (1,)),
    ),
    "alpaca without input, with history": (
        {"instruction": "Add.", "input": "", "output": "2", "system": "s", "history": [["q", "a"]]},
        "alpaca",
        Chat(({"role": "system", "content": "s"}, user("q"), assistant("a"), user("Add."), assistant("2")), (), (2, 4)),
    ),
    "dolly": (
        {"instruction": "Add.", "context": "1 1", "response": "2", "category": "sums"},
        "alpaca",
        Chat((user("Add.\n\n1 1"), assistant("2")), (), (1,)),
    ),
    "prompt and completion": ({"prompt": "1+1=", "completion": "2"}, "completion", Continuation("1+1=", "2")),
    "llm foundry": ({"prompt": "1+1=", "response": "2"}, "completion", Continuation("1+1=", "2")),
    "trl's conversations": (
        {"prompt": [user("q"), assistant("a"), user("r")], "completion": [assistant("b")]},
        "completion",
        Chat((user("q"), assistant("a"), user("r"), assistant("b")), (), (3,)),
    ),
    "question": ({"question": "q", "answer": "a"}, "question", Chat((user("q"), assistant("a")), (), (1,))),
    "pubmedqa": (
        {
            "QUESTION": "Is it?",
            "CONTEXTS": ["One.", "Two."],
            "LABELS": ["A", "B"],
            "MESHES": [],
            "YEAR": "2011",
            "reasoning_required_pred": "yes",
            "reasoning_free_pred": "yes",
            "final_decision": "maybe",
            "LONG_ANSWER": "It depends.",
        },
        "pubmedqa",
        Chat((user(f"One.\n\nTwo.\n\nIs it?\n\n{PUBMEDQA_TASK}"), assistant("maybe. It depends.")), (), (1,)),
    ),
    "pubmedqa's rows": (
        {
            "pubid": 1,
            "question": "Is it?",
            "context": {"contexts": ["One."], "labels": ["A"], "meshes": []},
            "long_answer": "It is.",
            "final_decision": "yes",
        },
        "pubmedqa",
        Chat((user(f"One.\n\nIs it?\n\n{PUBMEDQA_TASK}"), assistant("yes. It is.")), (), (1,)),
    ),
    "icl, language modeling": ({"context": "a b", "continuation": "c"}, "icl", Continuation("a b", " c")),
    "icl, multiple choice": (
        {"query": "Which?", "choices": ["x", "y"], "gold": 1},
        "icl",
        Continuation("Which?", " y"),
    ),
    "icl, answers": ({"context": "q\n", "answer": "a", "aliases": ["b"]}, "icl", Continuation("q\n", "a")),
    "text": ({"text": "Once."}, "text", Text("Once.")),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_recognised_and_read(name: str) -> None:
    record, form, expected = RECORDS[name]
    assert recognise(record, "f: line 1") == form
    assert read(record, "f: line 1", form) == expected


def test_a_form_that_is_named(tmp_path: Path) -> None:
    expected = Chat((user("q"), assistant("a")), (), (1,))
    assert read({"prompt": "q", "completion": "a"}, "f", "instruct") == expected
    assert tuple(FORMS) == SAMPLE_FORMS


@pytest.mark.parametrize(
    ("record", "form", "message"),
    [
        ({"a": 1, "b": 2}, None, "f: line 1 has the keys 'a', 'b', which are of no form that is known"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, None, "`roofline prefer` trains on"),
        ({"messages": []}, "messages", "no message of an assistant is there"),
        ({"messages": [user("q")]}, "messages", "no message of an assistant is there to train on"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages", "message 0: its role is the string 'judge'"),
        (
            {"messages": [user("q"), {"role": "assistant"}]},
            "messages",
            "message 1: it has no content: give it a text, or calls of tools, or remove",
        ),
        ({"messages": ["q"]}, "messages", "message 0 is the string 'q', not an object"),
        ({"conversations": [{"from": "judge", "value": "x"}]}, "sharegpt", "not one of system, human, gpt, "),
        (
            {"question": "q", "answer": None},
            None,
            "has the keys 'question', 'answer' \\(empty\\), which are of no form",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, assistant("a")]},
            "messages",
            "images and audio are not trained on",
        ),
        (
            {
                "messages": [
                    user("q"),
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "messages",
            "arguments of f: it is no JSON",
        ),
        ({"messages": [user("q"), assistant("a")], "tools": [{"parameters": {}}]}, "messages", "a tool has no name"),
        ({"instruction": "x", "output": 3}, "alpaca", "output is the number 3, not a text"),
        ({"prompt": "x", "completion": " "}, "completion", "completion is empty"),
        ({"prompt": "x", "completion": None}, None, "^f: line 1: completion is null, not a text$"),
        ({"prompt": "x", "response": None}, None, "^f: line 1: response is null, not a text$"),
        ({"prompt": "x"}, "completion", "^f: line 1: there is no completion: "),
        ({"prompt": "x", "response": None}, "instruct", "^f: line 1: response is null, not a text$"),
        ({"instruction": "x", "output": None}, None, "^f: line 1: output is null, not a text$"),
        ({"question": "x", "response": None}, "question", "^f: line 1: response is null, not a text$"),
        ({"context": "x", "continuation": None}, "icl", "^f: line 1: continuation is null, not a text$"),
        ({"conversation": None}, "sharegpt", "^f: line 1: conversation is null, not a list$"),
        ({"messages": None}, "messages", "^f: line 1: messages is null, not a list$"),
        ({"text": "x"}, "messages", "^f: line 1: there is no messages: give the record one"),
        ({"query": "x", "choices": ["a"], "gold": 1}, "icl", "^f: line 1: gold is the number 1, .* from 0 to 0$"),
        *(
            (
                {"query": "x", "choices": ["a", "b"], "gold": gold},
                "icl",
                f"^f: line 1: gold is {shown}, .* from 0 to 1$",
            )
            for gold, shown in [(True, "true"), (1.0, "the number 1.0"), (-1, "the number -1"), ("1", "the string '1'")]
        ),
        ({"query": "x", "choices": ["a", None], "gold": 0}, "icl", "choice 1 is null, not a text"),
        ({"query": "x", "choices": [], "gold": 0}, "icl", "gold is the number 0, .* there are none"),
        (
            {"messages": [user("q"), assistant("a") | {"train": False}]},
            "messages",
            "^f: line 1: its answer has a weight of 0 \\(or false under train, training or loss\\)",
        ),
        (
            {"conversations": [assistant("a") | {"weight": 0}, user("q"), assistant("b") | {"loss": False}]},
            "sharegpt",
            "^f: line 1: all 2 answers have a weight of 0",
        ),
        (
            {
                "messages": [
                    user("q"),
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]},
                ]
            },
            "messages",
            "arguments of f: the key 'a' appears twice",
        ),
        ({"QUESTION": "q", "CONTEXTS": "x", "final_decision": "no"}, "pubmedqa", "the contexts are no list of texts"),
        ("a text", "alpaca", "is a text file, --format is alpaca"),
    ],
)
def test_what_is_wrong_is_named(record: Any, form: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(record, "f: line 1", form or recognise(record, "f: line 1"))


def test_records_of_another_form_are_told_where_the_form_came_from(tmp_path: Path) -> None:
    other = {"messages": [user("q"), assistant("a")]}
    path = sft.write_lines(tmp_path / "d.jsonl", [{"question": "q", "answer": "a"}, other])
    told = rf"the form of all records was told from {path}: line 1: "
    with pytest.raises(ConfigError) as named:
        list(samples(Data((path,), 64)))
    assert str(named.value) == (
        f"{path}: line 2: there is no question: give the record one, or remove it; {told}questions with answers, as "
        "chats (--format question); --format names another"
    )
    (tmp_path / "z.txt").write_text("words")
    sft.write_lines(path, [other])
    with pytest.raises(ConfigError, match=rf"z.txt is a text file; {told}chats as .* \(--format messages\); --format"):
        list(samples(Data((path, tmp_path / "z.txt"), 64)))
    sft.write_lines(path, [other, other | {"messages": []}])
    with pytest.raises(ConfigError, match=r"line 2: no message of an assistant is there to train on$"):
        list(samples(Data((path,), 64)))
    sft.write_lines(path, [{"question": "q", "answer": "a"}, other])
    with pytest.raises(ConfigError, match=r"line 2: there is no question: .*") as named:
        list(samples(Data((path,), 64, form="question")))
    assert "told from" not in str(named.value), "the user said so"


ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "é"}]


def test_all_kinds_of_files_hold_the_same_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.json").write_text(json.dumps({str(at): row for at, row in enumerate(ROWS)}))
    (tmp_path / "d.json").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "e.json").write_text(json.dumps({"data": ROWS, "version": 1}))
    (tmp_path / "f.csv").write_text("prompt,completion\na,b\nc,é\n", "utf-8")
    for path in sorted(tmp_path.iterdir()):
        assert [record for _, record in records(path)] == ROWS, path
    (tmp_path / "g.txt").write_text("Once.\n")
    assert list(records(tmp_path / "g.txt")) == [(str(tmp_path / "g.txt"), "Once.\n")]


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file", "saved", "saved splits"])
def test_arrow_and_parquet(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="what reads Arrow and Parquet files")
    pytest.importorskip("pyarrow.parquet")
    messages = [[user("q"), assistant("a")], [user("r"), assistant("b")]]
    table = pyarrow.table({"messages": messages})
    path, place = tmp_path / "train.arrow", tmp_path
    if kind == "parquet":
        path = tmp_path / "train-00000-of-00001.parquet"
        pyarrow.parquet.write_table(table, path)
    else:
        folder = {"saved": tmp_path / "s", "saved splits": tmp_path / "d" / "train"}.get(kind, tmp_path)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "data-00000-of-00001.arrow"
        maker = pyarrow.ipc.new_file if kind == "arrow file" else pyarrow.ipc.new_stream
        with path.open("wb") as file, maker(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        if kind.startswith("saved"):
            place = tmp_path / ("s" if kind == "saved" else "d")
            (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
        if kind == "saved splits":
            (place / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
            with pytest.raises(ConfigError, match="has no split 'dev': name one of train, test with --split"):
                list(records(place, "dev"))
    assert [record["messages"] for _, record in records(place) if isinstance(record, dict)] == messages


def test_pubmedqa_as_it_is_published(tmp_path: Path) -> None:
    record, _, expected = RECORDS["pubmedqa"]
    path = tmp_path / "ori_pqal.json"
    path.write_text(json.dumps({"21645374": record, "16418930": record}, indent=4))
    assert [(form, sample) for _, form, sample in samples(Data((path,), 64))] == [("pubmedqa", expected)] * 2


def test_the_files_of_a_split(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test.jsonl", "notes.md"):
        (tmp_path / name).write_text(json.dumps(ROWS[0]) + "\n")
    assert [path.name for path in data_files(tmp_path)] == ["train-00000.jsonl", "train-00001.jsonl"]
    assert [path.name for path in data_files(tmp_path, "test")] == ["test.jsonl"]
    with pytest.raises(ConfigError, match="of the split 'dev'"):
        data_files(tmp_path, "dev")
    (tmp_path / "deep/train").mkdir(parents=True)
    (tmp_path / "deep/train/x.jsonl").write_text("{}")
    assert [path.name for path in data_files(tmp_path / "deep")] == ["x.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a"\n', "a.jsonl: line 2 is no JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl: line 1 is a list, not a JSON object"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("a.json", "{", "a.json: line 1 is no JSON"),
        ("a.xlsx", "x", "data is read from .jsonl"),
        ("a.parquet", "x", "is no .parquet file"),
        ("a.arrow", "x", "is no .arrow file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: Any, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        list(records(tmp_path / name))
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        list(records(tmp_path / "nothing"))
