"""systemd is told when a server is ready, that it is well, and that it ends; systemd's own programs are the judges."""

import asyncio
import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roofline.common.errors import ConfigError
from roofline.server import serve as module
from roofline.server import text_side
from roofline.server.options import ServeOptions
from roofline.server.service_manager import VARIABLES, ServiceManager, service_manager


class Listener:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.socket.settimeout(30)

    def next(self) -> list[str]:
        """The lines of the next message."""
        return self.socket.recv(4096).decode().splitlines()

    def all(self) -> list[list[str]]:
        """What has come and was not read."""
        self.socket.setblocking(False)
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self.next())
        return messages


@pytest.fixture(params=["file", "abstract"])
def address(request, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "file" else f"@roofline-test-{os.getpid()}"


@pytest.fixture
def listener(address: str) -> Iterator[Listener]:
    listening = Listener(address)
    yield listening
    listening.socket.close()


def test_messages_are_those_of_systemd_notify(listener, address):
    if shutil.which("systemd-notify") is None:
        pytest.skip("systemd-notify is not installed (package systemd)")
    words = ["systemd-notify", "--no-block", "--ready", f"--pid={os.getpid()}", "--status=Serving tiny."]
    subprocess.run(words, env={**os.environ, "NOTIFY_SOCKET": address}, check=True, timeout=60)
    theirs = listener.next()
    ServiceManager(address).tell("READY=1", "STATUS=Serving tiny.", f"MAINPID={os.getpid()}")
    assert sorted(listener.next()) == sorted(theirs)


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_says_that_it_loads_is_ready_and_ends(listener, address, engine, make_context, monkeypatch, fails):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    may_load, seen = threading.Event(), []

    async def start():
        await asyncio.to_thread(may_load.wait, 30)
        if fails:
            raise ConfigError("no such model")
        return engine.description

    def launch() -> None:  # the engine's process inherits none of it
        seen.append([name for name in VARIABLES if name in os.environ])

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "launch", launch, raising=False)
    monkeypatch.setattr(text_side, "load_text", lambda *_: make_context().text)
    monkeypatch.setattr(module, "make_engine", lambda _: engine)
    lines: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(module.log, "say", lines.put)
    told: list[list[str]] = []

    def manage() -> None:
        assert lines.get(timeout=60).startswith("Listening on ")
        told.append(listener.next())
        may_load.set()
        if not fails:
            told.extend(listener.next() for _ in range(3))
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    managing = threading.Thread(target=manage)
    managing.start()
    options = ServeOptions("m", port=0, served_model_name=["tiny\nSTATUS=x"], golden_check="off")
    try:
        with pytest.raises(ConfigError, match="no such model") if fails else contextlib.nullcontext():
            module.serve(options)
    finally:
        managing.join(60)
        signal.signal(signal.SIGTERM, before)
    told += listener.all()
    assert seen == [[]]
    assert told[0] == ["STATUS=Loading tiny STATUS=x."]
    stopping = [message for message in told if "STOPPING=1" in message]
    if fails:
        assert [message[0] for message in told[1:]] == ["STOPPING=1"]
        return
    assert told[1] == ["READY=1", f"MAINPID={os.getpid()}", "STATUS=Serving tiny STATUS=x."]
    assert told[2] == told[3] == ["WATCHDOG=1"]
    assert stopping == [["STOPPING=1", "STATUS=Answers that run are finished."]]


def test_the_watchdog_hears_nothing_while_the_engine_stands_still(listener, address, caplog):
    troubles = iter([None, None, "it computes nothing", "it computes nothing", None, None])

    async def watch() -> None:
        done = asyncio.create_task(asyncio.sleep(0))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await ServiceManager(address, 0.002).watch("m", [done], lambda: next(troubles))

    asyncio.run(watch())
    assert [message[0] for message in listener.all()] == ["STATUS=Loading m.", "READY=1", *["WATCHDOG=1"] * 4]
    assert caplog.messages == ["the service manager's watchdog is not told that all is well: it computes nothing"]


def test_who_did_not_ask_for_a_watchdog_is_told_once(listener, address):
    async def watch() -> None:
        await ServiceManager(address).watch("m", [asyncio.create_task(asyncio.sleep(0))], lambda: None)

    asyncio.run(watch())
    assert [message[0] for message in listener.all()] == ["STATUS=Loading m.", "READY=1"]


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"NOTIFY_SOCKET": "/run/n"}, None),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "3000000"}, 3.0),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "MINE"}, 3.0),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "often"}, None),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_environment_says_whom_to_tell_and_is_taken(monkeypatch, variables, seconds):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(os.getpid()) if value == "MINE" else value)
    manager = service_manager()
    assert manager is not None
    assert (manager._address, manager._watchdog_seconds) == ("/run/n", seconds)
    assert not {*VARIABLES} & {*os.environ}
    assert service_manager() is None


def test_what_nobody_takes_is_logged_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    manager = ServiceManager(str(tmp_path / "nobody"))
    for _ in range(3):
        manager.tell("READY=1")
    assert len(caplog.records) == 1
    assert "cannot be told 'READY=1': No such file or directory" in caplog.text
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:1234")
    assert service_manager() is None
    assert "NOTIFY_SOCKET='vsock:2:1234' is no unix socket" in caplog.text


def test_a_full_socket_does_not_hold_the_server_up(listener, address, caplog):
    manager = ServiceManager(address)
    for _ in range(5000):
        manager.tell("WATCHDOG=1")
    assert "cannot be told 'WATCHDOG=1': Resource temporarily unavailable" in caplog.text
    assert len(caplog.records) == 1
    assert listener.all()
