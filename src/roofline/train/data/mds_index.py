"""The index of a folder of MDS shards: the files of each shard, their hashes and their compression."""

import bz2
import gzip
import hashlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.json_types import JsonMapping

INDEX = "index.json"
Pack = Callable[[bytes], bytes]
Unpack = Callable[[bytes, int], bytes]  # from packed bytes and the size of the raw ones
_LEVELS = {
    "gz": (0, 9),
    "bz2": (1, 9),
    "zstd": (1, 22),
    "br": (0, 11),
    "snappy": None,
}  # least, most; None: it has none


@dataclass(frozen=True)
class File:
    """A file that the index lists."""

    basename: str
    size: int
    hashes: Mapping[str, str]

    @classmethod
    def from_index(cls, entry: JsonMapping) -> "File":
        """The file of an entry. Raises ConfigError if its name leads out of the folder."""
        name = str(entry["basename"])
        if name in ("", ".", "..") or name != Path(name).name or "\\" in name or "\0" in name:
            raise ConfigError(f"the index names {name!r}, which is no file of its folder")
        return cls(name, int(entry["bytes"]), {str(k): str(v) for k, v in (entry["hashes"] or {}).items()})

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
        packed = File.from_index(entry["zip_data"]) if entry.get("zip_data") else None
        columns = tuple(zip(names, encodings, sizes, strict=True))
        samples = int(entry["samples"])
        if samples < 0:
            raise ConfigError(f"a shard of {samples} samples")
        return cls(samples, File.from_index(entry["raw_data"]), packed, entry["compression"], columns)


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


def codec(compression: str) -> tuple[Pack, Unpack]:
    """The functions that pack and unpack with "zstd:7", "gz", "bz2:9", "br:11" or "snappy".

    Unpacking raises OSError, EOFError or ValueError for bytes that were not packed so.
    """
    name, _, level = compression.partition(":")
    if name not in _LEVELS:
        raise UnsupportedError(f"compression {compression!r}", "shards are not packed that way here", list(_LEVELS))
    levels = _LEVELS[name]
    if level and (levels is None or not level.isdigit() or not levels[0] <= int(level) <= levels[1]):
        has = "has no levels" if levels is None else f"has levels from {levels[0]} to {levels[1]}"
        raise ConfigError(f"compression {compression!r}: {level!r} is no level: {name} {has}")
    if name == "gz":
        return lambda data: gzip.compress(data, int(level or 9), mtime=0), lambda data, size: gzip.decompress(data)
    if name == "bz2":
        return lambda data: bz2.compress(data, int(level or 9)), lambda data, size: bz2.decompress(data)
    return _zstd(int(level or 3)) if name == "zstd" else _arrow(name, int(level or 11))


def _arrow(name: str, level: int) -> tuple[Pack, Unpack]:
    """Brotli and Snappy's bare format, as mosaicml-streaming writes them."""
    try:
        import pyarrow
    except ImportError as error:
        raise UnsupportedError(name, "pyarrow is not installed", ["roofline[train]"]) from error
    arrow = pyarrow.Codec("brotli", compression_level=level) if name == "br" else pyarrow.Codec(name)
    return (
        lambda data: bytes(arrow.compress(data, asbytes=True)),
        lambda data, size: bytes(arrow.decompress(data, size, asbytes=True)),
    )


def _zstd(level: int) -> tuple[Pack, Unpack]:
    try:
        from backports import zstd  # Python 3.14 has it as compression.zstd
    except ImportError as error:
        raise UnsupportedError("zstd", "backports.zstd is not installed", ["roofline[train]"]) from error

    def unpack(data: bytes, size: int) -> bytes:
        try:
            return bytes(zstd.decompress(data))
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from error

    return lambda data: bytes(zstd.compress(data, level)), unpack
