"""Calls the command line inside the test's process, and keeps what it printed."""

import io
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

PROGRAM_LOGGERS = ("roofline", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


class CommandResult:
    """What a call of the command line printed and returned; `exception`: an error that --debug let through."""

    def __init__(self) -> None:
        self.exit_code: int | str | None = None
        self.exception: Exception | None = None
        self._written: list[tuple[str, str]] = []

    def stream(self, name: str) -> io.StringIO:
        class Stream(io.StringIO):
            def write(stream, text: str) -> int:
                self._written.append((name, text))
                return len(text)

        return Stream()

    @property
    def stdout(self) -> str:
        return "".join(text for name, text in self._written if name == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(text for name, text in self._written if name == "stderr")

    @property
    def output(self) -> str:
        return "".join(text for _, text in self._written)


@contextmanager
def loggers_as_before() -> Iterator[None]:
    """Undoes what programs do to our loggers, and to uvicorn's, when they start."""
    loggers = [logging.getLogger(name) for name in PROGRAM_LOGGERS]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            if logger.level != level:
                logger.setLevel(level)  # which also clears what loggers remember of their levels


def call_roofline(words: Iterable[object], input: str = "", env: dict[str, str] | None = None) -> CommandResult:
    """Calls the command line in this process. Fixtures of modules call it too, so loggers stay as they were."""
    from roofline.cli.main import main
    from roofline.common.errors import RooflineError

    result = CommandResult()
    with pytest.MonkeyPatch.context() as patch, loggers_as_before():
        patch.setattr(sys, "stdin", io.StringIO(input))
        patch.setattr(sys, "stdout", result.stream("stdout"))
        patch.setattr(sys, "stderr", result.stream("stderr"))
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        try:
            result.exit_code = main([str(word) for word in words])
        except SystemExit as error:
            result.exit_code = error.code
        except RooflineError as error:
            result.exit_code, result.exception = 1, error
    return result
