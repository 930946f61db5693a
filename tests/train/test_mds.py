"""MDS shards: read as the specification writes them, byte by byte; what we write we read; damage is named."""

import hashlib
import json
import struct
import tracemalloc
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.data import mds
from roofline.train.data.mds import Shards, ShardWriter
from roofline.train.data.mds_encodings import encoding
from roofline.train.data.shard_codecs import codec


def by_hand(folder: Path) -> None:
    """Two samples of {"n": int, "text": str, "tokens": ndarray:uint16}, put together from the format's description."""
    about = b"{}"  # readers do not look at it
    one = (
        struct.pack("<II", 2, 6) + struct.pack("<q", -5) + b"hi" + bytes([1 << 2 | 0, 2]) + struct.pack("<HH", 7, 65535)
    )
    two = struct.pack("<II", 0, 4) + struct.pack("<q", 1 << 40) + b"" + bytes([1 << 2 | 0, 1]) + struct.pack("<H", 3)
    first = 4 + 4 * 3 + len(about)
    places = struct.pack("<IIII", 2, first, first + len(one), first + len(one) + len(two))
    shard = places + about + one + two
    (folder / "shard.00000.mds").write_bytes(shard)
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {"sha1": hashlib.sha1(shard).hexdigest()}}
    entry = {
        "column_encodings": ["int", "str", "ndarray:uint16"],
        "column_names": ["n", "text", "tokens"],
        "column_sizes": [8, None, None],
        "compression": None,
        "format": "mds",
        "hashes": ["sha1"],
        "raw_data": raw,
        "samples": 2,
        "size_limit": 67108864,
        "version": 2,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"shards": [entry], "version": 2}))


def test_shards_written_by_hand_are_read(tmp_path: Path) -> None:
    by_hand(tmp_path)
    shards = Shards(tmp_path)
    assert len(shards) == 2
    assert shards.counts == (2,)
    first, second = shards[0], shards[1]
    assert (first["n"], first["text"], first["tokens"].tolist()) == (-5, "hi", [7, 65535])
    assert (second["n"], second["text"], second["tokens"].tolist()) == (1 << 40, "", [3])
    assert first["tokens"].dtype == np.uint16
    for number in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            shards[number]
    shards.close()


def test_what_we_write_is_the_specification(tmp_path: Path) -> None:
    """The same two samples give the same bytes, but for the JSON that readers skip."""
    (tmp_path / "hand").mkdir()
    by_hand(tmp_path / "hand")
    columns = {"tokens": "ndarray:uint16", "n": "int", "text": "str"}
    with ShardWriter(tmp_path / "ours", columns, hashes=["sha1"]) as writer:
        writer.write({"n": -5, "text": "hi", "tokens": np.array([7, 65535], np.uint16)})
        writer.write({"text": "", "n": 1 << 40, "tokens": np.array([3], np.uint16)})
    hand, ours = ((tmp_path / name / "shard.00000.mds").read_bytes() for name in ("hand", "ours"))
    about = len(ours) - len(hand)
    assert ours[:4] == hand[:4]
    shift = [place + about for place in struct.unpack("<III", hand[4:16])]
    assert struct.unpack("<III", ours[4:16]) == tuple(shift)
    assert ours[shift[0] :] == hand[18:]
    assert json.loads(ours[16 : shift[0]])["column_names"] == ["n", "text", "tokens"]
    index = [json.loads((tmp_path / name / "index.json").read_text())["shards"][0] for name in ("hand", "ours")]
    for entry in index:
        entry.pop("raw_data")
    assert index[0] == index[1]


