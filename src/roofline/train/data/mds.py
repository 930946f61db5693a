"""Reads and writes MosaicML's MDS format, version 2: folders of shards with an index.

A shard is: uint32 samples | uint32 offsets[samples + 1] | JSON of its columns | samples, all little endian; offsets are
from the start of the file. A sample is: a uint32 size for each column of variable size, then the columns in the order
of their names. index.json lists the shards, with the sizes and hashes of their files, raw and compressed.
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

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import naming
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.data.mds_encodings import Encoding, encoding
from roofline.train.data.mds_index import INDEX, OFFSETS, Shard, digest
from roofline.train.data.shard_codecs import codec
from roofline.train.data.shard_files import ShardFiles
from roofline.train.data.shard_versions import ShardVersions
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError, Store

SIZE_LIMIT = 1 << 26  # default bytes of a shard
OPEN_SHARDS = 64  # most shards that are mapped at a time
OPEN_SHARE = 16  # mapped shards take at most 1/16 of a limited cache: each process keeps its own from removal


class Shards:
    """Reads a folder of shards, local or in an object store: the number of samples, and each by its number.

    Only one thread may use it at a time.

    Args:
        source: the folder with index.json, or its URL (see `storage.open`).
        cache: folder for shards that are fetched or unpacked; processes may share it, for any number of sources.
            Default: a temporary folder.
        limit: bytes of all files in the cache. If it is smaller than the shards that are read in turns (those of a
            block of `order.Stream`, say), each of them is fetched again and again.

    Raises ConfigError naming the folder, index, shard or sample that cannot be used; CapacityError if the limit is too
    small.
    """

    def __init__(self, source: str | Path, cache: Path | None = None, limit: int | None = None) -> None:
        self._arguments = source, cache, limit
        self._limit = limit
        self._open: OrderedDict[int, _MappedShard] = OrderedDict()
        store = open_store(source)
        self.source = store.url
        self.shards, key = _index(store)
        self.versions = ShardVersions(store, self.shards)
        if self.versions.digest:  # the cache's shards are of other versions otherwise
            key = hashlib.sha256(f"{key}{self.versions.digest}".encode()).hexdigest()[:32]
        self._files = ShardFiles(
            store=store, shards=self.shards, versions=self.versions, key=key, folder=cache, limit=limit
        )
        self._close = weakref.finalize(self, self._files.close)

    def __reduce__(self) -> tuple[type["Shards"], tuple[str | Path, Path | None, int | None]]:
        return Shards, self._arguments

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.shards else 0

    def __getitem__(self, number: int) -> dict[str, object]:
        """The columns of sample `number`, counted through all shards. Raises IndexError, ConfigError."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        at = int(np.searchsorted(self._ends, number, side="right"))
        return self._mapped(at).sample(number - int(self._ends[at - 1] if at else 0))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of samples in each shard, as `order.Stream` takes them."""
        return tuple(shard.samples for shard in self.shards)

    @property
    def identity(self) -> str:
        """A hash of what the index says of the samples: counts, columns, sizes and hashes of the unpacked shards.

        It is the same for a folder and its copy in a store. Without hashes in the index, other samples of equal sizes
        have the same.
        """
        raws = [(s.samples, s.columns, s.raw.size, sorted(s.raw.hashes.items())) for s in self.shards]
        return hashlib.sha256(json.dumps(raws).encode()).hexdigest()

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to fetch and unpack, in the background and in this order, the shards of samples that are read next.

        Each call replaces the requests of earlier ones that have not begun. Prefetching fills at most half of the
        cache's limit. It never raises: a failed shard is fetched again by the read, which raises.
        """
        samples = np.fromiter(numbers, np.int64)
        if len(samples) and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {len(self)}")
        shards = dict.fromkeys(np.searchsorted(self._ends, samples, side="right").tolist())
        self._files.prefetch([at for at in shards if at not in self._open])

    def close(self) -> None:
        """Unmap the shards, stop fetching, and remove the cache if it is a temporary folder."""
        while self._open:
            self._open.popitem()[1].close()
        self._close()

    def _mapped(self, at: int) -> "_MappedShard":
        if at in self._open:
            if self._files.is_current(at):
                self._open.move_to_end(at)
                return self._open[at]
            self._open.pop(at).close()
        if self._limit is not None:
            # Close others before opening: the cache cannot remove mapped files to make room.
            room = self._limit // OPEN_SHARE - self.shards[at].raw.size
            while self._open and sum(self.shards[other].raw.size for other in self._open) > room:
                self._open.popitem(last=False)[1].close()
        data, where = self._files.map(at)
        self._open[at] = _MappedShard(self.shards[at], data, where)
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return self._open[at]


