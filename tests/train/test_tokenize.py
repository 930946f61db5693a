"""Texts to rows of tokens: nothing lost, nothing twice, boundaries right, bad files named."""

import json
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
from roofline.train.data.tokenize import ABOUT, documents, read_about, tokenize

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
    parts = [text.encode() + (b"\0" if end else b"") for text in texts]
    total = sum(map(len, parts))
    if total < length:
        with pytest.raises(ConfigError, match=f"have {total} tokens: a row has {length}"):
            tokenize(texts, folder, BYTES, "bytes", length, end=end)
        return
    done = tokenize(texts, folder, BYTES, "bytes", length, end=end)
    assert done.rows == total // length
    assert done.left_out == total % length
    assert done.tokens == total
    assert done.documents == sum(map(bool, parts))
    assert read_about(folder) == done
    shards = Shards(folder)
    rows = [shards[i] for i in range(len(shards))]
    stream = np.concatenate([row["tokens"] for row in rows])
    wanted = [t for text in texts for t in (*text.encode(), *([END] if end else []))]
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


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert list(documents([tmp_path])) == ["one", "two"]
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
        ("a.jsonl", b"[1]", "line 1 has no text in 'text'$"),
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