samples = st.fixed_dictionaries(
    {
        "raw": st.binary(max_size=40),
        "text": st.text(max_size=20),
        "n": st.integers(-(2**63), 2**63 - 1),
        "many": st.integers(-(10**30), 10**30),
        "small": st.integers(0, 255),
        "real": st.floats(allow_nan=False),
        "any": st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5),
        "grid": st.tuples(st.integers(1, 3), st.integers(1, 300)).map(
            lambda s: np.arange(s[0] * s[1], dtype=np.int32).reshape(s)
        ),
        "fixed": st.just(np.array([[1.5, 2.5]], np.float16)),
        "free": st.sampled_from([np.array([1, 2], np.int8), np.array([[1.5]], np.float64)]),
    }
)
COLUMNS = {
    "raw": "bytes", "text": "str", "n": "int", "many": "str_int", "small": "uint8", "real": "float64", "any": "json",
    "grid": "ndarray:int32", "fixed": "ndarray:float16:1,2", "free": "ndarray",
}  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return bool(a == b)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(samples, min_size=1, max_size=12),
    st.sampled_from([None, "zstd", "zstd:9", "gz:1", "bz2", "br:1", "snappy"]),
    st.sampled_from([(), ("sha256", "xxh64")]),
    st.sampled_from([1, 700, 1 << 20]),
)
def test_everything_written_comes_back(tmp_path_factory, written, compression, hashes, limit):
    folder = tmp_path_factory.mktemp("mds")
    with ShardWriter(folder / "s", COLUMNS, compression=compression, hashes=hashes, size_limit=limit) as writer:
        for sample in written:
            writer.write(sample)
    shards = Shards(folder / "s")
    assert len(shards) == len(written) == sum(shards.counts)
    assert limit > 1 or shards.counts == (1,) * len(written)
    for wanted, got in zip(written, (shards[i] for i in range(len(shards))), strict=True):
        assert got.keys() == wanted.keys()
        assert all(equal(wanted[name], got[name]) for name in wanted)
    shards.close()