def _index(store: Store) -> tuple[tuple[Shard, ...], str]:
    """The shards, and a key of their source and content, which names their folder in a cache."""
    path = f"{store.url}/{INDEX}"
    try:
        version, text = store.version(INDEX), store.get(INDEX)
        index = json.loads(text)
        if index["version"] != 2:
            raise UnsupportedError(f"{path} of version {index['version']}", "only MDS version 2 is read")
        with naming(path):
            shards = tuple(Shard.from_index(entry) for entry in index["shards"])
    except MissingError as error:
        raise ConfigError(f"{store.url} is no folder of shards: {INDEX} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of shards: {error!r}") from error
    here = store.path(INDEX)
    source = store.url if here is None else str(here.resolve())
    # Rows of a fixed length give shards of equal sizes: without the version another data set's could pass for ours.
    return shards, hashlib.sha256("\0".join((source, version, "")).encode() + text).hexdigest()[:32]


class _MappedShard:
    """The samples of a shard's memory map."""

    def __init__(self, shard: Shard, data: mmap.mmap, where: str) -> None:
        self.data, self.where = data, where
        head = 4 * (shard.samples + 2)
        if len(data) < head or int.from_bytes(data[:4], "little") != shard.samples:
            raise ConfigError(f"{where} does not hold the {shard.samples} samples of the index")
        self.offsets = np.frombuffer(data[4:head], "<u4").astype(np.int64)
        if self.offsets[0] < head or self.offsets[-1] > len(data) or (np.diff(self.offsets) < 0).any():
            raise ConfigError(f"{where} is damaged: the places of its samples do not ascend")
        self.columns = [(name, encoding(kind), size) for name, kind, size in shard.columns]

    def sample(self, number: int) -> dict[str, object]:
        data = self.data[self.offsets[number] : self.offsets[number + 1]]
        free = sum(size is None for _, _, size in self.columns)
        if len(data) < 4 * free:
            raise ConfigError(f"{self.where}: sample {number} is cut")
        sizes, at = iter(np.frombuffer(data[: 4 * free], "<u4").tolist()), 4 * free
        sample: dict[str, object] = {}
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
    """Writes a folder of shards. index.json is written last, so a folder without one is unfinished.

    Args:
        folder: a new or empty one.
        columns: the encoding of each, by name.
        compression: "zstd", "gz", "bz2" or "br", with a level ("zstd:7") or without, or "snappy"; only compressed files
            are written then.
        hashes: algorithms for raw and compressed files: hashlib's, or xxh32, xxh64, xxh128, xxh3_64, xxh3_128.
        size_limit: bytes of a shard; a larger sample gets a shard of its own.

    Raises ConfigError for columns or a sample that do not fit, or a folder that is not empty.
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

    def write(self, sample: Mapping[str, object]) -> None:
        """Append a sample, which has exactly the writer's columns."""
        if set(sample) != set(self._encodings):
            raise ConfigError(f"a sample has columns {sorted(sample)}, the shards have {list(self._encodings)}")
        parts = [(kind.encode(sample[name]), kind.size) for name, kind in self._encodings.items()]
        sizes = [len(data) for data, size in parts if size is None]
        data = np.array(sizes, "<u4").tobytes() + b"".join(data for data, _ in parts)
        if self._fixed + 4 + len(data) >= OFFSETS:
            raise ConfigError(f"a sample of {len(data):,} bytes: a shard holds less than 4 GiB")
        if self._samples and self._bytes + 4 + len(data) > min(self._about["size_limit"], OFFSETS - 1):
            self._flush()
        self._samples.append(data)
        self._bytes += 4 + len(data)
        self.samples += 1

    def close(self) -> None:
        """Write the last shard and the index. Raises ConfigError if there was no sample."""
        if self._samples:
            self._flush()
        if not self._shards:
            raise ConfigError(f"no sample was written to {self.folder}")
        text = json.dumps({"shards": self._shards, "version": 2}, sort_keys=True)
        write_atomically(self.folder / INDEX, text.encode())

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        offsets = np.cumsum([4 * (len(self._samples) + 2) + len(self._config), *map(len, self._samples)])
        head = np.array([len(self._samples)], "<u4").tobytes() + offsets.astype("<u4").tobytes()
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
