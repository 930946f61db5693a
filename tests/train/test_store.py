"""Stores: a folder and a real S3 server keep the same promises, while connections break and processes are killed."""

import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.storage.local import LocalStore, atomic_file
from roofline.train.storage.open import open_store
from roofline.train.storage.store import ChangedError, MissingError, Patience, Store, StoreError, UnreachableError
from tests.train.seaweed import Proxy, Seaweed

QUICK = Patience(retries=3, wait=0.02, seconds=60, stall=20)  # few tries, but no hurry: machines are busy
NAMES = ["a", "b/c", "b/d.bin", "b c/ü+%#?&.txt", "step-1/rank 0/x=1", "~tilde/.hidden"]


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return open_store(request.getfixturevalue("s3"), QUICK)


def entries(store: Store, prefix: str = "") -> dict[str, int]:
    return dict(store.list(prefix))


def test_what_is_put_is_there(store: Store) -> None:
    assert entries(store) == {}
    data = {name: name.encode() * at for at, name in enumerate(NAMES)}
    for name in NAMES:
        store.put(name, data[name])
    assert entries(store) == {name: len(data[name]) for name in NAMES}
    assert [entry.name for entry in store.list()] == sorted(NAMES)
    for name in NAMES:
        assert store.get(name) == data[name] == b"".join(store.chunks(name))
        assert store.exists(name)
    assert entries(store, "b") == {"b/c": 3, "b/d.bin": 14}, "a prefix is a folder, not the beginning of a name"
    for what in (bytearray(b"new"), memoryview(b"new")):
        store.put("b/c", what)
        assert store.get("b/c") == b"new"


def test_ranges(store: Store) -> None:
    store.put("a", b"0123456789")
    assert [store.get_range("a", *where) for where in ((0, 4), (4, 6), (9, 1), (3, 0))] == [
        b"0123",
        b"456789",
        b"9",
        b"",
    ]
    for start, length in ((5, 6), (10, 1), (99, 1)):
        with pytest.raises(StoreError, match=r"a ends before byte"):
            store.get_range("a", start, length)
    with pytest.raises(MissingError):
        store.get_range("b", 0, 1)


def test_what_is_missing(store: Store) -> None:
    assert not store.exists("no/such")
    assert list(store.list("no")) == []
    for call in (
        lambda: store.get("no/such"),
        lambda: list(store.chunks("no/such")),
        lambda: store.version("no/such"),
    ):
        with pytest.raises(MissingError, match=r"no/such.* is missing: ") as caught:
            call()
        assert store.url in str(caught.value)
        assert "\n" not in str(caught.value)
    store.delete("no/such")
    store.delete_prefix("no")


def test_delete(store: Store) -> None:
    for name in NAMES:
        store.put(name, b"1")
    store.delete("a")
    store.delete_prefix("b")
    assert set(entries(store)) == set(NAMES) - {"a", "b/c", "b/d.bin"}
    store.delete_prefix("step-1/rank 0")
    store.delete("~tilde/.hidden")
    store.delete("b c/ü+%#?&.txt")
    assert entries(store) == {}
    with pytest.raises(ConfigError, match="no prefix of an object"):
        store.delete_prefix("")


def test_versions_change_with_the_content(store: Store) -> None:
    store.put("a", b"1")
    first = store.version("a")
    assert store.version("a") == first
    store.put("a", b"2")
    assert store.version("a") != first


def test_tags_are_those_of_listings_and_answers(store: Store) -> None:
    store.put("a", b"1")
    store.put("b", b"2" * 3_000_000)
    store.put("below/c", b"3")
    tags = store.tags()
    assert tags == {name: store.tag(name) for name in ("a", "b")}
    assert b"".join(store.chunks("b", tags["b"])) == b"2" * 3_000_000
    pieces = store.chunks("b", tags["b"])
    store.put("b", b"4" * 3_000_000)
    for call in (lambda: list(pieces), lambda: list(store.chunks("b", tags["b"]))):
        with pytest.raises(ChangedError, match=r"/b has been replaced"):
            call()
    with pytest.raises(MissingError):
        store.tag("c")


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a\0b", "a\nb"])
def test_names_that_lead_elsewhere(store: Store, name: str) -> None:
    for call in (store.get, store.exists, store.delete, store.version, lambda n: store.put(n, b"1")):
        with pytest.raises(ConfigError, match="is no name of an object"):
            call(name)