def test_decimals_and_named_numbers() -> None:
    for name, value in (("str_decimal", Decimal("1.10")), ("str_float", 0.1), ("int16", -3), ("float32", 0.5)):
        kind = encoding(name)
        assert kind.decode(kind.encode(value)) == value


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("pkl", UnsupportedError, "unpickling runs"),
        ("jpeg:90", UnsupportedError, "pictures"),
        ("jpegarray", UnsupportedError, "pictures are not read"),
        ("list[pil]", UnsupportedError, "pictures are not read"),
        ("strr", ConfigError, "did you mean 'str'"),
        ("int:4", ConfigError, "no MDS encoding"),
        ("ndarray:int31", ConfigError, "no dtype of it"),
        ("ndarray:int32:0", ConfigError, "at least 1"),
        ("ndarray:int32:a", ConfigError, "no shape"),
    ],
)
def test_encodings_that_are_refused(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        encoding(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int", 1 << 63), ("int", True), ("int", "1"), ("str", b"x"), ("bytes", "x"), ("uint8", 256), ("uint8", 1.5),
        ("json", {1, 2}), ("ndarray:int32", np.zeros(2)), ("ndarray", np.zeros(0)), ("ndarray", np.float32(1)),
        ("ndarray", np.array(["x"])), ("ndarray:int8:2", np.zeros(3, np.int8)),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="MDS encoding"):
        encoding(name).encode(value)


@pytest.mark.parametrize("name", [*COLUMNS.values(), "str_decimal", "int16"])
def test_no_bytes_of_a_sample_do_more_than_raise(name: str) -> None:
    rng, kind = np.random.default_rng(0), encoding(name)
    for length in [*range(20), 100]:
        for _ in range(20):
            with suppress(ConfigError):
                kind.decode(rng.bytes(length))


def test_damage_is_named(tmp_path: Path) -> None:
    by_hand(tmp_path)
    path, index = tmp_path / "shard.00000.mds", (tmp_path / "index.json").read_text()
    whole = path.read_bytes()
    for data, message in (
        (whole[:-1], "bytes instead of"),
        (whole[:-1] + b"x", "its sha1 is not"),
        (b"", "is empty"),
        (None, "is missing"),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            Shards(tmp_path)[0]
    unhashed = json.loads(index)
    unhashed["shards"][0]["raw_data"]["hashes"] = {}
    (tmp_path / "index.json").write_text(json.dumps(unhashed))
    for at, value, message in (
        (0, 3, "does not hold the 2 samples"),
        (0, 2 + (1 << 24), "does not hold the 2 samples"),
        (8, 1 << 30, "do not ascend"),
        (4, 5, "do not ascend"),
        (18, 999, "cut in"),
    ):
        path.write_bytes(whole[:at] + struct.pack("<I", value) + whole[at + 4 :])
        with pytest.raises(ConfigError, match=message):
            Shards(tmp_path)[0]
    path.write_bytes(whole)
    for change, message in (
        ({"basename": "../shard.00000.mds"}, "no file of its folder"),
        ({"basename": "/etc/passwd"}, "no file of its folder"),
        *(({"bytes": size}, "is not a whole number from 0 to below") for size in (-1, 10**10, 10**20, 1.5, "9", None)),
    ):
        bad = json.loads(index)
        bad["shards"][0]["raw_data"] |= change
        (tmp_path / "index.json").write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match=message):
            Shards(tmp_path)
    for text in ("", "[]", "{}", '{"version": 2, "shards": [{}]}', '{"version": 2, "shards": 5}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(ConfigError, match="no index of shards"):
            Shards(tmp_path)
    (tmp_path / "index.json").write_text(index.replace('"version": 2', '"version": 1'))
    with pytest.raises(UnsupportedError, match="version 2"):
        Shards(tmp_path)
    with pytest.raises(ConfigError, match=r"index\.json is missing"):
        Shards(tmp_path / "nowhere")


# By the libraries that mosaicml-streaming packs with: brotli 1.2.1 (quality 11 and 1), python-snappy 0.7.3.
PACKED = [
    ("br", "1bdf01f88dd44ef9c34ed56b6e6f741a84a56c4e12220f6539c00900f523e75a169400"),
    (
        "br:1",
        "8bef000080aaaaaaeaff7465b8cbf52200c227016106101170c86d052ec78362c0101c8c195bcc7753875461bc440be13ddf1b",
    ),
    (
        "snappy",
        "e0033c746f6b656e7320616e64206d6f7265200910002c0d08fe1800fe1800fe1800fe1800fe1800fe1800ee18000918",
    ),
]


@pytest.mark.parametrize(("name", "packed"), PACKED)
def test_what_streamings_libraries_packed_is_unpacked(name: str, packed: str) -> None:
    data, unpack = b"tokens and more tokens, " * 20, codec(name)[1]
    assert b"".join(unpack(bytes.fromhex(packed), len(data))) == data
    for damaged in (packed[:-6], "00" + packed, ""):
        with pytest.raises((OSError, ValueError)):
            b"".join(unpack(bytes.fromhex(damaged), len(data)))


CODECS = ["zstd", "gz", "bz2", "br", "snappy"]


@pytest.mark.parametrize("name", CODECS)
def test_packed_bytes_hold_what_the_index_says_and_nothing_else(name: str) -> None:
    data, (pack, unpack) = bytes(range(256)) * 4, codec(name)
    packed = pack(data)
    assert b"".join(unpack(packed, len(data))) == data
    cut = [packed[:end] for end in range(0, len(packed), 7)]
    for changed in (*cut, packed + b"abc", packed + b"B", packed * 2):
        with pytest.raises((OSError, EOFError, ValueError)):
            b"".join(unpack(changed, len(data)))
    for size in (0, 1, len(data) - 1, len(data) + 1, 10**7, 2**32 - 1):
        with pytest.raises(ValueError, match="of the index"):
            b"".join(unpack(packed, size))
    for at in range(len(packed)):  # a flipped bit is noticed, or where the format has no checksum gives as many bytes
        flipped = packed[:at] + bytes([packed[at] ^ 8]) + packed[at + 1 :]
        with suppress(OSError, EOFError, ValueError):
            assert len(b"".join(unpack(flipped, len(data)))) == len(data)


@pytest.mark.parametrize("name", CODECS)
def test_no_more_is_unpacked_than_the_index_says(name: str) -> None:
    pack, unpack = codec(name)
    packed = pack(bytes(1 << 24))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="of the index"):
            b"".join(unpack(packed, 600))
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_bytes_that_begin_with_the_size_of_gigabytes_are_no_snappy() -> None:
    with pytest.raises(ValueError, match="cannot hold the 4,294,967,295"):
        b"".join(codec("snappy")[1](bytes.fromhex("ffffffff0f0000"), 2**32 - 1))


@pytest.mark.parametrize("compression", CODECS)
def test_damaged_compressed_shards(tmp_path: Path, compression: str) -> None:
    with ShardWriter(tmp_path / "s", {"n": "int"}, compression=compression) as writer:
        for n in range(100):
            writer.write({"n": n})
    path = tmp_path / "s" / f"shard.00000.mds.{compression}"
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + bytes(len(whole) - 20))
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        Shards(tmp_path / "s")[0]
    path.write_bytes(whole)
    shards = Shards(tmp_path / "s", cache=tmp_path / "cache")
    assert [shards[n]["n"] for n in (99, 0)] == [99, 0]
    assert list((tmp_path / "cache").glob("*/shard.00000.mds")), "in a folder of its source alone"


