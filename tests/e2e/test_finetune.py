"""The lesson of docs/tutorials/finetune.md from its data to an answer through the openai client, in fewer steps."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, Browser

PAGE = (Path(__file__).parents[2] / "docs/tutorials/finetune.md").read_text()
DATA, CLIENT = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MAKE, SHOW, TRAIN, CHAT, SERVE = re.findall(r"^(?:python3|roofline) .*$", PAGE, re.MULTILINE)
# Of the page's command: fewer and smaller steps, after each of which fewer held-out samples are evaluated, and asked.
STEPS, ASKED = 8, 16
CHANGES = {
    "--epochs 1": f"--steps {STEPS}",
    "--batch 4": "--batch 2",
    "--ask 40": f"--ask {ASKED} --eval-share {ASKED / 800}",
}
BOOKING = '{"name": "Moreau", "day": "Sunday", "time": "19:45", "people": 6}'  # what the client of the page asks for


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def trained(shell: Any, port: int) -> str:
    """What the run printed."""
    pytest.importorskip("torch", reason="training is torch")
    (shell.folder / "make_bookings.py").write_text(DATA)
    assert shell(MAKE).returncode == 0
    shown = shell(SHOW)
    assert '[[{"name": "Kim", "day": "Tuesday", "time": "22:00", "people": 5}<|im_end|>]]' in shown.stdout, shown.stderr
    line = TRAIN
    for words, others in CHANGES.items():
        assert words in line
        line = line.replace(words, others)
    done = shell(f"{line} --port {port}", timeout=1200)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@contextmanager
def serving(shell: Any, port: int) -> Iterator[None]:
    process = shell.start(f"{SERVE} --port {port}")
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Listening on" in line:
                break
        assert process.poll() is None, "".join(lines)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_it_learns_the_task_and_is_served(shell: Any, port: int, trained: str, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the package openai is not here")
    before, after = map(int, re.findall(rf"(\d+) of {ASKED}", trained.splitlines()[-6]))
    assert before == 0
    assert after >= ASKED // 2, trained
    assert f"serve it: {SERVE} --port {port}" in trained.splitlines()
    assert f"chat with it here: {shlex.join(shlex.split(CHAT))}" in trained.splitlines()
    with serving(shell, port):
        code = CLIENT.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert f"bookings: {BOOKING}" in done.stdout.splitlines()
        assert f"smollm2-135m: {BOOKING}" not in done.stdout
        if CHROMIUM is not None:
            look(shell.folder / "runs/bookings/run.html", port, tmp_path)


def look(page: Path, port: int, place: Path) -> None:
    """One click from the page of the run to a chat with the model as it became."""
    browser = Browser(place / "profile")
    try:
        shown = browser.open(shutil.copy(page, place / "run.html").as_uri())
        shown.wait("document.querySelectorAll('.answers tbody tr').length === 12")
        link = shown.evaluate("document.querySelectorAll('.links a')[1].href")
        assert link.startswith(f"http://127.0.0.1:{port}/?model=bookings&system=Answer%20with")
        shown.picture(place / "run.png")
        chat = browser.open(link)
        chat.wait("document.querySelector('#model').textContent === 'bookings'")
        chat.evaluate("document.querySelector('#text').focus()")
        chat.write("A table for 3 on Monday at 18:15 please, the name is Ito.")
        chat.press("Enter")
        chat.wait("document.querySelector('.assistant .figures') !== null")
        assert '"name": "Ito", "day": "Monday", "time": "18:15", "people": 3' in chat.text(".assistant .prose")
        chat.picture(place / "chat.png")
        assert chat.problems == []
    finally:
        browser.close()
