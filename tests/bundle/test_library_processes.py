"""libroofline in processes that fork, that have no threads or files left, and after a close."""

import ctypes as c
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import library_binding as lb
import pytest
from library_binding import Library

if TYPE_CHECKING:
    from roofline.backends.cpu.library import LibraryFiles

HERE = Path(__file__).parent


def test_forks_of_a_program_in_cpp(files: "LibraryFiles", bundle: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = files.library.parent
    linked = [f"-I{files.include}", f"-L{folder}", "-lroofline", f"-Wl,-rpath,{folder}", "-pthread", "-o", "forks"]
    subprocess.run(["g++", "-std=c++17", str(HERE / "library_forks.cpp"), *linked], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "forks", bundle], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ids, *lines = done.stdout.splitlines()
    assert len(ids.split()) == 8
    assert lines == [
        "exits: exit 0",
        *(f"{name} {lb.INVALID} fork" for name in ("info", "submit", "step", "abort", "decode")),
        f"close {lb.OK}, NULL 1",
        f"again {lb.INVALID} the engine is closed: open its bundle again with rl_open",
        "uses the parent's: exit 0",
        "own 1",
        "opens its own: exit 0",
        "own 1",
        "closes the parent's beside its own: exit 0",
        *["forked within a step: exit 0"] * 8,
        "parent 1",
    ]


FORKED = """
import atexit, os, signal, sys
import library_binding as lb
library = lb.Library(sys.argv[1])
handle = library.open(sys.argv[2], threads=3, cache_tokens=64)
atexit.register(library.close, handle)
child = os.fork()
if not child:
    signal.alarm(30)
    events, count = (lb.Event * 1)(), lb.SIZE()
    print(library.c.rl_step(handle, events, 1, count), library.error(), flush=True)
    with_own = library.open(sys.argv[2], threads=3, cache_tokens=64)
    library.submit(with_own, [1, 2], lb.sampling(max_tokens=3, ignore_eos=1))
    print(sum(map(len, library.run(with_own).values())), library.close(with_own), flush=True)
    sys.exit(0)
print(os.getpid(), child, os.waitpid(child, 0)[1])
"""


def test_a_fork_through_ctypes_ends_well(files: "LibraryFiles", bundle: Path) -> None:
    done = run(FORKED, files, bundle)
    assert done.returncode == 0, done.stderr
    told, own, ended = done.stdout.splitlines()
    parent, child, status = map(int, ended.split())
    where = f"the engine was opened in process {parent}, and this is its fork {child}, without its threads"
    assert told == f"{lb.INVALID} {where}: open the bundle in the process that uses it"
    assert own == "3 0"
    assert status == 0


def run(script: str, *words: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """A script of Python in a process of its own, with the library and the bundle as its words."""
    library, *others = words
    command = [sys.executable, "-c", script, library.library, *others]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)


FORKED_MODEL = """
import gc, os, signal, sys
from roofline.bundle import load
model = load(sys.argv[2], threads=3, cache_tokens=64, text=False)
child = os.fork()
if not child:
    signal.alarm(30)
    try:
        model.executable._core.forward()
    except RuntimeError as error:
        print(error, flush=True)
    del model
    gc.collect()
    load(sys.argv[2], threads=3, cache_tokens=64, text=False)
    sys.exit(0)
print(os.getpid(), child, os.waitpid(child, 0)[1])
"""


def test_a_model_of_python_is_freed_in_a_fork(files: "LibraryFiles", bundle: Path) -> None:
    done = run(FORKED_MODEL, files, bundle)
    assert done.returncode == 0, done.stderr
    told, ended = done.stdout.splitlines()
    parent, child, status = map(int, ended.split())
    assert told == f"the threads of this model are in process {parent}, and this is its fork {child}"
    assert status == 0


LIMITED = """
import os, resource, sys
import library_binding as lb
library, options = lb.Library(sys.argv[1]), {"threads": 2, "cache_tokens": 64}
library.close(library.open(sys.argv[2], **options))
if sys.argv[3] == "threads":
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:  # whom the limit does not hold
        os.setgid(65534)
        os.setuid(65534)
    print(*library.refused(sys.argv[2], **options))
    sys.exit()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
used = lb.open_files_to_the_limit()
print(*library.refused(sys.argv[2], **options))
print(library.c.rl_verify(sys.argv[2].encode()), library.error())
os.close(used.pop())
library.close(library.open(sys.argv[2], **options))
"""


def test_a_limit_of_threads_is_told_as_such(files: "LibraryFiles", bundle: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # that another user may read, as those of pytest may not
        Path(folder).chmod(0o755)
        done = run(LIMITED, files, shutil.copytree(bundle, Path(folder) / "bundle"), "threads")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"{lb.MEMORY} threads cannot be started: lower the option threads, or raise the limit of threads"
    )


def test_a_limit_of_open_files_is_told_as_such(files: "LibraryFiles", bundle: Path) -> None:
    done = run(LIMITED, files, bundle, "files")
    assert done.returncode == 0, done.stderr
    file = f"{bundle}/manifest.json cannot be opened: too many files are open (Too many open files)"
    assert done.stdout.splitlines() == [f"{lb.MEMORY} {file}. Close some, or raise the limit (ulimit -n)."] * 2


def test_files_that_are_no_files_or_empty(library: Library, bundle: Path) -> None:
    manifest = bundle / "manifest.json"
    manifest.write_bytes(b"")
    assert library.refused(bundle)[0] == lb.BUNDLE
    assert "cannot be used: manifest.json is empty. Compile it again" in library.error()
    manifest.unlink()
    os.mkfifo(manifest)
    assert library.refused(bundle)[0] == lb.BUNDLE
    assert "manifest.json is no file, but a folder, a pipe or a device" in library.error()


def test_every_function_says_that_the_engine_is_closed(library: Library, bundle: Path) -> None:
    handle = library.open(bundle, threads=1, cache_tokens=64)
    copy = c.c_void_p(handle.value)
    assert library.close(handle) == lb.OK
    assert handle.value is None
    never = c.c_void_p(2**40)
    for engine, reason in (
        (copy, "the engine is closed: open its bundle again with rl_open"),
        (handle, "the engine is NULL: it was never opened, or is closed"),
        (never, "the engine is none that rl_open gave"),
    ):
        info, size, request = lb.Info(size=c.sizeof(lb.Info)), lb.SIZE(), c.c_uint64()
        ids, events = (lb.INT * 1)(1), (lb.Event * 1)()
        for name, others in {
            "rl_info": [c.byref(info)],
            "rl_submit": [ids, 1, None, c.byref(request)],
            "rl_step": [events, 1, c.byref(size)],
            "rl_abort": [1],
            "rl_decode": [ids, 1, None, 0, c.byref(size)],
        }.items():
            assert library.c[name](engine, *others) == lb.INVALID
            assert library.error() == reason, name
        if engine is not handle:  # a second call with what the first has set to NULL does nothing
            assert library.c.rl_close(c.byref(c.c_void_p(engine.value))) == lb.INVALID
            assert library.error() == reason


MODEL_WITHOUT_FILES = """
import resource, sys
import library_binding as lb
from roofline.bundle.reader import open_bundle
from roofline.common.errors import ConfigError
from pathlib import Path
open_bundle(Path(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
used = lb.open_files_to_the_limit()
try:
    open_bundle(Path(sys.argv[2]))
except ConfigError as error:
    print(type(error).__name__, error)
"""


def test_python_tells_a_limit_of_open_files_as_such(files: "LibraryFiles", bundle: Path) -> None:
    done = run(MODEL_WITHOUT_FILES, files, bundle)
    assert done.returncode == 0, done.stderr
    cause = "cannot be read: too many files are open; close some, or raise the limit (ulimit -n)"
    assert done.stdout == f"ConfigError {bundle}/manifest.json: {cause}\n"