@pytest.mark.parametrize(("name", "level"), [("zstd", 3), ("gz", 9), ("bz2", 9), ("br", 11)])
def test_a_compression_without_a_level_has_the_one_of_its_library(name: str, level: int) -> None:
    data = b"".join(b"%d %d;" % (n * n % 977, n) for n in range(20_000))
    packed = {
        at: codec(f"{name}:{at}")[0](data) for at in (level - 1, level, level + 1) if at < (12 if name == "br" else 10)
    }
    assert codec(name)[0](data) == packed[level]
    assert len(set(packed.values())) == len(packed), "the levels can be told apart"


def test_writers_refuse_and_lose_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a", {"n": "int"})
    for bad in ({}, {"n": 1, "m": 2}, {"m": 1}):
        with pytest.raises(ConfigError, match="a sample has columns"):
            writer.write(bad)
    with pytest.raises(ConfigError, match="MDS encoding"):
        writer.write({"n": "x"})
    with pytest.raises(ConfigError, match="no sample was written"):
        writer.close()
    writer.write({"n": 1})
    writer.close()
    with pytest.raises(ConfigError, match="not empty"):
        ShardWriter(tmp_path / "a", {"n": "int"})
    assert Shards(tmp_path / "a")[0] == {"n": 1}

    def interrupted() -> None:
        with ShardWriter(tmp_path / "b", {"n": "int"}) as writer:
            writer.write({"n": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not (tmp_path / "b" / "index.json").exists(), "an unfinished folder has no index"
    for options, error in (
        ({"compression": "lz4"}, UnsupportedError),
        ({"compression": "zstd:x"}, ConfigError),
        ({"compression": "br:12"}, ConfigError),
        ({"compression": "snappy:1"}, ConfigError),
        ({"hashes": ["crc1"]}, UnsupportedError),
    ):
        with pytest.raises(error):
            ShardWriter(tmp_path / "c", {"n": "int"}, **options)
    with pytest.raises(ConfigError, match="need columns"):
        ShardWriter(tmp_path / "d", {})


def numbered(folder: Path, count: int, limit: int = 1) -> Shards:
    """Samples 0 to count - 1, by default each in a shard of its own."""
    with ShardWriter(folder, {"n": "int"}, size_limit=limit) as writer:
        for n in range(count):
            writer.write({"n": n})
    return Shards(folder)


def test_many_shards_keep_few_open(tmp_path: Path) -> None:
    """The 64 that were read last: sample 5 was read once more before the others."""
    shards = numbered(tmp_path, 70)
    read = [*range(64), 5, *range(64, 70)]
    assert [shards[n]["n"] for n in read] == read
    assert list(shards._open) == [*range(7, 64), 5, *range(64, 70)]
    shards.close()
    assert not shards._open


@pytest.mark.parametrize(("spare", "open_shards"), [(0, [3, 4, 5]), (-1, [4, 5])])
def test_open_shards_take_a_sixteenth_of_a_limited_cache(tmp_path: Path, spare: int, open_shards: list[int]) -> None:
    size = numbered(tmp_path / "s", 6).shards[0].raw.size
    shards = Shards(tmp_path / "s", cache=tmp_path / "cache", limit=16 * 3 * size + spare)
    assert [shards[n]["n"] for n in range(6)] == [*range(6)]
    assert list(shards._open) == open_shards
    shards.close()


@pytest.mark.parametrize(("spare", "counts"), [(0, (3, 3, 1)), (-1, (2, 2, 2, 1))])
def test_a_shard_is_as_large_as_its_limit_at_most(tmp_path: Path, spare: int, counts: tuple[int, ...]) -> None:
    """The limit stands in the shard: one of three samples has as many bytes for every limit of as many digits."""
    size = numbered(tmp_path / "three", 3, 999).shards[0].raw.size
    assert 200 < size < 1000
    shards = numbered(tmp_path / "s", 7, size + spare)
    assert shards.counts == counts
    assert [shards[n]["n"] for n in range(7)] == [*range(7)]


def test_offsets_reach_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample whose shard would end where they end is refused; of smaller ones as many as they reach are together."""
    assert mds.OFFSETS == 1 << 32
    one = len(by_one(tmp_path / "plain", 10))
    monkeypatch.setattr(mds, "OFFSETS", one)
    with pytest.raises(ConfigError, match="a sample of 14 bytes: a shard holds less than 4 GiB"):
        by_one(tmp_path / "large", 10)
    assert len(by_one(tmp_path / "small", 9)) == one - 1
    for limit, counts in ((one + 14, (1, 1)), (one + 15, (2,))):  # a second one of 10 bytes, its size and its place
        monkeypatch.setattr(mds, "OFFSETS", limit + 4)
        by_one(tmp_path / str(limit), 10, 10)
        assert Shards(tmp_path / str(limit)).counts == counts


def by_one(folder: Path, *sizes: int) -> bytes:
    """The first shard of samples with so many bytes each."""
    with ShardWriter(folder, {"raw": "bytes"}) as writer:
        for size in sizes:
            writer.write({"raw": bytes(size)})
    return (folder / "shard.00000.mds").read_bytes()


def test_what_is_read_next_is_fetched_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = numbered(tmp_path, 5)
    asked: list[list[int]] = []
    monkeypatch.setattr(shards._files, "prefetch", asked.append)
    assert shards[1]["n"] == 1
    for numbers in ([4, 0, 1, 4, 2], [], [0], [4]):
        shards.prefetch(numbers)
    assert asked == [[4, 0, 2], [], [0], [4]], "each once, and none that is open"
    for numbers, message in (([3, -1], "samples -1 to 3 of 5"), ([5, 2], "samples 2 to 5 of 5")):
        with pytest.raises(IndexError, match=message):
            shards.prefetch(numbers)
    assert len(asked) == 4


def test_a_text_without_letters_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()  # an empty folder is as good as none
    with ShardWriter(tmp_path / "s", {"text": "str"}) as writer:
        writer.write({"text": ""})
    assert writer.samples == 1
    assert Shards(tmp_path / "s")[0] == {"text": ""}
    path = tmp_path / "s" / "shard.00000.mds"
    data = path.read_bytes()
    (end,) = struct.unpack("<I", data[8:12])
    path.write_bytes(data[:8] + struct.pack("<I", end - 4) + data[12:])  # now it has no bytes, not even of its size
    with pytest.raises(ConfigError, match=r"sample 0 is cut$"):
        Shards(tmp_path / "s")[0]


def test_an_index_of_nothing_is_empty(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    shards = Shards(tmp_path)
    assert (len(shards), shards.counts) == (0, ())
    shards.prefetch([])
    with pytest.raises(IndexError, match="sample 0 of 0"):
        shards[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column_names": ["n", "text"]}, "no index of shards"),
        ({"column_sizes": [8, None, None, None]}, "no index of shards"),
        ({"samples": -1}, r"index\.json: the number of samples of 'shard\.00000\.mds': the number -1 is not"),
        ({"samples": True}, "true is not a whole number from 0"),
        ({"column_sizes": [8, None, -4]}, "the size of column '[a-z]+': the number -4"),
        ({"compression": 5}, "are strings"),
        ({"version": 3}, "shard format mds 3"),
        ({"format": "json"}, "shard format json 2"),
    ],
)
def test_shards_that_are_described_wrongly_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    by_hand(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0] |= change
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        Shards(tmp_path)


def test_a_folder_below_folders_that_are_not_there_is_made(tmp_path: Path) -> None:
    assert len(numbered(tmp_path / "a" / "b", 1)) == 1


@pytest.mark.parametrize(("name", "level"), [("gz", 9), ("bz2", 9)])
def test_shards_are_packed_as_tightly_as_can_be_and_without_the_time(name: str, level: int) -> None:
    data = bytes(range(256)) * 4000
    pack, unpack = codec(name)
    assert b"".join(unpack(pack(data), len(data))) == data
    assert pack(data) == codec(f"{name}:{level}")[0](data)
    assert pack(data) != codec(f"{name}:{level - 8}")[0](data)
    if name == "gz":
        assert pack(data)[4:8] == bytes(4)  # the modification time in gzip's header
