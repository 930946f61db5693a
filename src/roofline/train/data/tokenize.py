"""Turns text files into shards of rows of equal length, with documents packed one behind the other.

A row has the columns `tokens`, [length], and `documents`: how many of its tokens belong to each document in it, in
order. A document ends with the tokenizer's end token and may continue in the next row. Tokens that do not fill a last
row are left out, and counted.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.train.data.mds import ShardWriter
from roofline.train.data.record_fields import RecordFields
from roofline.train.data.record_files import READERS, records
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

ABOUT = "tokens.json"  # the tokenizer and the sizes of the shards, in their folder
_HASHES = ("sha256",)


@dataclass(frozen=True)
class Written:
    """What `tokenize` wrote. vocabulary: hash of the tokenizer's. end: the last token of each document; begin: the
    tokens before each; left_out: tokens that filled no row; empty: documents without a character, left out."""

    tokenizer: str
    vocab: int
    vocabulary: str
    length: int
    end: int | None
    documents: int
    tokens: int
    rows: int
    left_out: int
    begin: tuple[int, ...] = ()
    empty: int = 0


def documents(sources: Sequence[Path], column: str = "text", unused: Counter[str] | None = None) -> Iterator[str]:
    """The texts in files and folders, in the given order; the files of a folder, at any depth, by name.

    A plain text file is one document. A record of another file has its document in `column`; unused: gets its other
    keys, and how many records have them.

    Raises:
        ConfigError: a folder has no such files, a file's suffix is not known; a file, line or column is missing or is
            not text.
        UnsupportedError: Parquet or Arrow files without pyarrow.
    """
    unused = Counter() if unused is None else unused
    for source in sources:
        for path in _files(source):
            if path.suffix == ".parquet":
                yield from _read_parquet(path, column, unused)
                continue
            for where, record in records(path):
                yield record if isinstance(record, str) else _field(where, record, column, unused)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"{source}: there is no such file or folder")
    files = sorted(path for path in source.rglob("*") if path.suffix in READERS and path.is_file())
    if not files:
        raise ConfigError(f"{source} holds no {', '.join(READERS)}")
    return files


def _field(where: str, record: Mapping[str, object], column: str, unused: Counter[str]) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        raise ConfigError(f"{where} has no text in {column!r}; it has {', '.join(map(repr, record)) or 'nothing'}")
    fields = RecordFields.of_record(record)
    fields.get(column)
    unused.update(fields.unused)
    return value


def _read_parquet(path: Path, column: str, unused: Counter[str]) -> Iterator[str]:
    """Of the columns only the one that is wanted is read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(str(path), "pyarrow is not installed", ["pip install pyarrow", ".jsonl"]) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}")
        unused.update({name: file.metadata.num_rows for name in file.schema_arrow.names if name != column})
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise ConfigError(f"{path}: a row holds no text in {column!r}")
                yield value
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no Parquet file: {error}") from error


@dataclass(frozen=True)
class Around:
    """What stands around each document, as LLM Foundry's --bos_text and --eos_text have it: texts, in which special
    tokens are read as such.

    eos_text: None stands for the tokenizer's end token.
    """

    bos_text: str = ""
    eos_text: str | None = None

    def ids(self, tokenizer: "Tokenizer", name: str, end: bool) -> tuple[list[int], list[int]]:
        """The ids before and behind. name: of the tokenizer; end: whether there are any behind. Raises ConfigError."""
        before = tokenizer.encode(self.bos_text, add_special=False, parse_special=True)
        if not end:
            if self.eos_text is not None:
                raise ConfigError("--eos-text is put behind each document, --no-end puts nothing: leave one out")
            return before, []
        if self.eos_text is not None:
            return before, tokenizer.encode(self.eos_text, add_special=False, parse_special=True)
        if not tokenizer.vocabulary.eos_ids:
            raise ConfigError(f"the tokenizer of {name} has no end token: leave it out with --no-end")
        return before, [tokenizer.vocabulary.eos_ids[0]]


def tokenize(
    texts: Iterable[str],
    folder: Path,
    tokenizer: "Tokenizer",
    name: str,
    length: int,
    *,
    end: bool = True,
    around: Around = Around(),
    compression: str | None = None,
) -> Written:
    """Write the shards of `texts` into a new folder; texts without a character are left out.

    Args:
        name: of the tokenizer, to be recorded in tokens.json.
        length: tokens of a row.
        end: append the tokenizer's end token, or that of `around`, to each document.
        around: other texts around each document.

    Raises:
        ConfigError: the tokenizer has no end token; the texts do not fill a row; the folder is not empty.
    """
    if length < 2:
        raise ConfigError(f"length={length}: a row has at least 2 tokens")
    before, behind = around.ids(tokenizer, name, end)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    columns = {"tokens": f"ndarray:{dtype}:{length}", "documents": "ndarray:uint32"}
    writer = ShardWriter(folder, columns, compression=compression, hashes=_HASHES)
    packer = _Packer(length)
    count, empty = 0, 0
    for text in texts:
        if not text:
            empty += 1
            continue
        ids = [*before, *tokenizer.encode(text, add_special=False), *behind]
        count += bool(ids)
        for tokens, lengths in packer.add(np.array(ids, dtype)):
            writer.write({"tokens": tokens, "documents": np.array(lengths, np.uint32)})
    if not writer.samples:
        raise ConfigError(f"the texts have {packer.pending} tokens: a row has {length}")
    written = Written(
        tokenizer=name,
        vocab=tokenizer.vocab_size,
        vocabulary=hashlib.sha256(tokenizer.to_bytes()).hexdigest(),
        length=length,
        end=behind[-1] if behind else None,
        documents=count,
        tokens=writer.samples * length + packer.pending,
        rows=writer.samples,
        left_out=packer.pending,
        begin=tuple(before),
        empty=empty,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ABOUT, json.dumps(asdict(written), indent=1) + "\n")
    writer.close()
    return written


def read_about(source: str | Path) -> Written:
    """What `tokenize` recorded about the shards in a folder or at a URL. Raises ConfigError."""
    try:
        about = json.loads(open_store(source).get(ABOUT))
        return Written(**about | {"begin": tuple(about.get("begin", ()))})
    except MissingError as error:
        raise ConfigError(f"{source} was not written by `roofline data tokenize`: {ABOUT} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
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
