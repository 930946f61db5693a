"""Logging: one logger per room, to stderr, configured only by programs (never by import)."""

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator

from roofline.common import env

STDERR = 2  # file descriptor
MAX_LINES = 10_000  # that wait for stderr to take them
CLOSE_SECONDS = 1.0  # that the last lines may take


def get(room: str) -> logging.Logger:
    """The logger of a room, e.g. ``get("engine")``."""
    return logging.getLogger(f"roofline.{room}")


def configure(default: str = "warning") -> None:
    """Send roofline's log lines to stderr at ROOFLINE_LOG's level. Called by programs only."""
    level = (env.read("ROOFLINE_LOG") or default).upper()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("roofline")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


class ThreadedHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own: where nobody reads the other end of a pipe, lines are
    lost, which a later line says, and whoever logs goes on."""

    def __init__(self, descriptor: int = STDERR, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._descriptor, self._lost = descriptor, 0
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(self.format(record))
        except Exception:  # as every handler: a line that cannot be formatted ends nothing
            self.handleError(record)

    def put(self, line: str) -> None:
        """Have a line written as it is."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what waits, for a second at most, and nothing more."""
        super().close()
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            if lost:
                line = f"{lost} lines of the log are lost: nobody has read this stream.\n{line}"
            data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
            try:
                # Not through sys.stderr, whose lock would be held at exit by a write that nobody lets end.
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # it is closed, or its disk is full
                continue


@contextlib.contextmanager
def threaded_handler(*loggers: str) -> Iterator[ThreadedHandler]:
    """Within it these loggers write through a ThreadedHandler, in the format that `configure` has set."""
    before = [(logging.getLogger(name), logging.getLogger(name).handlers[:]) for name in loggers]
    handler = ThreadedHandler()
    formatters = [handler.formatter for _, handlers in before for handler in handlers]
    handler.setFormatter(formatters[0] if formatters else None)
    for logger, _ in before:
        logger.handlers[:] = [handler]
    try:
        yield handler
    finally:
        for logger, handlers in before:
            logger.handlers[:] = handlers
        handler.close()


def say(line: str) -> None:
    """A line on stderr for whoever started the program, in the order of the log's lines."""
    for handler in logging.getLogger("roofline").handlers:
        if isinstance(handler, ThreadedHandler):
            handler.put(line)
            return
    print(line, file=sys.stderr, flush=True)
