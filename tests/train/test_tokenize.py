"""Texts to rows of tokens: nothing lost, nothing twice, boundaries right, bad files named."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet
from roofline.train.data.mds import Shards
from roofline.train.data.tokenize import ABOUT, Around, documents, read_about, tokenize
from tests.command_line import call_roofline
from tests.train import sft

END = 256


def words(eos: tuple[int, ...] = (END,)) -> Tokenizer:
    """A token a byte, and an end token."""
    spelt = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    added = [AddedToken(END, "<|end|>", special=True)]
    return Tokenizer(Vocabulary("BPE", spelt, added=added, pipeline=byte_level_pipeline("gpt-2"), eos_ids=eos))


BYTES = words()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=20), st.integers(2, 50), st.booleans())
def test_rows_hold_every_document_once(tmp_path_factory, texts, length, end):
    folder = tmp_path_factory.mktemp("rows") / "s"
    full = [text for text in texts if text]
    parts = [text.encode() + (b"\0" if end else b"") for text in full]
    total = sum(map(len, parts))
    if total < length:
        with pytest.raises(ConfigError, match=f"have {total} tokens: a row has {length}"):
            tokenize(texts, folder, BYTES, "bytes", length, end=end)
        return
    done = tokenize(texts, folder, BYTES, "bytes", length, end=end)
    assert done.rows == total // length
    assert done.left_out == total % length
    assert done.tokens == total
    assert (done.documents, done.empty) == (len(full), len(texts) - len(full))
    assert read_about(folder) == done
    shards = Shards(folder)
    rows = [shards[i] for i in range(len(shards))]
    stream = np.concatenate([row["tokens"] for row in rows])
    wanted = [t for text in full for t in (*text.encode(), *([END] if end else []))]
    assert stream.tolist() == wanted[: done.rows * length]
    edges = np.cumsum([0, *map(len, parts)])
    for number, row in enumerate(rows):
        assert row["tokens"].dtype == np.uint16
        assert row["documents"].sum() == length
        inside = number * length + np.cumsum(row["documents"])[:-1]
        first, last = number * length, (number + 1) * length
        assert inside.tolist() == sorted({int(e) for e in edges if first < e < last})
    shards.close()


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    tokenize(["a<|end|>b" * 3], tmp_path / "s", BYTES, "bytes", 10)
    shards = Shards(tmp_path / "s")
    assert END not in np.concatenate([shards[i]["tokens"] for i in range(len(shards))]).tolist()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "b" / "two.txt", "two")
    write(tmp_path / "b" / "a" / "one.md", "one")
    write(tmp_path / "b" / "z.bin", "no text")
    lines = write(tmp_path / "c.jsonl", '{"text": "x", "body": "three"}\n\n{"body": "four"}\n')
    assert list(documents([tmp_path / "b"])) == ["one", "two"]
    assert list(documents([lines, tmp_path / "b" / "two.txt"], "body")) == ["three", "four", "two"]


TEXT = "The gate is blue."


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps([{"text": TEXT, "url": "u"}])),
        ("b.json", json.dumps({"text": TEXT, "url": "u"}) + "\n"),
        ("c.csv", f"text,url\n{TEXT},u\n"),
        ("d.jsonl", "\ufeff" + json.dumps({"text": TEXT, "url": "u"})),
        ("e.txt", "\ufeff" + TEXT),
    ],
)
def test_records_and_not_their_keys_are_documents(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    unused = Counter[str]()
    assert list(documents([tmp_path / name], unused=unused)) == [TEXT]
    assert list(documents([tmp_path])) == [TEXT], "a folder's files are read alike"
    assert unused == ({} if name.endswith("txt") else {"url": 1})


def test_files_of_another_kind_are_refused_by_their_suffix(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", "<html><body>The gate.</body></html>")
    with pytest.raises(ConfigError, match=r"page.html: data is read from .jsonl, .json, .csv"):
        list(documents([page]))


def test_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    done = tokenize(["", "abcdefg", ""], tmp_path / "s", BYTES, "bytes", 4)
    assert (done.documents, done.empty, done.tokens) == (1, 2, 8)


def test_texts_around_each_document(tmp_path: Path) -> None:
    """As LLM Foundry's --bos_text and --eos_text: special tokens in them count as such, and those of a text do not."""
    around = Around(bos_text="<|end|>B", eos_text="E<|end|>")
    done = tokenize(["a", "<|end|>"], tmp_path / "s", BYTES, "bytes", 5, around=around)
    assert (done.begin, done.end) == ((END, ord("B")), END)
    assert read_about(tmp_path / "s") == done
    shards = Shards(tmp_path / "s")
    tokens = np.concatenate([shards[at]["tokens"] for at in range(len(shards))]).tolist()
    first = [END, ord("B"), ord("a"), ord("E"), END]
    assert tokens == [*first, END, ord("B"), *b"<|end|>E"], "the last end is behind the last whole row"
    shards.close()
    assert tokenize(["abcd"], tmp_path / "t", words(()), "bytes", 4, end=False).end is None
    with pytest.raises(ConfigError, match="--eos-text is put behind each document, --no-end puts nothing"):
        tokenize(["abcd"], tmp_path / "u", BYTES, "bytes", 4, end=False, around=Around(eos_text="E"))


