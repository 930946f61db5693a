"""A socket that a server is started with, as systemd hands it over."""

import os
import socket
import subprocess
import sys

from roofline.server import activation

CODE = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
from roofline.common.errors import ConfigError
from roofline.server.activation import inherited_socket
try:
    listening = inherited_socket()
    print(listening.getsockname()[1], listening.get_inheritable(), "LISTEN_FDS" in os.environ, inherited_socket())
except ConfigError as error:
    print(error)
"""


def inherited(descriptor: int, count: str = "1") -> str:
    """What a process says that has this descriptor as its third."""
    words = [
        sys.executable,
        "-c",
        f"import os, sys\nos.dup2({descriptor}, 3)\nos.execv(sys.executable, [sys.executable, '-c', {CODE!r}])",
    ]
    done = subprocess.run(
        words,
        env={**os.environ, "LISTEN_FDS": count},
        pass_fds=(descriptor,),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_socket_is_taken_once_and_kept_from_children():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert inherited(listening.fileno()) == f"{port} False False None"


def test_what_is_no_single_tcp_socket_is_refused():
    with socket.socket(socket.AF_UNIX) as listening:
        assert "ListenStream=HOST:PORT" in inherited(listening.fileno())
        assert "LISTEN_FDS=2" in inherited(listening.fileno(), "2")
    reading, writing = os.pipe()
    try:
        assert "descriptor 3 is no socket" in inherited(reading)
    finally:
        os.close(reading)
        os.close(writing)


def test_sockets_of_another_process_are_left_alone(monkeypatch):
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert activation.inherited_socket() is None
