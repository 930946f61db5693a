"""MosaicML's MDS format, version 2: folders of shards with an index, read and written.

A shard: uint32 samples | uint32 places[samples + 1] | JSON of its columns | samples, all little endian; places count
from the start of the file. A sample: a uint32 size for each column without a fixed one, then the columns in the order
of their names. index.json lists the shards, with the bytes and hashes of their files, raw and compressed.
Source: the format of mosaicml-streaming 0.13 (Apache-2.0).
"""

import hashlib
import json
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.data.mds_encodings import Encoding, encoding
from roofline.train.data.mds_index import INDEX, Shard, codec, digest
from roofline.train.data.shard_files import ShardFiles
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError, Store

SIZE_LIMIT = 1 << 26  # bytes of a shard, unless said otherwise
OPEN_SHARDS = 64  # mapped at the same time
OPEN_SHARE = 16  # and of a limited cache, one in so many bytes: several processes may keep as much from removal


class Shards:
    """A folder of shards, here or in an object store, read: `len`, and the sample of any number. For one thread.

    Args:
        source: the folder with index.json, or its URL (see `store.open_store`).
        cache: where shards go that are fetched from elsewhere or only there compressed; processes may share it, for
            any number of sources. Default: a folder of its own, removed at the end.
        limit: bytes of all files in the cache. Less than the shards that are read in turns (those of a block of
            `order.Stream`, say) makes each of them be fetched again and again.

    Raises ConfigError on a folder, index, shard or sample that cannot be used, naming it; CapacityError on a limit that
    is too small.
    """

    def __init__(self, source: str | Path, cache: Path | None = None, limit: int | None = None) -> None:
        self._arguments = source, cache, limit
        self._limit = limit
        self._open: OrderedDict[int, _Open] = OrderedDict()
        store = open_store(source)
        self.source = store.url
        self.shards, key = _index(store)
        self._files = ShardFiles(store, self.shards, key, cache, limit)
        self._close = weakref.finalize(self, self._files.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, self._arguments

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shards else 0

    def __getitem__(self, number: int) -> JsonObject:
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

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin, in the background, to fetch and unpack the shards of the samples that will be read next, first ones
        first.

        Each call replaces what earlier ones asked for, except what is under way. At most half of the cache's limit is
        filled ahead of the reads. Nothing fails here: a read does what could not be done, and raises.
        """
        wanted = np.fromiter(numbers, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        shards = dict.fromkeys(np.searchsorted(self._ends, wanted, side="right").tolist())
        self._files.prefetch([at for at in shards if at not in self._open])

    def close(self) -> None:
        """Unmap the shards, end what is being fetched, remove a cache that nobody named."""
        while self._open:
            self._open.popitem()[1].close()
        self._close()

    def _opened(self, at: int) -> "_Open":
        if at in self._open:
            self._open.move_to_end(at)
            return self._open[at]
        if self._limit is not None:
            # Before: what is mapped cannot be removed to make room.
            room = self._limit // OPEN_SHARE - self.shards[at].raw.size
            while self._open and sum(self.shards[other].raw.size for other in self._open) > room:
                self._open.popitem(last=False)[1].close()
        data, where = self._files.map(at)
        self._open[at] = _Open(self.shards[at], data, where)
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return self._open[at]


def _index(store: Store) -> tuple[tuple[Shard, ...], str]:
    """The shards, and a key that changes with source and content: the name of their folder in a cache."""
    path = f"{store.url}/{INDEX}"
    try:
        version, text = store.version(INDEX), store.get(INDEX)
        index = json.loads(text)
        if index["version"] != 2:
            raise UnsupportedError(f"{path} of version {index['version']}", "only MDS version 2 is read")
        shards = tuple(Shard.from_index(entry) for entry in index["shards"])
    except MissingError as error:
        raise ConfigError(f"{store.url} is no folder of shards: {INDEX} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of shards: {error!r}") from error
    here = store.path(INDEX)
    source = store.url if here is None else str(here.resolve())
    # Rows of a fixed length make shards of equal sizes: without the version another data set's could be taken for ours.
    return shards, hashlib.sha256("\0".join((source, version, "")).encode() + text).hexdigest()[:32]


class _Open:
    """A mapped shard."""

    def __init__(self, shard: Shard, data: mmap.mmap, where: str) -> None:
        self.data, self.where = data, where
        head = 4 * (shard.samples + 2)
        if len(data) < head or int.from_bytes(data[:4], "little") != shard.samples:
            raise ConfigError(f"{where} does not hold the {shard.samples} samples of the index")
        self.places = np.frombuffer(data[4:head], "<u4").astype(np.int64)
        if self.places[0] < head or self.places[-1] > len(data) or (np.diff(self.places) < 0).any():
            raise ConfigError(f"{where} is damaged: the places of its samples do not ascend")
        self.columns = [(name, encoding(kind), size) for name, kind, size in shard.columns]

    def sample(self, number: int) -> JsonObject:
        data = self.data[self.places[number] : self.places[number + 1]]
        free = sum(size is None for _, _, size in self.columns)
        if len(data) < 4 * free:
            raise ConfigError(f"{self.where}: sample {number} is cut")
        sizes, at, sample = iter(np.frombuffer(data[: 4 * free], "<u4").tolist()), 4 * free, {}
        for name, kind, size in self.columns:
            end = at + (next(sizes) if size is None else size)
            if end > len(data):
                raise ConfigError(f"{self.where}: sample {number} is cut in {name!r}")
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
        self._pack = codec(compression)[0] if compression else None
        for algorithm in hashes:
            digest(algorithm, b"")
        self._about: JsonObject = {
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
        self._shards: list[JsonObject] = []
        self._samples: list[bytes] = []
        self._bytes = self._fixed = 8 + len(self._config)
        self.samples = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def write(self, sample: JsonMapping) -> None:
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

    def _file(self, name: str, data: bytes) -> JsonObject:
        hashes = {algorithm: digest(algorithm, data) for algorithm in self.hashes}
        return {"basename": name, "bytes": len(data), "hashes": hashes}
