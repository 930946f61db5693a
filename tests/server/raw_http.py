"""HTTP as bytes, for tests of what clients and proxies may send."""

import contextlib
import json
import socket
import time

import httptools


class Answers:
    """The answers that stand in what a server sent: (status, body) each, in order; `whole`: whether the last one is
    complete and nothing is beside them."""

    def __init__(self, data: bytes):
        self.list: list[tuple[int, bytes]] = []
        self.heads: list[dict[str, str]] = []
        self.whole, self._status, self._body, self._head = True, 0, b"", {}
        parser = self._parser = httptools.HttpResponseParser(self)
        parser.feed_data(data)

    def on_message_begin(self):
        self.whole, self._body, self._head = False, b"", {}

    def on_header(self, name, value):
        self._head[name.decode().lower()] = value.decode()

    def on_headers_complete(self):
        self._status = self._parser.get_status_code()

    def on_body(self, body):
        self._body += body

    def on_message_complete(self):
        self.whole = True
        self.list.append((self._status, self._body))
        self.heads.append(self._head)


def connect(address: str, timeout: float = 20.0, received_bytes: int | None = None) -> socket.socket:
    """received_bytes: of the buffer for what arrives; None: the system's."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    if received_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    connection.settimeout(timeout)
    connection.connect((host, int(port)))
    return connection


def sent(address: str, reads: list[bytes], pause: float = 0.01) -> bytes:
    """All that a server answers, until it closes, to what is sent in parts that it reads apart."""
    received = b""
    with connect(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for number, part in enumerate(reads):
                if number:
                    time.sleep(pause)
                connection.sendall(part)
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                received += data
    return received


def request(method: str, path: str, *headers: str, body: bytes = b"", host: str = "localhost") -> bytes:
    """One of HTTP/1.1; with a body its length is among the headers."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def tokenize(prompt: str, *headers: str) -> bytes:
    """A request whose answer has the bytes of the prompt."""
    return request("POST", "/tokenize", *headers, body=json.dumps({"prompt": prompt}).encode())


def told(body: bytes) -> str:
    """The prompt that an answer of /tokenize is to."""
    return bytes(json.loads(body)["tokens"]).decode()
