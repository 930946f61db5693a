"""The compressions of MDS shards: packed whole, and unpacked piece by piece up to the size of the index.

A few bytes can unpack into gigabytes, so no more is unpacked than the index announces.
"""

import bz2
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from roofline.common.errors import ConfigError, UnsupportedError

PIECE = 1 << 20  # most bytes that are unpacked at a time; of Snappy, which has no stream here, all
Pack = Callable[[bytes], bytes]
Unpack = Callable[[bytes, int], Iterator[bytes]]  # from packed bytes and the size of the raw ones
_LEVELS = {
    "gz": (0, 9),
    "bz2": (1, 9),
    "zstd": (1, 22),
    "br": (0, 11),
    "snappy": None,
}  # least, most; None: it has none
_EXPANSION = 22  # Snappy makes less than that many bytes of one: 64 of 3 at most


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _FrameDecompressor(Protocol):
    """One frame's decompressor, as bz2 and zstd have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


def codec(compression: str) -> tuple[Pack, Unpack]:
    """The functions that pack and unpack with "zstd:7", "gz", "bz2:9", "br:11" or "snappy".

    Unpacking gives pieces of as many bytes in all as the raw size says, or raises OSError, EOFError or ValueError: for
    bytes that were not packed so, that go on behind their end, or that hold more or less.
    """
    name, _, level = compression.partition(":")
    if name not in _LEVELS:
        raise UnsupportedError(f"compression {compression!r}", "shards are not packed that way here", list(_LEVELS))
    levels = _LEVELS[name]
    if level and (levels is None or not level.isdigit() or not levels[0] <= int(level) <= levels[1]):
        has = "has no levels" if levels is None else f"has levels from {levels[0]} to {levels[1]}"
        raise ConfigError(f"compression {compression!r}: {level!r} is no level: {name} {has}")
    if name == "gz":
        return lambda data: gzip.compress(data, int(level or 9), mtime=0), _ungzip
    if name == "bz2":
        return (
            lambda data: bz2.compress(data, int(level or 9)),
            lambda data, size: _sized(_frames(bz2.BZ2Decompressor, data), size),
        )
    return _zstd(int(level or 3)) if name == "zstd" else _arrow(name, int(level or 11))


def _sized(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The pieces. Raises ValueError where they are not `size` bytes in all: as soon as they are more."""
    count = 0
    for piece in pieces:
        count += len(piece)
        if count > size:
            raise ValueError(f"it holds more than the {size:,} bytes of the index")
        yield piece
    if count < size:
        raise ValueError(f"it holds {count:,} bytes, and not the {size:,} of the index")


def _stream(file: _Readable) -> Iterator[bytes]:
    """The pieces of a file that unpacks itself as it is read."""
    while piece := file.read(PIECE):
        yield piece


def _frames(make: Callable[[], _FrameDecompressor], data: bytes) -> Iterator[bytes]:
    """The pieces of frames that follow each other, with nothing else between or behind them."""
    while data:
        decompressor, packed = make(), data
        while not decompressor.eof:
            piece = decompressor.decompress(packed, PIECE)
            if not piece and not packed and not decompressor.eof:
                raise EOFError("it is cut")
            packed = b""  # the decompressor keeps what it has not used
            yield piece
        data = decompressor.unused_data


def _ungzip(data: bytes, size: int) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            yield from _sized(_stream(file), size)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _arrow(name: str, level: int) -> tuple[Pack, Unpack]:
    """Brotli and Snappy's bare format, as mosaicml-streaming writes them."""
    try:
        import pyarrow
    except ImportError as error:
        raise UnsupportedError(name, "pyarrow is not installed", ["roofline[train]"]) from error
    arrow = pyarrow.Codec("brotli", compression_level=level) if name == "br" else pyarrow.Codec(name)

    def unbrotli(data: bytes, size: int) -> Iterator[bytes]:
        yield from _sized(_stream(pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "brotli")), size)

    def unsnappy(data: bytes, size: int) -> Iterator[bytes]:
        # Arrow trusts the size that it is told, and fills up what the data lacks.
        if (count := _snappy_size(data)) != size:
            raise ValueError(f"it holds {count:,} bytes, and not the {size:,} of the index")
        yield bytes(arrow.decompress(data, size, asbytes=True))

    return lambda data: bytes(arrow.compress(data, asbytes=True)), unbrotli if name == "br" else unsnappy


def _snappy_size(data: bytes) -> int:
    """The size of what was packed, with which Snappy's format begins: seven bits a byte, the lowest first."""
    size = 0
    for at, byte in enumerate(data[:5]):
        size |= (byte & 127) << (7 * at)
        if byte < 128:
            if size > _EXPANSION * len(data):
                raise ValueError(f"{len(data):,} bytes cannot hold the {size:,} that they begin with")
            return size
    raise ValueError("it does not begin with its size")


def _zstd(level: int) -> tuple[Pack, Unpack]:
    try:
        from backports import zstd  # Python 3.14 has it as compression.zstd
    except ImportError as error:
        raise UnsupportedError("zstd", "backports.zstd is not installed", ["roofline[train]"]) from error

    def unpack(data: bytes, size: int) -> Iterator[bytes]:
        try:
            yield from _sized(_frames(zstd.ZstdDecompressor, data), size)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from error

    return lambda data: bytes(zstd.compress(data, level)), unpack
