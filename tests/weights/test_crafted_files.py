"""Files of models that lie or are damaged are read or refused in one line, soon, in little memory, by every reader."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crafting import Limits, in_children

pytest.importorskip("torch", reason="some of the files are of its kind")
pytest.importorskip("transformers", reason="its configurations are among the files")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

SUBJECTS = (
    *("gguf", "gguf-parts", "gguf-tokenizer", "safetensors", "quantised", "torch"),
    *("config", "tokenizer", "older-tokenizer"),
)


def crafted(*words: str) -> None:
    """In a process of its own, whose children may die."""
    script = Path(__file__).with_name("crafted_files.py")
    command = [sys.executable, "-W", "ignore", str(script), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    print(done.stdout)


@pytest.mark.slow
def test_crafted_files_are_read_or_refused() -> None:
    crafted("--tries", "20", "--seed", "0")


@pytest.mark.slow
@pytest.mark.soak
def test_many_crafted_files_are_read_or_refused() -> None:
    crafted("--tries", "400", "--seed", "1")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_very_many_crafted_files_are_read_or_refused(subject: str) -> None:
    crafted("--seconds", "600", "--seed", "2", "--subjects", subject)


@pytest.mark.slow
def test_what_is_no_refusal_is_noticed() -> None:
    """An error, a signal, memory without bounds, and time without end, in Python and in a call that no alarm ends."""

    def attempt(index: int) -> str:
        match index:
            case 1:
                raise KeyError("name")
            case 2:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 3:
                assert bytearray(1 << 29)
            case 4:
                while True:
                    pass
            case 5:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
                time.sleep(60)
        return "read"

    tally = in_children(attempt, 8, 60, Limits(seconds=0.3, grown=1 << 28))
    assert tally.came == {"read": 3}
    assert tally.tries == 8
    said = "\n".join(tally.failures)
    assert len(tally.failures) == 5, said
    for each in ("try 1: KeyError", "try 2: the process was ended by signal 11", "try 3: MemoryError"):
        assert each in said
    assert "try 4: TooLong" in said
    assert "try 5: the process was ended by signal 9" in said
