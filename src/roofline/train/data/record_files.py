"""Reads the records of data sets: JSON, JSON lines, CSV, Parquet, Arrow and text files, folders of them, and those that
Hugging Face's datasets save."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.json_files import RepeatedKeyError, unique_keys
from roofline.common.json_types import JsonMapping
from roofline.common.mistaken_files import mistaken_for
from roofline.train.data.record_fields import RecordFields

Record = JsonMapping | str  # a text file is one record, a string
SPLIT = "train"  # read where a data set has several and none is named
_DICT, _STATE = "dataset_dict.json", "state.json"  # of saved Hugging Face data sets
_BINARY = (".parquet", ".arrow")
_PYARROW = ["pip install pyarrow", ".jsonl"]


def records(place: Path, split: str | None = None) -> Iterator[tuple[str, Record]]:
    """(where it stands, the record) of each record of a file or folder.

    Raises:
        ConfigError: there is no such file, folder or split, or something in it cannot be read.
        UnsupportedError: Parquet or Arrow files without pyarrow.
    """
    for path in data_files(place, split):
        yield from _read(path)


def data_files(place: Path, split: str | None = None) -> list[Path]:
    """The files that `records` reads, in order. Raises ConfigError."""
    if place.is_file():
        if split not in (None, SPLIT, place.stem):
            raise ConfigError(f"{place} is a file: it has no split {split!r}")
        return [place]
    if not place.is_dir():
        raise ConfigError(f"{place}: there is no such file or folder")
    if (place / _DICT).is_file():
        return _saved(place / _split_of(place, list(_json(place / _DICT)["splits"]), split))
    if (place / _STATE).is_file():
        return _saved(place)
    files = sorted(path for path in place.rglob("*") if path.suffix in READERS and path.is_file())
    if split is not None or any(_is_of(path, place, SPLIT) for path in files):
        files = [path for path in files if _is_of(path, place, split or SPLIT)]
    if not files:
        of = f" of the split {split!r}" if split else ""
        raise ConfigError(f"{place} holds no {', '.join(READERS)} file{of}")
    return files


def skipped_files(place: Path) -> list[Path]:
    """The files of a folder that no reader of data takes, by their suffix, without hidden ones."""
    if not place.is_dir() or (place / _DICT).is_file() or (place / _STATE).is_file():
        return []
    names = (path for path in place.rglob("*") if path.suffix not in READERS and path.is_file())
    return sorted(path for path in names if not any(part.startswith(".") for part in path.relative_to(place).parts))


def _is_of(path: Path, folder: Path, split: str) -> bool:
    """Whether a file belongs to a split, by the name of the file or of a folder that it is in."""
    names = (path.stem, *path.relative_to(folder).parts[:-1])
    return any(name == split or name.startswith((f"{split}-", f"{split}_", f"{split}.")) for name in names)


def _split_of(place: Path, splits: list[str], split: str | None) -> str:
    name = split or (SPLIT if SPLIT in splits or len(splits) != 1 else splits[0])
    if name not in splits:
        raise ConfigError(f"{place} has no split {name!r}: name one of {', '.join(splits)} with --split")
    return name


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of a data set that `save_to_disk` of Hugging Face's datasets wrote."""
    state = _json(folder / _STATE)
    files = [folder / str(each["filename"]) for each in state.get("_data_files") or ()]
    if not files or state.get("_indices_files"):
        raise ConfigError(f"{folder / _STATE} names no files, or picks rows of them: save it with flatten_indices()")
    return files


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = _parsed(path.read_text("utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no object")
    return value


def _read(path: Path) -> Iterator[tuple[str, Record]]:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(
            f"{path}: data is read from {', '.join(READERS)} files; name a plain text {path.stem or path.name}.txt"
        )
    try:
        _check_kind(path)
        if path.suffix not in _BINARY:
            _check_encoding(path)
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; "
            "convert it, as `iconv -f latin1 -t utf-8` does"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_kind(path: Path) -> None:
    """Raises ConfigError for what stands in place of the data by mistake: none is told of a file that is empty, which
    may lie beside others, and of a text that is a page of a web site."""
    mistake = mistaken_for(path, may_be_page=READERS[path.suffix] is _text)
    if mistake and path.stat().st_size:
        raise ConfigError(f"{path}: {mistake}")


def _check_encoding(path: Path) -> None:
    """Raises ConfigError for UTF-16 and UTF-32, which a file's first bytes tell."""
    with path.open("rb") as file:
        begin = file.read(4)
    wide = begin[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
    zeros = [byte == 0 for byte in begin]
    if wide or begin[:2] in (b"\xff\xfe", b"\xfe\xff") or zeros in ([False, True] * 2, [True, False] * 2):
        name = "utf-32" if wide else "utf-16" if begin[0] > 0xF0 else "utf-16be" if zeros[0] else "utf-16le"
        raise ConfigError(
            f"{path} is not UTF-8 text but {name[:6].upper()}; convert it, as `iconv -f {name} -t utf-8` does"
        )


def _parsed(text: str, where: str) -> Any:
    """Return the value of a text of JSON. Raises json.JSONDecodeError, also for one that nests too deep to be read, and
    ConfigError for an object that has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise ConfigError(f"{where}: {error} in an object, and one of the two would not be read") from error
    except RecursionError:
        raise json.JSONDecodeError("it nests too deep", text, 0) from None


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}: line {number}"
                try:
                    yield where, _object(where, _parsed(line, where))
                except json.JSONDecodeError as error:
                    place = f"{error.msg} at character {error.pos + 1}"
                    raise ConfigError(f"{where} is no JSON: {place}; mend the line, or get the file again") from error


def _object(where: str, value: object) -> Record:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a {type(value).__name__}, not a JSON object")
    return value


def _array(path: Path) -> Iterator[tuple[str, Record]]:
    """A list of records, which may stand under `data`, or an object of records by their names; lines of JSON in a file
    of that name are read too."""
    content = path.read_text("utf-8-sig")
    try:
        value = _parsed(content, str(path))
    except json.JSONDecodeError as error:
        if error.lineno > 1 and not _is_first_line_json(content):
            place = f"line {error.lineno} column {error.colno}"
            raise ConfigError(f"{path}: {place} is no JSON: {error.msg}") from error
        yield from _lines(path)
        return
    beside = set[str]()
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        file = RecordFields(value)
        value = file["data"]
        beside = {f"{key} beside data" for key in file.unread}
    if isinstance(value, dict) and value and all(isinstance(each, dict) for each in value.values()):
        yield from ((f"{path}: {name}", record) for name, record in value.items())
    elif isinstance(value, list):
        for number, record in enumerate(value):
            where = f"{path}: record {number}"
            fields = _object(where, record)
            if beside and not isinstance(fields, str):
                fields = RecordFields(fields)
                fields.remarks |= beside
            yield where, fields
    else:
        yield str(path), _object(str(path), value)


def _is_first_line_json(content: str) -> bool:
    first = next((line for line in content.split("\n") if line.strip()), "")
    try:
        return isinstance(_parsed(first, ""), dict)
    except json.JSONDecodeError:
        return False


def _rows_of_csv(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        for number in count(1):
            where = f"{path}: row {number}"
            try:
                row = _next_of_any_length(rows)
            except csv.Error as error:
                raise ConfigError(f"{path} is no CSV: {error}") from error
            if row is None:
                return
            names = rows.fieldnames or ()
            if number == 1 and len(set(names)) < len(names):
                double = next(name for name in names if list(names).count(name) > 1)
                raise ConfigError(f"{path}: the first line names {double!r} twice, of which one would not be read")
            if None in row:
                raise ConfigError(f"{where} has more fields than the {len(row) - 1} of the first line")
            yield where, row


def _next_of_any_length(rows: "csv.DictReader[str]") -> dict[str, object] | None:
    """The next row, None behind the last. The library's limit on a field, 131,072 characters, is of the whole process:
    it is lifted for this row alone."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return next(iter(rows), None)  # type: ignore[return-value]  # the key None is of surplus fields
    finally:
        csv.field_size_limit(limit)


def _text(path: Path) -> Iterator[tuple[str, Record]]:
    yield str(path), path.read_text("utf-8-sig")


def _batches(path: Path) -> Iterator[tuple[str, Record]]:
    """Rows of a Parquet or an Arrow file; of Arrow's two kinds of files, Hugging Face's datasets write streams."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(str(path), "pyarrow is not installed", _PYARROW) from error
    try:
        if path.suffix == ".parquet":
            batches: Any = pyarrow.parquet.ParquetFile(path).iter_batches()
        else:
            with pyarrow.memory_map(str(path)) as source:
                is_file = source.read(6) == b"ARROW1"
            opened = pyarrow.memory_map(str(path))
            batches = _of_file(pyarrow.ipc.open_file(opened)) if is_file else pyarrow.ipc.open_stream(opened)
        number = 0
        for batch in batches:
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", record
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no {path.suffix} file: {error}; get it again") from error


def _of_file(reader: Any) -> Iterator[Any]:
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Record]]]] = {
    ".jsonl": _lines,
    ".json": _array,
    ".csv": _rows_of_csv,
    ".parquet": _batches,
    ".arrow": _batches,
    ".txt": _text,
    ".md": _text,
    ".rst": _text,
}
