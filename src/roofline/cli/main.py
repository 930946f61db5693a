"""The command `roofline`: finds the command that is called, reads its options, runs it, and reports errors."""

import sys
from collections.abc import Sequence
from contextlib import suppress

from roofline.cli import streams
from roofline.cli.commands import ROOT, CommandGroup, find, load
from roofline.cli.parser import Parser, UsageError, columns, summary
from roofline.common import log
from roofline.common.errors import RooflineError
from roofline.common.extras import missing_package
from roofline.common.names import did_you_mean

GLOBAL_FLAGS = {  # what may stand before the command's name
    "--debug": "Show the whole traceback of an error.",
    "--version": "Print the version.",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words`, or this process's arguments, call; the exit status.

    2 for a call that is not understood, 1 for an error with a cause and a remedy, 130 after Ctrl-C (a command may raise
    KeyboardInterrupt with words of its own), 141 when the reader of the output is gone, as of other programs that
    SIGPIPE ends.
    """
    streams.prepare()
    words = list(sys.argv[1:] if words is None else words)
    call = _Call()
    try:
        status = call.run(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as abort:
        message, status = str(abort) or "Aborted!", 130
    except BrokenPipeError:
        streams.silence(streams.STDOUT)
        return 141
    except UsageError as error:
        called = " ".join(filter(None, ("roofline", call.name or error.group, "--help")))
        message, status = f"roofline: {error} ({called} tells more)", 2
    except (RooflineError, OSError, ImportError) as error:
        readable = missing_package(error) if isinstance(error, ImportError) else error
        if call.debug or readable is None:
            raise
        message, status = (
            f"roofline: {call.in_flags(readable) if isinstance(readable, RooflineError) else _of_system(readable)}",
            1,
        )
    with suppress(OSError):  # what was printed before the error comes before it
        sys.stdout.flush()
    print(message, file=sys.stderr)
    return status


class _Call:
    """One call of the command line, as far as it is understood: the command's name, and whether errors are shown with
    their traceback."""

    def __init__(self) -> None:
        self.name, self.debug = "", False
        self._parser: Parser | None = None

    def in_flags(self, error: RooflineError) -> str:
        """The error's message in the words of the command line."""
        return str(error) if self._parser is None else self._parser.in_flags(str(error))

    def run(self, words: list[str]) -> int:
        """Find the command, read its options, run it; its exit status."""
        count = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
        flags = words[:count]
        if "--help" in flags or "-h" in flags:
            return _print_help("", ROOT)
        for flag in flags:
            if flag not in GLOBAL_FLAGS:
                near = did_you_mean(flag, GLOBAL_FLAGS)
                raise UsageError(f"there is no option {flag} before the command{near or '; options of one follow it'}")
        self.debug = "--debug" in flags
        if "--version" in flags:
            import roofline

            print(roofline.__version__)
            return 0
        words = words[count:]
        if words[:1] == ["help"]:  # as typed with git, docker, pip
            words = [*words[1:], "--help"]
        self.name, entry, rest = find(words)
        plain = rest.index("--") if "--" in rest else None
        if isinstance(entry, CommandGroup) or "--help" in rest[:plain]:
            _print_help(self.name, entry)
            return 0 if rest else 2
        command = load(entry)
        self._parser = Parser(self.name, command)
        keywords = self._parser.parse(rest)
        log.configure()
        return command(**keywords) or 0


def _of_system(error: OSError) -> str:
    """What the operating system refused, and of which file."""
    from roofline.common.files import cause_of

    if error.filename is not None:
        return f"{error.filename}: {cause_of(error)}"
    streams.silence(streams.STDOUT)  # of what is written here, only standard output is not opened by a name
    return f"the output cannot be written: {cause_of(error)}"


def _print_help(name: str, entry: str | CommandGroup) -> int:
    from shutil import get_terminal_size

    width = min(get_terminal_size().columns, 120)
    if isinstance(entry, str):
        print(Parser(name, load(entry)).help(width))
        return 0
    print(f"Usage: roofline {name + ' ' * bool(name)}{'[OPTIONS] ' * (not name)}COMMAND [ARGS]...\n\n{entry.help}\n")
    rows = [
        (command, at.help if isinstance(at, CommandGroup) else summary(load(at)))
        for command, at in entry.commands.items()
    ]
    if not name:
        rows.append(("help", "Show what a command takes: help COMMAND, as COMMAND --help."))
    print("Commands:", *columns(rows, width), sep="\n")
    if not name:
        print("\nOptions:", *columns(GLOBAL_FLAGS.items(), width), sep="\n")
    return 0