def test_large_files_go_in_parts(store: Store) -> None:
    data = os.urandom((17 << 20) + 3)
    store.put("large", data)
    assert store.get("large") == data
    assert store.get_range("large", (8 << 20) - 2, 5) == data[(8 << 20) - 2 : (8 << 20) + 3]
    assert max(map(len, store.chunks("large"))) < 8 << 20
    store.put("large", data[1:])
    assert b"".join(store.chunks("large")) == data[1:]
    store.put("large", b"")
    assert store.get("large") == b""


def test_a_long_list(store: Store) -> None:
    """An answer of S3 names, and a request deletes, a thousand objects at most. A folder has no such parts."""
    names = [f"many/{number:04}" for number in range(50 if isinstance(store, LocalStore) else 1050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"1"), names))
    assert [entry.name for entry in store.list("many")] == names
    store.delete_prefix("many")
    assert entries(store) == {}


def test_writers_and_deleters_of_one_folder(store: Store) -> None:
    def work(number: int) -> None:
        for turn in range(30):
            store.put(f"folder/{number}", b"%d" % turn)
            assert store.get(f"folder/{number}") == b"%d" % turn
            store.delete(f"folder/{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert entries(store) == {}


def test_stores_go_to_other_processes(store: Store) -> None:
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"


changes = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "delete_prefix"]),
        st.sampled_from(["a", "b/a", "b/c/a", "b/c/d", "e/a"]),
        st.binary(max_size=30),
    ),
    max_size=12,
)


def same_as_a_dict(store: Store, told: list[tuple[str, str, bytes]]) -> None:
    model: dict[str, bytes] = {}
    for what, name, data in told:
        if what == "put":
            store.put(name, data)
            model[name] = data
        elif what == "delete":
            store.delete(name)
            model.pop(name, None)
        elif "/" in name:
            folder = name.rpartition("/")[0]
            store.delete_prefix(folder)
            model = {key: value for key, value in model.items() if not key.startswith(f"{folder}/")}
        assert entries(store) == {key: len(value) for key, value in model.items()}
    for name, data in model.items():
        assert store.get(name) == data