def test_what_an_older_version_recorded_is_read(tmp_path: Path) -> None:
    done = tokenize(["abcdefg"], tmp_path / "s", BYTES, "bytes", 4)
    about = json.loads((tmp_path / "s" / ABOUT).read_text())
    del about["begin"], about["empty"]
    (tmp_path / "s" / ABOUT).write_text(json.dumps(about))
    assert read_about(tmp_path / "s") == done


def test_the_command_says_what_it_did_not_use(tmp_path: Path) -> None:
    folder = sft.write_tokenizer(tmp_path / "words")
    lines = write(tmp_path / "in/d.jsonl", '{"text": "one two three four", "url": "u"}\n{"text": "", "url": "u"}\n')
    write(tmp_path / "in/page.html", "<html>")
    command = ["data", "tokenize", lines.parent, "-o", tmp_path / "rows", "--tokenizer", folder, "--length", 4]
    done = call_roofline(command)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "1 text without a character was left out",
        "not used: url (2 records)",
        "1 file was not read, by their suffix: page.html",
    ]
    learnt = call_roofline(["data", "learn-vocabulary", lines.parent, "-o", tmp_path / "learnt", "--size", 260])
    assert "not used: url (2 records)" in learnt.stdout.splitlines()


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    unused = Counter[str]()
    assert list(documents([tmp_path], unused=unused)) == ["one", "two"]
    assert unused == {"n": 2}
    for column, message in (("body", "it has text, n"), ("n", "no text in 'n'")):
        with pytest.raises(ConfigError, match=message):
            list(documents([tmp_path], column))
    write(tmp_path / "a.parquet", "no")
    with pytest.raises(ConfigError, match="is no Parquet file"):
        list(documents([tmp_path]))


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match="pyarrow is not installed"):
        list(documents([write(tmp_path / "a.parquet", "")]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\xff", "is not UTF-8 text: invalid start byte at byte 0"),
        ("a.jsonl", b'{"text": "x"}\n{', "line 2 is no JSON"),
        ("a.jsonl", b'{"txt": "x"}', "line 1 has no text in 'text'; it has 'txt'"),
        ("a.jsonl", b"[1]", "line 1 is a list, not a JSON object"),
        ("a.jsonl", b'{"text": 5}', "line 1 has no text"),
        ("None", b"", "holds no"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        list(documents([tmp_path]))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        list(documents([tmp_path / "nowhere"]))
    with pytest.raises(ConfigError, match="at least 2"):
        tokenize(["x"], tmp_path / "s", BYTES, "bytes", 1)
    with pytest.raises(ConfigError, match="no end token: leave it out"):
        tokenize(["x"], tmp_path / "s", words(()), "bytes", 4)
    write(tmp_path / "full" / "x", "x")
    with pytest.raises(ConfigError, match="not empty"):
        tokenize(["x" * 9], tmp_path / "full", BYTES, "bytes", 4)
    with pytest.raises(ConfigError, match=r"tokens\.json is missing"):
        read_about(tmp_path)
    assert not (tmp_path / "s").exists(), "nothing is left behind by a refusal"
    tokenize(["x" * 9], tmp_path / "s", BYTES, "bytes", 4)
    about = json.loads((tmp_path / "s" / ABOUT).read_text())
    for text in ("{", "[]", json.dumps(about | {"extra": 1})):
        (tmp_path / "s" / ABOUT).write_text(text)
        with pytest.raises(ConfigError, match="is damaged"):
            read_about(tmp_path / "s")
