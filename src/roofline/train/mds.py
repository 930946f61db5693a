"""MosaicML's MDS format, version 2: folders of shards with an index, read and written.

A shard: uint32 samples | uint32 places[samples + 1] | JSON of its columns | samples, all little endian; places count
from the start of the file. A sample: a uint32 size for each column without a fixed one, then the columns in the order
of their names. index.json lists the shards, with the bytes and hashes of their files, raw and compressed.
Source: the format of mosaicml-streaming 0.13 (Apache-2.0).
"""

import bz2
import gzip
import hashlib
import json
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.train.mds_encodings import Encoding, encoding

INDEX = "index.json"
SIZE_LIMIT = 1 << 26  # bytes of a shard, unless said otherwise
OPEN_SHARDS = 64  # mapped at the same time


@dataclass(frozen=True)
class File:
    """A file that the index names."""

    basename: str
    size: int
    hashes: Mapping[str, str]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "File":
        """From the index. Raises ConfigError on a name that leads out of the folder."""
        name = str(entry["basename"])
        if name in ("", ".", "..") or name != Path(name).name or "\\" in name or "\0" in name:
            raise ConfigError(f"the index names {name!r}, which is no file of its folder")
        return cls(name, int(entry["bytes"]), {str(k): str(v) for k, v in (entry["hashes"] or {}).items()})

    def check(self, data: "bytes | mmap.mmap", where: Path, hashes: bool = True) -> None:
        """Raises ConfigError unless the bytes are those that were written."""
        if len(data) != self.size:
            raise ConfigError(f"{where} has {len(data):,} bytes instead of {self.size:,}: it is cut or another file")
        for algorithm, wanted in self.hashes.items() if hashes else ():
            if _hash(algorithm, data) != wanted:
                raise ConfigError(f"{where} is damaged: its {algorithm} is not the one in {INDEX}")