@settings(deadline=None, max_examples=40)
@given(changes)
def test_a_folder_is_a_dict(tmp_path_factory: pytest.TempPathFactory, told: list[tuple[str, str, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("dict")
    same_as_a_dict(open_store(folder / "store"), told)
    assert not list(folder.rglob("*.part"))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes)
def test_a_bucket_is_a_dict(s3: str, told: list[tuple[str, str, bytes]]) -> None:
    same_as_a_dict(open_store(f"{s3}/{uuid.uuid4().hex}", QUICK), told)


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (tmp_path / "x", str(tmp_path / "x"), f"file://{tmp_path}/x"):
        assert open_store(url).url == str(tmp_path / "x")
        assert open_store(url).path("a") is None
    open_store(tmp_path / "x").put("a", b"1")
    assert open_store(tmp_path / "x").path("a") == tmp_path / "x" / "a"
    for url, message in (
        ("http://host/x", "use a folder, or one of s3://, gs://, az://"),
        ("s3:///x", "no bucket is named"),
        ("s3://", "no bucket is named"),
        ("s3://bucket/a//b", "no prefix of an object"),
        ("s3://bucket/../b", "no prefix of an object"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_store(url)
    pytest.importorskip("obstore")
    assert open_store("gs://bucket/a/").url == "gs://bucket/a"
    assert open_store("az://container").url == "az://container"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="obstore is not installed"):
        open_store("s3://bucket")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"file/a: Not a directory: choose another place"):
        open_store(tmp_path / "file").put("a", b"1")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(StoreError, match=r"closed/a: Permission denied: choose a place that this user may use"):
            open_store(tmp_path / "closed").put("a", b"1")
    with pytest.raises(ConfigError, match="unfinished files are called that way"):
        open_store(tmp_path).put("b/.a.01234567.part", b"1")


# What goes wrong


@pytest.mark.slow
def test_passing_faults_are_sat_out(proxy: Proxy, s3: str) -> None:
    store, data = open_store(s3, QUICK), os.urandom(9 << 20)
    for fault in (
        lambda: proxy.refuse(3),
        lambda: proxy.refuse(2, status=500),
        lambda: proxy.refuse(2, status=429),
        lambda: proxy.cut_request(1 << 20),
        lambda: proxy.lose_answer(),
        lambda: proxy.lose_answer(method="POST", part="uploadId="),
    ):
        fault()
        store.put("a", data)
        assert proxy.left == 0
    for fault in (
        lambda: proxy.refuse(3),
        lambda: proxy.cut_answer(5 << 20),
        lambda: proxy.cut_answer(0),
        lambda: proxy.cut_answer(1000, times=3),
    ):
        fault()
        assert store.get("a") == data
        assert proxy.left == 0
    proxy.cut_answer(5 << 20)
    assert b"".join(store.chunks("a")) == data
    proxy.refuse(2)
    assert entries(store) == {"a": len(data)}
    store = open_store(s3, Patience(retries=3, wait=0.02, stall=1))
    proxy.stall(method="PUT")
    store.put("a", b"1")
    proxy.stall()
    assert store.get("a") == b"1"
    assert proxy.left == 0


@pytest.mark.slow
def test_a_slow_line_is_no_error(proxy: Proxy, s3: str) -> None:
    store, data = open_store(s3, Patience(wait=0.02, stall=1)), os.urandom(600_000)
    open_store(s3, QUICK).put("a", data)
    proxy.speed = 400_000
    started = time.monotonic()
    assert store.get("a") == data
    assert time.monotonic() - started > 1, "longer than a stall may take"


def one_line(caught: pytest.ExceptionInfo[StoreError], store: Store) -> None:
    assert "\n" not in str(caught.value)
    assert store.url in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda proxy: proxy.refuse(99), "its server answers 503: try later"),
        (lambda proxy: proxy.cut_answer(1000, times=99, method=None), "the connection broke: look at the network"),
        pytest.param(
            lambda proxy: proxy.stall(99, method=None),
            "did not answer in time: look at the network",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lasting_faults_end(proxy: Proxy, s3: str, fault: Callable[[Proxy], None], message: str) -> None:
    store = open_store(s3, Patience(retries=2, wait=0.02, seconds=5, stall=0.3))
    open_store(s3, QUICK).put("a", bytes(100_000))
    fault(proxy)
    for call in (lambda: store.get("a"), lambda: list(store.chunks("a"))):
        with pytest.raises(UnreachableError, match=message) as caught:
            call()
        one_line(caught, store)


def test_what_is_wrong_is_said(seaweed: Seaweed, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def expect(kind: type[Exception], message: str, url: str = s3, **environment: str | None) -> None:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.delenv(name) if value is None else patch.setenv(name, value)
            store = open_store(url, Patience(retries=1, wait=0.02, seconds=5, stall=20))
            for call in (lambda: store.get("a"), lambda: store.put("a", b"1"), store.list):
                with pytest.raises(kind, match=message) as caught:
                    call()
                assert "\n" not in str(caught.value)

    expect(StoreError, "there is no such bucket: create it", "s3://nowhere/x")
    expect(StoreError, "does not know this access key: correct AWS_ACCESS_KEY_ID", AWS_ACCESS_KEY_ID="other")
    expect(StoreError, "the secret key is wrong: correct AWS_SECRET_ACCESS_KEY", AWS_SECRET_ACCESS_KEY="other")
    expect(UnreachableError, "nothing listens there: correct AWS_ENDPOINT_URL", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    expect(StoreError, "set AWS_ALLOW_HTTP=true", AWS_ALLOW_HTTP=None)
    expect(StoreError, "begin AWS_ENDPOINT_URL with http", AWS_ENDPOINT_URL=f"https{seaweed.endpoint[4:]}")
    expect(ConfigError, "AWS_ENDPOINT_URL='host' is no URL", AWS_ENDPOINT_URL="host")


PUTS = """
import sys
from pathlib import Path
from roofline.train.storage.open import open_store
open_store(sys.argv[1]).put("a", Path(sys.argv[2]).read_bytes())
"""


@contextmanager
def running(code: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)  # -1: a pipe
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                if stream is not None:
                    stream.close()


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("old", [None, b"old"])
def test_killed_in_the_middle_of_an_upload(
    proxy: Proxy, s3: str, seaweed: Seaweed, bucket: str, tmp_path: Path, old: bytes | None
) -> None:
    store, before = open_store(s3, QUICK), seaweed.unfinished(bucket)
    if old is not None:
        store.put("a", old)
    (tmp_path / "large").write_bytes(os.urandom(40 << 20))
    proxy.speed = 4 << 20
    with running(PUTS, s3, tmp_path / "large") as process:
        until(lambda: sum("partNumber" in path for _, path in proxy.seen) == 4)
        time.sleep(0.3)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    proxy.heal()
    assert seaweed.unfinished(bucket) == before + 1, "it was killed in the middle"
    if old is None:
        assert not store.exists("a")
        assert entries(store) == {}
    else:
        assert store.get("a") == old
    store.put("a", (tmp_path / "large").read_bytes())
    assert store.get("a") == (tmp_path / "large").read_bytes()


def test_an_upload_that_fails_leaves_nothing(proxy: Proxy, s3: str, seaweed: Seaweed, bucket: str) -> None:
    store, before = open_store(s3, QUICK), seaweed.unfinished(bucket)
    proxy.refuse(99, part="partNumber=2")
    with pytest.raises(UnreachableError):
        store.put("a", os.urandom(20 << 20))
    assert not store.exists("a")
    until(lambda: seaweed.unfinished(bucket) == before)  # the server forgets an aborted upload a little later


WRITES = """
import sys, time
from pathlib import Path
from roofline.train.storage.local import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    file.write(bytes(100_000))
    file.flush()
    print("there", flush=True)
    time.sleep(60)
"""


def test_killed_in_the_middle_of_a_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("f/a", b"old")
    with running(WRITES, tmp_path / "f" / "a") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        store.put("f/b", b"meanwhile")
        assert len(list((tmp_path / "f").iterdir())) == 3, "what is being written stays"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    assert len(list((tmp_path / "f").iterdir())) == 3
    assert entries(store) == {"f/a": 3, "f/b": 9}
    assert store.get("f/a") == b"old"
    store.put("f/b", b"next")
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["a", "b"], "the next put removes what was left"


def test_links_pipes_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    store, link, pipe = open_store(tmp_path / "store"), tmp_path / "store" / "link", tmp_path / "store" / "pipe"
    store.put("other", b"")
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere" / "file")
    for data in (b"first", b"second"):
        store.put("link", data)
        assert link.is_symlink()
        assert (tmp_path / "elsewhere" / "file").read_bytes() == data
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["file"]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    store.put("pipe", b"through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail() -> None:
        with atomic_file(tmp_path / "a") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_forked_processes_are_told(s3: str) -> None:
    store = open_store(s3, QUICK)
    store.put("a", b"1")
    told = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        for forked in (store, open_store(s3)):
            try:
                forked.get("a")
            except UnsupportedError as error:
                told.put(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    for _ in range(2):
        assert "in a forked process is not supported" in told.get()
    assert store.get("a") == b"1"


WAITS = """
import sys
from roofline.train.storage.open import open_store
print("there", flush=True)
open_store(sys.argv[1]).get("a")
"""


def test_ctrl_c_ends_a_wait(proxy: Proxy, s3: str) -> None:
    proxy.stall()
    with running(WAITS, s3) as process:
        until(lambda: bool(proxy.seen))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode
        assert errors.strip().endswith("KeyboardInterrupt")
