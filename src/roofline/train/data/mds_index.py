"""The index of a folder of MDS shards: the files of each shard, and their hashes."""

import hashlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import describe, has_type
from roofline.common.json_types import JsonMapping

INDEX = "index.json"
OFFSETS = 1 << 32  # bytes that the offsets of a shard reach: it is smaller
_PACKED = 2 * OFFSETS  # what no compression makes of a shard


@dataclass(frozen=True)
class File:
    """A file that the index lists."""

    basename: str
    size: int
    hashes: Mapping[str, str]

    @classmethod
    def from_index(cls, entry: JsonMapping, bound: int = OFFSETS) -> "File":
        """The file of an entry. Raises ConfigError if its name leads out of the folder, or its size is none below the
        bound."""
        name = str(entry["basename"])
        if name in ("", ".", "..") or name != Path(name).name or "\\" in name or "\0" in name:
            raise ConfigError(f"the index names {name!r}, which is no file of its folder")
        size = _count(entry["bytes"], f"the bytes of {name!r}", bound)
        return cls(name, size, {str(k): str(v) for k, v in (entry["hashes"] or {}).items()})

    def check(self, data: bytes | mmap.mmap, where: object, hashes: bool = True) -> None:
        """Raise ConfigError unless the bytes have the size and the hashes of the index."""
        if len(data) != self.size:
            raise ConfigError(f"{where} has {len(data):,} bytes instead of {self.size:,}: it is cut or another file")
        for algorithm, expected in self.hashes.items() if hashes else ():
            if digest(algorithm, data) != expected:
                raise ConfigError(f"{where} is damaged: its {algorithm} is not the one in {INDEX}")


@dataclass(frozen=True)
class Shard:
    """A shard as the index describes it. packed: the compressed file, if there is one."""

    samples: int
    raw: File
    packed: File | None
    compression: str | None
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, fixed size

    @classmethod
    def from_index(cls, entry: JsonMapping) -> "Shard":
        """The shard of an entry. Raises ConfigError, UnsupportedError."""
        if (entry["version"], entry["format"]) != (2, "mds"):
            raise UnsupportedError(f"shard format {entry['format']} {entry['version']}", "only MDS version 2 is read")
        names, encodings, sizes = (entry[f"column_{what}"] for what in ("names", "encodings", "sizes"))
        packed = File.from_index(entry["zip_data"], _PACKED) if entry.get("zip_data") else None
        columns = tuple(zip(names, encodings, sizes, strict=True))
        if not all(isinstance(text, str) for text in (*names, *encodings, entry["compression"] or "")):
            raise ConfigError("names, encodings and compressions of shards are strings")
        for name, _, size in columns:
            if size is not None:
                _count(size, f"the size of column {name!r}", OFFSETS)
        raw = File.from_index(entry["raw_data"])
        samples = _count(entry["samples"], f"the number of samples of {raw.basename!r}", OFFSETS // 4)
        return cls(samples, raw, packed, entry["compression"], columns)


def digest(algorithm: str, data: bytes | mmap.mmap) -> str:
    """The hexadecimal hash of the data. Raises UnsupportedError for an algorithm that is not known here."""
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if algorithm in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"):
        try:
            import xxhash
        except ImportError as error:
            raise UnsupportedError(f"hash {algorithm!r}", "xxhash is not installed", ["roofline[train]"]) from error
        return str(getattr(xxhash, f"{algorithm}_hexdigest")(data))
    raise UnsupportedError(f"hash {algorithm!r}", "neither hashlib nor xxhash has it", ["sha256", "xxh64"])


def _count(value: object, noun: str, bound: int) -> int:
    """A number of the index. Raises ConfigError for one that no shard can have."""
    if not isinstance(value, int) or not has_type(value, int) or not 0 <= value < bound:
        raise ConfigError(f"{noun}: {describe(value)} is not a whole number from 0 to below {bound:,}")
    return value
