"""How the end of a process is told."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roofline.common.processes import describe_end, is_stopped


def test_a_file_that_is_truncated_while_it_is_mapped_is_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(1 << 16))
    code = (
        "import mmap, os, sys\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    data = mmap.mmap(file.fileno(), 0)\n"
        "os.truncate(sys.argv[1], 0)\n"
        "data[1 << 15]\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "weights")], capture_output=True)
    assert describe_end(done.returncode).startswith("SIGBUS: a file that it had mapped was truncated")


@pytest.mark.parametrize(
    ("soft", "at_most", "raised"), [(64, 100, 100), (64, 1000, 200), (150, 100, 150), (64, None, 200)]
)
def test_the_limit_of_files_is_raised_up_to_a_number(soft: int, at_most: int | None, raised: int) -> None:
    code = (
        "import resource\n"
        "from roofline.common.processes import allow_all_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, 200))\n"
        f"allow_all_files({at_most})\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [str(raised), "200"]


@pytest.mark.parametrize(
    ("status", "text"),
    [(3, "exit status 3"), (None, "exit status None"), (-signal.SIGSEGV, "SIGSEGV"), (-40, "signal 40")],
)
def test_other_ends(status: int | None, text: str) -> None:
    assert describe_end(status) == text


def test_an_end_without_order_flushes_and_runs_nothing_more() -> None:
    code = (
        "import atexit, sys\n"
        "from roofline.common.processes import end_now\n"
        "atexit.register(print, 'teardown')\n"
        "print('last words')\n"
        "end_now(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "last words\n", "")


def test_a_process_that_was_stopped_is_told_from_one_that_runs_and_one_that_has_ended() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
