"""Shards fetched from elsewhere through a cache: the right bytes, never above the limit, whoever else reads or dies."""

import fcntl
import json
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roofline.common.errors import CapacityError, ConfigError
from roofline.train.data.mds import Shards, ShardWriter
from roofline.train.storage import file_cache as cache_module
from roofline.train.storage.file_cache import FileCache
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError, StoreError, UnreachableError
from tests.train.rows import ROWS, SAMPLES, SHARDS, right, sample
from tests.train.seaweed import Proxy
from tests.train.test_store import running, until


def write(folder: Path, compression: str | None = None, hashes: tuple[str, ...] = (), seed: int = 0) -> int:
    """Shards of equal sizes in a new folder: the raw bytes of one."""
    options: dict[str, Any] = {"compression": compression, "hashes": hashes}
    head = ShardWriter(folder, {"tokens": "ndarray:uint16:250"}, size_limit=99_999, **options)._fixed
    limit = head + ROWS * 504 + 250
    with ShardWriter(folder, {"tokens": "ndarray:uint16:250"}, size_limit=limit, **options) as writer:
        for number in range(SAMPLES):
            writer.write({"tokens": sample(number, seed)})
    shards = json.loads((folder / "index.json").read_text())["shards"]
    assert len(shards) == SHARDS
    return int(shards[0]["raw_data"]["bytes"])


def upload(folder: Path, url: str) -> None:
    store = open_store(url)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())


def kept(cache: Path) -> dict[str, int]:
    """Names and sizes of what lies in a cache."""
    found = {}
    for path in cache.glob("*/*"):
        try:
            found[path.name] = path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def gets(proxy: Proxy) -> list[str]:
    return [path.rpartition("/")[2] for method, path in proxy.seen if method == "GET" and "shard" in path]


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
@pytest.mark.parametrize("hashes", [(), ("sha256", "xxh64")])
def test_a_url_reads_as_a_folder(s3: str, tmp_path: Path, compression: str | None, hashes: tuple[str, ...]) -> None:
    write(tmp_path / "s", compression, hashes)
    upload(tmp_path / "s", s3)
    for source in (tmp_path / "s", str(tmp_path / "s"), s3):
        for cache in (None, tmp_path / "cache"):
            shards = Shards(source, cache)
            assert (len(shards), shards.counts) == (SAMPLES, (ROWS,) * SHARDS)
            for number in random.Random(0).sample(range(SAMPLES), 40):
                right(shards, number)
            shards.close()
    folders = list((tmp_path / "cache").glob("*/"))
    assert len(folders) == (1 if compression is None else 2), "raw shards of a folder are read where they are"


def test_a_shard_smaller_than_a_buffer_is_checked_as_it_was_written(s3: str, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", {"text": "str"}, hashes=("sha256",)) as writer:
        writer.write({"text": "short"})
    upload(tmp_path / "s", s3)
    shards = Shards(s3, tmp_path / "cache")
    assert shards[0]["text"] == "short"
    shards.close()


# The limit


def below(cache: Path, limit: int) -> None:
    with (cache / "lock").open("ab") as file:  # or a file may be counted that was removed for one that is counted, too
        fcntl.flock(file, fcntl.LOCK_EX)
        files = kept(cache)
    assert sum(files.values()) <= limit, files


@settings(deadline=None, max_examples=40)
@given(st.integers(1, SHARDS), st.integers(0, 999), st.lists(st.integers(0, SAMPLES - 1), max_size=30), st.booleans())
def test_never_above_the_limit(
    tmp_path_factory: pytest.TempPathFactory, room: int, extra: int, numbers: list[int], ahead: bool
) -> None:
    folder = tmp_path_factory.mktemp("limit")
    limit = room * write(folder / "s", "zstd:1") + extra
    shards = Shards(folder / "s", folder / "cache", limit)
    for at, number in enumerate(numbers):
        if ahead:
            shards.prefetch(numbers[at : at + 5])
        right(shards, number)
        below(folder / "cache", limit)
    shards.close()
    below(folder / "cache", limit)
    assert not [name for name in kept(folder / "cache") if name.endswith(".part")]


@pytest.mark.slow
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.lists(st.integers(0, SAMPLES - 1), min_size=10, max_size=30))
def test_never_above_the_limit_from_a_bucket(s3: str, tmp_path: Path, room: int, numbers: list[int]) -> None:
    size = (tmp_path / "s" / "shard.00000.mds").stat().st_size if (tmp_path / "s").exists() else write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    with tempfile.TemporaryDirectory(dir=tmp_path) as cache:
        shards = Shards(s3, Path(cache), room * size)
        for at, number in enumerate(numbers):
            shards.prefetch(numbers[at : at + 5])
            right(shards, number)
            below(Path(cache), room * size)
        shards.close()


