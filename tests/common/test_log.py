"""Lines that nobody reads stop nobody, and are counted."""

import logging
import os
import time

import pytest

from roofline.common import log


@pytest.fixture
def pipe():
    """(read end, write end) of a pipe that is full after 4 KiB."""
    import fcntl

    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    yield read, write
    for descriptor in (read, write):
        os.close(descriptor)


def lines_from(read, last):
    data = b""
    while last not in data:
        data += os.read(read, 65536)
    return data.decode().splitlines()


def test_lines_are_written_in_their_order(pipe):
    handler = log.ThreadedHandler(pipe[1])
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.emit(logging.makeLogRecord({"levelname": "INFO", "msg": "a %s", "args": ("b",)}))
    handler.put("c \ud800")
    handler.close()
    assert lines_from(pipe[0], b"ud800") == ["INFO a b", "c \\ud800"]


def test_a_stream_that_nobody_reads_stops_nobody(pipe):
    read, write = pipe
    handler = log.ThreadedHandler(write, max_lines=10)
    started = time.monotonic()
    for number in range(1000):
        handler.put(f"{number:04} " + "x" * 1000)
    assert time.monotonic() - started < 5
    got = lines_from(read, b"0005 ")
    handler.put("afterwards")
    got += lines_from(read, b"afterwards")
    lost = [line for line in got if "lines of the log are lost" in line]
    written = [line for line in got if line[:4].isdigit()]
    assert lost
    assert sum(int(line.split()[0]) for line in lost) + len(written) == 1000
    assert written == sorted(written)
    handler.close()


def test_closing_waits_for_a_second_at_most(pipe, monkeypatch):
    monkeypatch.setattr(log, "CLOSE_SECONDS", 0.05)
    handler = log.ThreadedHandler(pipe[1], max_lines=2)
    for _ in range(10):
        handler.put("x" * 3000)
    handler.close()
    assert handler._thread.is_alive(), "it would have written all of it"
    while handler._thread.is_alive():
        os.read(pipe[0], 65536)
        handler.put("end") if handler._lines.empty() else None
        handler._lines.put(None) if handler._lines.empty() else None
        handler._thread.join(0.05)


def test_loggers_get_their_handlers_back():
    logger = logging.getLogger("roofline.test_log")
    logger.handlers[:] = before = [logging.NullHandler()]
    with log.threaded_handler("roofline.test_log") as handler:
        assert logger.handlers == [handler]
    assert logger.handlers == before
    assert not handler._thread.is_alive()
    logger.handlers[:] = []
