"""The standard streams of a command: a terminal that knows no Unicode, a pipe that closes, a disk that is full."""

import codecs
import io
import os
import sys
from contextlib import suppress

from roofline.common.errors import ConfigError

STDIN, STDOUT, STDERR = 0, 1, 2
MAX_TEXT = 1 << 24  # characters of standard input, of a whole text and of one line: far beyond any context
_PLAIN = {"→": "->", "…": "...", "–": "-", "—": "-", "·": ".", "×": "x", "█": "#", "▏": "|", "µ": "u"}
_PLAIN |= dict.fromkeys("▎▍▌▋▊▉", "#") | dict.fromkeys("─━╺╸", "-") | dict.fromkeys("│┃", "|")


class _Stderr(io.TextIOWrapper):
    """Standard error whose loss ends nothing: what it says of a command is not what the command is for."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            silence(STDERR)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            silence(STDERR)


def prepare() -> None:
    """Make the process's streams such that printing raises nothing but OSError: a closed one reads and writes nothing,
    and characters that an encoding lacks are spelled with those that it has."""
    codecs.register_error("roofline.plain", _plain)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  for the whole process
    elif type(sys.stdin) is io.TextIOWrapper:  # not what a test or a notebook put there
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="surrogateescape")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif type(sys.stdout) is io.TextIOWrapper:
        sys.stdout.reconfigure(errors="roofline.plain")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    elif type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _Stderr(sys.stderr.buffer, sys.stderr.encoding, "roofline.plain", line_buffering=True)


def silence(number: int) -> None:
    """Let a stream that cannot be written, by its number, take everything from here on, at the program's exit too."""
    with suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, number)
        os.close(sink)


def read_text() -> str:
    """All of standard input. Raises ConfigError where it is not text, or longer than MAX_TEXT."""
    return checked(_bounded(sys.stdin.read(MAX_TEXT + 1), "standard input"), "standard input")


def read_line() -> str:
    """The next line of standard input. Raises EOFError at its end, ConfigError where it is longer than MAX_TEXT."""
    line = _bounded(sys.stdin.readline(MAX_TEXT + 1), "a line of standard input")
    if not line:
        raise EOFError
    return line


def _bounded(text: str, what: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    raise ConfigError(
        f"{what} has more than {MAX_TEXT:,} characters, which no model reads at once; give a shorter text"
    )


def checked(text: str, what: str) -> str:
    """`text`, where it is text; bytes that Python could not decode are in it as surrogates, and may be UTF-8 all the
    same in a locale that is not. Raises ConfigError naming `what` and the first byte that is wrong."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{error.object[error.start]:02x} after {error.start} bytes"
    except UnicodeEncodeError as error:
        wrong = f"a lone surrogate after {error.start} characters"
    raise ConfigError(f"{what} is not UTF-8: {wrong}; convert it, for example with iconv")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "an error handler of output"
    text = error.object[error.start : error.end]
    spelled = (_PLAIN.get(character, character) for character in text)
    return "".join(character if character.isascii() else ascii(character)[1:-1] for character in spelled), error.end