def test_the_least_recently_read_goes_first(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    size = write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    shards = Shards(s3, tmp_path / "cache", 3 * size)
    for at in (0, 1, 2, 0, 3):
        right(shards, at * ROWS)
    assert sorted(kept(tmp_path / "cache")) == ["shard.00000.mds", "shard.00002.mds", "shard.00003.mds"]
    assert gets(proxy) == [f"shard.0000{at}.mds" for at in (0, 1, 2, 3)]
    shards.close()


def test_a_shard_larger_than_the_limit(tmp_path: Path) -> None:
    size = write(tmp_path / "s", "zstd")
    shards = Shards(tmp_path / "s", tmp_path / "cache", size - 1)
    with pytest.raises(
        CapacityError, match=rf"shard\.00000\.mds in the cache .* needs {size:,} bytes, {size - 1:,} are"
    ):
        shards[0]
    shards.prefetch(range(SAMPLES))
    shards.close()
    assert kept(tmp_path / "cache") == {}


def test_what_is_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = write(tmp_path / "s", "zstd")
    first = Shards(tmp_path / "s", tmp_path / "cache", 2 * size)
    second = Shards(tmp_path / "s", tmp_path / "cache", 2 * size)
    right(first, 0)
    for number in range(0, SAMPLES, ROWS):
        right(second, number)
        assert "shard.00000.mds" in kept(tmp_path / "cache")
        below(tmp_path / "cache", 2 * size)
    right(first, 1)
    monkeypatch.setattr(cache_module, "PATIENCE", 0.2)
    third = Shards(tmp_path / "s", tmp_path / "cache", 2 * size)
    with pytest.raises(CapacityError, match=r"all of whose other files are being read.*room for two at the very least"):
        third[3 * ROWS]
    assert set(kept(tmp_path / "cache")) == {"shard.00000.mds", "shard.00007.mds"}
    monkeypatch.setattr(cache_module, "PATIENCE", 20)
    timer = threading.Timer(0.2, second.close)
    timer.start()
    right(third, 3 * ROWS)
    assert set(kept(tmp_path / "cache")) == {"shard.00000.mds", "shard.00003.mds"}
    timer.join()
    for shards in (first, third):
        shards.close()


# Several processes

READS = """
import random, sys
from pathlib import Path
from roofline.train.data.mds import Shards
from tests.train.rows import SAMPLES, right
source, cache, limit, seed, count = sys.argv[1:]
shards = Shards(source, Path(cache), int(limit) or None)
print("open", flush=True)
sys.stdin.readline()
numbers = random.Random(int(seed)).choices(range(SAMPLES), k=int(count))
for at, number in enumerate(numbers):
    if at % 5 == 0 and int(seed) % 2:
        shards.prefetch(numbers[at : at + 20])
    right(shards, number)
shards.close()
print("done", flush=True)
"""


def together(count: int, watch: Callable[[], None], *arguments: object) -> None:
    """So many processes of READS at the same time, while `watch` is called."""
    with ExitStack() as stack:
        processes = [stack.enter_context(running(READS, *arguments[:3], seed, arguments[3])) for seed in range(count)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n", process.stderr and process.stderr.read()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        while any(process.poll() is None for process in processes):
            watch()
            time.sleep(0.005)
        for process in processes:
            assert process.returncode == 0, process.stderr and process.stderr.read()


def test_processes_share_a_cache_and_its_limit(tmp_path: Path) -> None:
    size = write(tmp_path / "s", "zstd")
    together(4, lambda: below(tmp_path / "cache", 5 * size), tmp_path / "s", tmp_path / "cache", 5 * size, 100)
    assert not [name for name in kept(tmp_path / "cache") if name.endswith(".part")]


def test_processes_fetch_each_shard_once(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    together(3, lambda: None, s3, tmp_path / "cache", 0, 60)
    assert sorted(gets(proxy)) == sorted(path.name for path in (tmp_path / "s").glob("shard*"))


ONE = """
import sys
from pathlib import Path
from roofline.train.data.mds import Shards
shards = Shards(sys.argv[1], Path(sys.argv[2]) if sys.argv[2] else None)
print(shards[0]["tokens"][0], flush=True)
sys.stdin.readline()
"""


def test_killed_in_the_middle_of_a_download(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    size = write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    proxy.stall_answer(5000, part="shard.00000")
    with running(ONE, s3, tmp_path / "cache") as process:
        until(lambda: len(gets(proxy)) == 1)
        waits = Shards(s3, tmp_path / "cache")
        assert kept(tmp_path / "cache") == {"shard.00000.mds.part": size}, "nobody removes what is being fetched"
        timer = threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL))
        timer.start()
        right(waits, 0)
        timer.join()
    assert len(gets(proxy)) == 2
    assert kept(tmp_path / "cache") == {"shard.00000.mds": size}
    waits.close()
    for unfinished in ("shard.00001.mds.part", "shard.00005.mds.part"):
        next((tmp_path / "cache").glob("*/shard.00000.mds")).with_name(unfinished).write_bytes(bytes(99))
    again = Shards(s3, tmp_path / "cache", 8 * size)
    assert kept(tmp_path / "cache") == {"shard.00000.mds": size}, "what a killed process left is removed"
    right(again, ROWS)
    again.close()


def test_what_killed_processes_leave_elsewhere(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    with running(ONE, s3, "") as killed, running(ONE, s3, "") as lives:
        for process in (killed, lives):
            assert process.stdout is not None
            assert process.stdout.readline().strip() == str(sample(0)[0])
        assert len(list((tmp_path / "t").iterdir())) == 2
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(10)
        shards = Shards(s3)
        right(shards, 5)
        assert len(list((tmp_path / "t").iterdir())) == 2, "the killed one's is gone, the others are there"
        shards.close()
        assert lives.stdin is not None
        lives.stdin.write("\n")
        lives.stdin.close()
        assert lives.wait(10) == 0, "it ends without closing its shards"
    assert list((tmp_path / "t").iterdir()) == []


def test_forks_and_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s", "zstd")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shards = Shards(tmp_path / "s")
    shards.prefetch(range(SAMPLES))
    right(shards, 0)

    def child() -> None:
        shards.prefetch(range(0, SAMPLES, 3))
        for number in range(0, SAMPLES, 7):
            right(shards, number)
        shards.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    for number in range(0, SAMPLES, 7):
        right(shards, number)
    copied = pickle.loads(pickle.dumps(shards))
    right(copied, 9)
    copied.close()
    shards.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("umask", [0, 0o027])
def test_files_of_a_cache_have_the_permissions_that_the_user_gives_to_files(tmp_path: Path, umask: int) -> None:
    write(tmp_path / "s", "zstd")
    before = os.umask(umask)
    try:
        shards = Shards(tmp_path / "s", tmp_path / "cache")
        right(shards, 0)
        shards.close()
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*.mds")}
    assert modes == {0o666 & ~umask}


# What goes wrong


def test_a_folder_that_is_gone_is_no_error_at_the_end(tmp_path: Path) -> None:
    """What cleans temporary files may have removed it before."""
    alive = (tmp_path / "alive").open("wb")
    cache_module._remove(tmp_path / "gone", alive, os.getpid())
    assert alive.closed


def test_what_vanishes_is_fetched_again(s3: str, tmp_path: Path) -> None:
    size = write(tmp_path / "s", None, ("sha256",))
    upload(tmp_path / "s", s3)
    for harm in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(bytes(size)),
    ):
        shards = Shards(s3, tmp_path / "cache")
        right(shards, 0)
        shards.close()
        harm(next((tmp_path / "cache").glob("*/shard.00000.mds")))
        shards = Shards(s3, tmp_path / "cache")
        right(shards, 0)
        shards.close()
        assert kept(tmp_path / "cache") == {"shard.00000.mds": size}


@pytest.mark.slow
def test_another_data_set_of_the_same_sizes(s3: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / str(seed), seed=seed)
        upload(tmp_path / str(seed), f"{s3}/{seed}")
    both = [Shards(f"{s3}/{seed}", tmp_path / "cache") for seed in (0, 1)]
    for number in range(0, SAMPLES, 9):
        for seed in (0, 1):
            right(both[seed], number, seed)
    for shards in both:
        shards.close()
    time.sleep(1.1)  # times of S3 objects are whole seconds
    upload(tmp_path / "1", f"{s3}/0")
    again = Shards(f"{s3}/0", tmp_path / "cache")
    for number in range(0, SAMPLES, 9):
        right(again, number, 1)
    again.close()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_damage_at_the_source_is_named(s3: str, tmp_path: Path, compression: str | None) -> None:
    write(tmp_path / "s", compression, ("sha256",))
    upload(tmp_path / "s", s3)
    store, name = open_store(s3), "shard.00000.mds" + (".zstd" if compression else "")
    whole = store.get(name)
    shards = Shards(s3, tmp_path / "cache")
    for data, kind, message in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), ConfigError, "is damaged: its sha256 is not the one"),
        (whole[:-1], ConfigError, f"has {len(whole) - 1:,} bytes instead of {len(whole):,}"),
        (whole + b"x", ConfigError, f"has {len(whole) + 1:,} or more bytes instead of"),
        (None, MissingError, "is missing"),
    ):
        store.delete(name)
        if data is not None:
            store.put(name, data)
        shards.prefetch([0])
        with pytest.raises(kind, match=message) as caught:
            shards[0]
        assert f"{s3}/{name}" in str(caught.value)
        until(lambda: kept(tmp_path / "cache") == {})
    store.put(name, whole)
    right(shards, 0)
    shards.close()


