"""Turns text files into shards of rows of equal length, with documents packed one behind the other.

A row has the columns `tokens`, [length], and `documents`: how many of its tokens belong to each document in it, in
order. A document ends with the tokenizer's end token and may continue in the next row. Tokens that do not fill a last
row are left out, and counted.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.train.data.mds import ShardWriter
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

ABOUT = "tokens.json"  # the tokenizer and the sizes of the shards, in their folder
SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Written:
    """What `tokenize` wrote. vocabulary: hash of the tokenizer's. left_out: tokens that filled no row."""

    tokenizer: str
    vocab: int
    vocabulary: str
    length: int
    end: int | None
    documents: int
    tokens: int
    rows: int
    left_out: int


def documents(sources: Sequence[Path], column: str = "text") -> Iterator[str]:
    """The texts in files and folders, in the given order; the files of a folder, at any depth, by name.

    A plain text file is one document. A line of JSON or a row of Parquet has its document in `column`.

    Raises:
        ConfigError: a folder has no such files; a file, line or column is missing or is not text.
        UnsupportedError: Parquet files without pyarrow.
    """
    for source in sources:
        if source.is_dir():
            files = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
            if not files:
                raise ConfigError(f"{source} holds no {', '.join(SUFFIXES)}")
        elif source.is_file():
            files = [source]
        else:
            raise ConfigError(f"{source}: there is no such file or folder")
        for path in files:
            yield from _read_file(path, column)


def _read_file(path: Path, column: str) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from _read_parquet(path, column)
        return
    try:
        if path.suffix != ".jsonl":
            yield path.read_text("utf-8")
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _field(path, number, line, column)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _field(path: Path, number: int, line: str, column: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {number} is no JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get(column), str):
        there = f"; it has {', '.join(map(repr, entry))}" if isinstance(entry, dict) else ""
        raise ConfigError(f"{path}: line {number} has no text in {column!r}{there}")
    return str(entry[column])


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(str(path), "pyarrow is not installed", ["pip install pyarrow", ".jsonl"]) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise ConfigError(f"{path}: a row holds no text in {column!r}")
                yield value
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no Parquet file: {error}") from error


def tokenize(
    texts: Iterable[str],
    folder: Path,
    tokenizer: "Tokenizer",
    name: str,
    length: int,
    *,
    end: bool = True,
    compression: str | None = None,
    hashes: Sequence[str] = ("sha256",),
) -> Written:
    """Write the shards of `texts` into a new folder.

    Args:
        name: of the tokenizer, to be recorded in tokens.json.
        length: tokens of a row.
        end: append the tokenizer's end token to each document.

    Raises:
        ConfigError: the tokenizer has no end token; the texts do not fill a row; the folder is not empty.
    """
    if length < 2:
        raise ConfigError(f"length={length}: a row has at least 2 tokens")
    if end and not tokenizer.vocabulary.eos_ids:
        raise ConfigError(f"the tokenizer of {name} has no end token: leave it out with --no-end")
    end_id = tokenizer.vocabulary.eos_ids[0] if end else None
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    columns = {"tokens": f"ndarray:{dtype}:{length}", "documents": "ndarray:uint32"}
    writer = ShardWriter(folder, columns, compression=compression, hashes=hashes)
    packer = _Packer(length)
    count = 0
    for text in texts:
        ids = tokenizer.encode(text, add_special=False)
        if end_id is not None:
            ids = [*ids, end_id]
        count += bool(ids)
        for tokens, lengths in packer.add(np.array(ids, dtype)):
            writer.write({"tokens": tokens, "documents": np.array(lengths, np.uint32)})
    if not writer.samples:
        raise ConfigError(f"the texts have {packer.pending} tokens: a row has {length}")
    digest = hashlib.sha256(tokenizer.to_bytes()).hexdigest()
    total = writer.samples * length + packer.pending
    written = Written(name, tokenizer.vocab_size, digest, length, end_id, count, total, writer.samples, packer.pending)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ABOUT, json.dumps(asdict(written), indent=1) + "\n")
    writer.close()
    return written


def read_about(source: str | Path) -> Written:
    """What `tokenize` recorded about the shards in a folder or at a URL. Raises ConfigError."""
    try:
        return Written(**json.loads(open_store(source).get(ABOUT)))
    except MissingError as error:
        raise ConfigError(f"{source} was not written by `roofline data tokenize`: {ABOUT} is missing") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}/{ABOUT} is damaged: {error}") from error


class _Packer:
    """Cuts the documents, one behind the other, into rows. pending: tokens of the unfinished row."""

    def __init__(self, length: int) -> None:
        self.length, self.pending = length, 0
        self._parts: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
        """The rows that a document completes: tokens [length], and the number of tokens of each document in the row."""
        while len(ids):
            part, ids = ids[: self.length - self.pending], ids[self.length - self.pending :]
            self._parts.append(part)
            self.pending += len(part)
            if self.pending == self.length:
                yield np.concatenate(self._parts), [len(p) for p in self._parts]
                self._parts, self.pending = [], 0
