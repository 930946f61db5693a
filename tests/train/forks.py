"""Programs in forks of a process that has torch and the trainer imported: most of what a short run computes is that.

Tests of launchers, of memory and of what an import does start processes of their own. `python -m tests.train.forks`
reads a line of JSON for each program from its input, and writes the exit status of each to its output.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# torch._dynamo: the optimizer's first step would import it, in every process again.
PRELOADED = ("torch._dynamo", "roofline.train.__main__", "roofline.train.run.loop")


@functools.cache
def server() -> "subprocess.Popen[str]":
    """The process that forks for this one. It ends when its input does."""
    command, pipe = [sys.executable, "-m", "tests.train.forks"], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=pipe, stdout=pipe, text=True, bufsize=1,
        start_new_session=True,
    )  # fmt: skip


def run_forked(words: Sequence[str | Path], ranks: int = 0, timeout: float = 280) -> "subprocess.CompletedProcess[str]":
    """Runs a program of Python to its end: a file or "-m" and a module, then its arguments, in this environment.

    ranks: so many processes run it, as torchrun would start them; when one of them fails, the others are ended.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        job = {"words": command, "ranks": ranks, "environment": dict(os.environ), "outputs": list(map(str, outputs))}
        process = server()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        if not select.select([process.stdout], [], [], timeout)[0]:
            os.killpg(process.pid, signal.SIGKILL)
            server.cache_clear()
            raise subprocess.TimeoutExpired(command, timeout, *(path.read_bytes() for path in outputs))
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(command, status, *(path.read_text() for path in outputs))


def fork(act: Any, *arguments: Any) -> int:
    """The id of a process that calls `act`; its status is 0 unless that raises something else than SystemExit(0)."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        act(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # what `python -m tools.mutants` has registered: the lines that ran here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(pids: set[int]) -> bool:
    """Whether all these processes ended well; when one does not, the others are ended."""
    is_well = True
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and is_well:
            is_well = False
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return is_well


def perform(job: dict[str, Any]) -> None:
    """A program, in this process or in one for each rank."""
    os.environ.clear()
    os.environ.update(job["environment"])
    for number, path in enumerate(("/dev/null", *job["outputs"])):
        descriptor = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
    if not job["ranks"]:
        execute(job["words"])
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["ranks"]))
    places = [meeting | sizes | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(job["ranks"])]
    sys.exit(not wait_for({fork(execute, job["words"], place) for place in places}))


def execute(words: list[str], environment: dict[str, str] | None = None) -> None:
    """What `python` does with these words."""
    os.environ.update(environment or {})
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = fork(perform, json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
