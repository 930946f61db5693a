"""The command `roofline`: finds the command that is called, reads its options, runs it, and reports errors."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from roofline.cli.commands import ROOT, Group, find, load
from roofline.cli.parser import Parser, UsageError, columns, summary
from roofline.common import env, log
from roofline.common.errors import RooflineError
from roofline.common.options import Options, declared, option


@dataclass(frozen=True)
class GlobalOptions(Options):
    """What stands before the command's name."""

    debug: bool = option(False, "Show the whole traceback of an error.")
    version: bool = option(False, "Print the version.")
    no_tune: bool = option(False, "Do not use what `roofline tune` chose.")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words`, or this process's arguments, call; the exit status.

    2 for a call that is not understood, 1 for an error with a cause and a remedy, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if words is None else words)
    count = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
    name, debug = "", False
    try:
        if "--help" in words[:count]:
            return _print_help("", ROOT)
        options = _global_options(words[:count])
        debug = options.debug
        if options.version:
            return _print_version()
        if options.no_tune:
            env.turn_off("ROOFLINE_TUNED")
        name, entry, rest = find(words[count:])
        plain = rest.index("--") if "--" in rest else None
        if isinstance(entry, Group) or "--help" in rest[:plain]:
            _print_help(name, entry)
            return 0 if rest else 2
        command = load(entry)
        keywords = Parser(name, command).parse(rest)
        log.configure()
        status = command(**keywords) or 0
        sys.stdout.flush()
    except UsageError as error:
        print(f"roofline: {error} (roofline {name + ' ' * bool(name)}--help tells more)", file=sys.stderr)
        return 2
    except RooflineError as error:
        if debug:
            raise
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; nothing is to be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _global_options(words: list[str]) -> GlobalOptions:
    def command(options: GlobalOptions) -> None: ...

    options = Parser("", command).parse(words)["options"] if words else GlobalOptions()
    assert isinstance(options, GlobalOptions)
    return options


def _print_version() -> int:
    import roofline

    print(roofline.__version__)
    return 0


def _print_help(name: str, entry: str | Group) -> int:
    from shutil import get_terminal_size

    width = min(get_terminal_size().columns, 120)
    if isinstance(entry, str):
        print(Parser(name, load(entry)).help(width))
        return 0
    print(f"Usage: roofline {name + ' ' * bool(name)}{'[OPTIONS] ' * (not name)}COMMAND [ARGS]...\n\n{entry.help}\n")
    rows = [(each, at.help if isinstance(at, Group) else summary(load(at))) for each, at in entry.commands.items()]
    print("Commands:", *columns(rows, width), sep="\n")
    if not name:
        flags = [(f"--{o.name.replace('_', '-')}", o.help) for o in declared(GlobalOptions).values()]
        print("\nOptions:", *columns(flags, width), sep="\n")
    return 0