@dataclass(frozen=True)
class Shard:
    """One shard as the index describes it. packed: the compressed file, if there is one."""

    samples: int
    raw: File
    packed: File | None
    compression: str | None
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, fixed size

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Shard":
        """From the index. Raises ConfigError, UnsupportedError."""
        if (entry["version"], entry["format"]) != (2, "mds"):
            raise UnsupportedError(f"shard format {entry['format']} {entry['version']}", "only MDS version 2 is read")
        names, encodings, sizes = (entry[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        packed = File.of(entry["zip_data"]) if entry.get("zip_data") else None
        columns = tuple(zip(names, encodings, sizes, strict=True))
        samples = int(entry["samples"])
        if samples < 0:
            raise ConfigError(f"a shard of {samples} samples")
        return cls(samples, File.of(entry["raw_data"]), packed, entry["compression"], columns)


class Shards:
    """A folder of shards, read: `len`, and the sample of any number.

    Args:
        folder: with index.json.
        cache: where shards that are only there compressed are unpacked to; default: a folder of its own, removed at
            the end.

    Raises ConfigError on a folder, index, shard or sample that cannot be used, naming it.
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if cache is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="roofline-shards-")
            cache = Path(self._temporary.name)
        self._cache = cache
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._checked: set[int] = set()  # shards whose hashes were found right
        path = folder / INDEX
        try:
            index = json.loads(path.read_text())
            if index["version"] != 2:
                raise UnsupportedError(f"{path} of version {index['version']}", "only MDS version 2 is read")
            self.shards = tuple(Shard.of(entry) for entry in index["shards"])
        except FileNotFoundError as error:
            raise ConfigError(f"{folder} is no folder of shards: {INDEX} is missing") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no index of shards: {error!r}") from error

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shards else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The columns of sample `number`, counted through all shards. Raises IndexError, ConfigError."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        at = int(np.searchsorted(self._ends, number, side="right"))
        return self._opened(at).sample(number - int(self._ends[at - 1] if at else 0))

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each shard: what `order.Stream` is made of."""
        return tuple(shard.samples for shard in self.shards)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def close(self) -> None:
        """Unmap the shards."""
        while self._open:
            self._open.popitem()[1].close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _opened(self, at: int) -> "_Open":
        if at in self._open:
            self._open.move_to_end(at)
            return self._open[at]
        path = self._raw_file(at)
        self._open[at] = _Open(self.shards[at], path, at not in self._checked)
        self._checked.add(at)
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return self._open[at]

    def _raw_file(self, at: int) -> Path:
        shard = self.shards[at]
        for folder in (self.folder, self._cache):
            if (folder / shard.raw.basename).exists():
                return folder / shard.raw.basename
        if shard.packed is None or shard.compression is None:
            raise ConfigError(f"{self.folder / shard.raw.basename} is missing")
        path = self.folder / shard.packed.basename
        if not path.exists():
            raise ConfigError(f"{path} is missing")
        data = path.read_bytes()
        shard.packed.check(data, path)
        try:
            raw = _codec(shard.compression)[1](data)
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{path} cannot be unpacked: {error}") from error
        shard.raw.check(raw, path)
        self._checked.add(at)
        self._cache.mkdir(parents=True, exist_ok=True)
        target = self._cache / shard.raw.basename
        write_atomically(target, raw)
        return target


class _Open:
    """A mapped shard."""

    def __init__(self, shard: Shard, path: Path, hashes: bool) -> None:
        self.path = path
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ConfigError(f"{path} is empty")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        shard.raw.check(self.data, path, hashes)
        head = 4 * (shard.samples + 2)
        if len(self.data) < head or int.from_bytes(self.data[:4], "little") != shard.samples:
            raise ConfigError(f"{path} does not hold the {shard.samples} samples of the index")
        self.places = np.frombuffer(self.data[4:head], "<u4").astype(np.int64)
        if self.places[0] < head or self.places[-1] > len(self.data) or (np.diff(self.places) < 0).any():
            raise ConfigError(f"{path} is damaged: the places of its samples do not ascend")
        self.columns = [(name, encoding(kind), size) for name, kind, size in shard.columns]

    def sample(self, number: int) -> dict[str, Any]:
        data = self.data[self.places[number] : self.places[number + 1]]
        free = sum(size is None for _, _, size in self.columns)
        if len(data) < 4 * free:
            raise ConfigError(f"{self.path}: sample {number} is cut")
        sizes, at, sample = iter(np.frombuffer(data[: 4 * free], "<u4").tolist()), 4 * free, {}
        for name, kind, size in self.columns:
            end = at + (next(sizes) if size is None else size)
            if end > len(data):
                raise ConfigError(f"{self.path}: sample {number} is cut in {name!r}")
            sample[name] = kind.decode(data[at:end])
            at = end
        return sample

    def close(self) -> None:
        self.data.close()


class ShardWriter:
    """Writes a folder of shards; index.json comes last, so a folder without one was not finished.

    Args:
        folder: new or empty.
        columns: name -> encoding.
        compression: "zstd" or "gz" or "bz2", with a level ("zstd:7") or without; only the compressed files are kept.
        hashes: algorithms of hashlib, or xxh32, xxh64, xxh128, xxh3_64, xxh3_128; of raw and compressed files.
        size_limit: bytes of a shard; a sample that is larger has a shard of its own.

    Raises ConfigError: columns, or a sample that is not of them; a folder that holds something.
    """

    def __init__(
        self,
        folder: Path,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] = (),
        size_limit: int = SIZE_LIMIT,
    ) -> None:
        if not columns:
            raise ConfigError("shards need columns")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose a new folder, or remove it")
        self._encodings: dict[str, Encoding] = {name: encoding(columns[name]) for name in sorted(columns)}
        self.folder, self.compression, self.hashes = folder, compression, tuple(hashes)
        self._pack = _codec(compression)[0] if compression else None
        for algorithm in hashes:
            _hash(algorithm, b"")
        self._about: dict[str, Any] = {
            "column_encodings": [columns[name] for name in self._encodings],
            "column_names": list(self._encodings),
            "column_sizes": [kind.size for kind in self._encodings.values()],
            "compression": compression,
            "format": "mds",
            "hashes": list(hashes),
            "size_limit": size_limit,
            "version": 2,
        }
        self._config = json.dumps(self._about, sort_keys=True).encode()
        self._shards: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._bytes = self._fixed = 8 + len(self._config)
        self.samples = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample with exactly the columns."""
        if set(sample) != set(self._encodings):
            raise ConfigError(f"a sample has columns {sorted(sample)}, the shards have {list(self._encodings)}")
        parts = [(kind.encode(sample[name]), kind.size) for name, kind in self._encodings.items()]
        sizes = [len(data) for data, size in parts if size is None]
        data = np.array(sizes, "<u4").tobytes() + b"".join(data for data, _ in parts)
        if self._fixed + 4 + len(data) >= 1 << 32:
            raise ConfigError(f"a sample of {len(data):,} bytes: a shard holds less than 4 GiB")
        if self._samples and self._bytes + 4 + len(data) > min(self._about["size_limit"], (1 << 32) - 1):
            self._flush()
        self._samples.append(data)
        self._bytes += 4 + len(data)
        self.samples += 1

    def close(self) -> None:
        """Write the last shard and the index. Raises ConfigError when nothing was written."""
        if self._samples:
            self._flush()
        if not self._shards:
            raise ConfigError(f"no sample was written to {self.folder}")
        text = json.dumps({"shards": self._shards, "version": 2}, sort_keys=True)
        write_atomically(self.folder / INDEX, text.encode())

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        places = np.cumsum([4 * (len(self._samples) + 2) + len(self._config), *map(len, self._samples)])
        head = np.array([len(self._samples)], "<u4").tobytes() + places.astype("<u4").tobytes()
        raw = b"".join((head, self._config, *self._samples))
        name = f"shard.{len(self._shards):05}.mds"
        raw_data, zip_data = self._file(name, raw), None
        if self._pack is not None:
            packed = self._pack(raw)
            zip_data = self._file(f"{name}.{str(self.compression).partition(':')[0]}", packed)
            write_atomically(self.folder / zip_data["basename"], packed)
        else:
            write_atomically(self.folder / name, raw)
        self._shards.append(self._about | {"raw_data": raw_data, "samples": len(self._samples), "zip_data": zip_data})
        self._samples, self._bytes = [], self._fixed

    def _file(self, name: str, data: bytes) -> dict[str, Any]:
        hashes = {algorithm: _hash(algorithm, data) for algorithm in self.hashes}
        return {"basename": name, "bytes": len(data), "hashes": hashes}


def _hash(algorithm: str, data: "bytes | mmap.mmap") -> str:
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if algorithm in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"):
        try:
            import xxhash
        except ImportError as error:
            raise UnsupportedError(f"hash {algorithm!r}", "xxhash is not installed", ["roofline[train]"]) from error
        return str(getattr(xxhash, f"{algorithm}_hexdigest")(data))
    raise UnsupportedError(f"hash {algorithm!r}", "neither hashlib nor xxhash has it", ["sha256", "xxh64"])


def _codec(compression: str) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    """(pack, unpack) of "zstd:7", "gz", "bz2:9"."""
    name, _, level = compression.partition(":")
    if level and not level.isdigit():
        raise ConfigError(f"compression {compression!r}: {level!r} is no level")
    if name == "gz":
        return lambda data: gzip.compress(data, int(level or 9), mtime=0), gzip.decompress
    if name == "bz2":
        return lambda data: bz2.compress(data, int(level or 9)), bz2.decompress
    if name != "zstd":
        raise UnsupportedError(
            f"compression {compression!r}", "shards are not packed that way here", ["zstd", "gz", "bz2"]
        )
    try:
        from backports import zstd  # Python 3.14 has it as compression.zstd
    except ImportError as error:
        raise UnsupportedError("zstd", "backports.zstd is not installed", ["roofline[train]"]) from error

    def unpack(data: bytes) -> bytes:
        try:
            return bytes(zstd.decompress(data))
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from error

    return lambda data: bytes(zstd.compress(data, int(level or 3))), unpack