def test_sources_that_are_none(s3: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{s3} is no folder of shards: index\.json is missing"):
        Shards(s3)
    with pytest.raises(StoreError, match="there is no such bucket"):
        open_store("s3://nowhere/x").put("index.json", b"{}")
    open_store(s3).put("index.json", b"{}")
    with pytest.raises(ConfigError, match=r"index\.json is no index of shards"):
        Shards(s3)
    with pytest.raises(ConfigError, match="no place that objects are kept in"):
        Shards("http://host/data")
    write(tmp_path / "s", "zstd")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"File exists: choose another place|Not a directory"):
        Shards(tmp_path / "s", tmp_path / "file")


# Ahead


def test_what_was_fetched_ahead_is_there(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    write(tmp_path / "s", "zstd")
    upload(tmp_path / "s", s3)
    shards = Shards(s3, tmp_path / "cache")
    shards.prefetch([ROWS * 5, ROWS * 5 + 1, 3, ROWS - 1, ROWS * 2])
    until(lambda: set(kept(tmp_path / "cache")) == {f"shard.0000{at}.mds" for at in (0, 2, 5)})
    for number in (ROWS * 5, ROWS * 5 + 1, 3, ROWS - 1, ROWS * 2):
        right(shards, number)
    assert len(gets(proxy)) == 3
    for bad in ([-1], [SAMPLES], [0, SAMPLES]):
        with pytest.raises(IndexError, match=f"of {SAMPLES}"):
            shards.prefetch(bad)
    shards.prefetch([])
    shards.close()


def test_half_of_the_limit_is_filled_ahead(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    size = write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    shards = Shards(s3, tmp_path / "cache", 4 * size)
    shards.prefetch(range(SAMPLES))
    until(lambda: len(kept(tmp_path / "cache")) == 2)
    time.sleep(0.2)
    assert len(gets(proxy)) == 2
    for at in range(SHARDS):
        right(shards, at * ROWS)
        until(lambda: len(gets(proxy)) >= min(at + 3, SHARDS))  # noqa: B023 called at once
        below(tmp_path / "cache", 4 * size)
    assert len(gets(proxy)) == SHARDS, "each was fetched once, and was there when it was read"
    shards.close()


def test_errors_come_up_at_the_read(proxy: Proxy, s3: str, tmp_path: Path) -> None:
    write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    shards = Shards(s3, tmp_path / "cache")
    proxy.refuse(99, status=403, part="shard.00000")
    shards.prefetch([0])
    until(lambda: len(gets(proxy)) == 1)
    with pytest.raises(StoreError, match="these keys do not permit it"):
        shards[0]
    proxy.heal()
    right(shards, 0)
    shards.close()


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_closing_ends_what_is_under_way(
    proxy: Proxy, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    write(tmp_path / "s")
    upload(tmp_path / "s", s3)
    threads_before = set(threading.enumerate())  # another test of this process may have left a set of shards open
    shards = Shards(s3, tmp_path / "t" / "cache" if named else None)
    proxy.speed = 5000  # two seconds a shard
    shards.prefetch(range(SAMPLES))
    until(lambda: len(gets(proxy)) >= 4)
    workers = {thread for thread in set(threading.enumerate()) - threads_before if thread.name == "roofline-shards"}
    assert workers
    started = time.monotonic()
    shards.close()
    assert time.monotonic() - started < 5
    if named:
        assert not [name for name in kept(tmp_path / "t" / "cache") if name.endswith(".part")]
    else:
        assert list((tmp_path / "t").iterdir()) == []
    until(lambda: not any(thread.is_alive() for thread in workers), 60)
    assert list((tmp_path / "t").iterdir()) == ([tmp_path / "t" / "cache"] if named else [])


# The cache alone


def test_files_that_are_not_made(tmp_path: Path) -> None:
    cache, name = FileCache(tmp_path / "c", 100), f"{'0' * 32}/a"

    def fail(file: object) -> None:
        raise UnreachableError("no")

    for make, kind in (
        (lambda file: file.write(b"123"), StoreError),
        (lambda file: file.write(b"12345"), StoreError),
        (fail, UnreachableError),
    ):
        with pytest.raises(kind):
            cache.open(name, 4, make)
        assert kept(tmp_path / "c") == {}
    file, made = cache.open(name, 4, lambda file: file.write(b"1234"))
    assert made
    assert os.pread(file.fileno(), 9, 0) == b"1234"
    file.close()
    file, made = cache.open(name, 4, fail)
    assert not made
    file.close()


def test_only_files_of_the_cache_are_removed(tmp_path: Path) -> None:
    (tmp_path / "c" / "mine").mkdir(parents=True)
    (tmp_path / "c" / "mine" / "data.part").write_bytes(bytes(1000))
    (tmp_path / "c" / "data").write_bytes(bytes(1000))
    (tmp_path / "c" / ("f" * 32)).symlink_to(tmp_path / "c" / "mine")  # a name of the cache's, and not its folder
    cache = FileCache(tmp_path / "c", 10)
    for name in "abc":
        cache.open(f"{'0' * 32}/{name}", 8, lambda file: file.write(bytes(8)))[0].close()
    assert kept(tmp_path / "c") == {"data.part": 1000, "c": 8}
    assert (tmp_path / "c" / "data").exists()
