"""The command `roofline`: finds the command that is called, reads its options, runs it, and reports errors."""

import os
import sys
from collections.abc import Sequence

from roofline.cli.commands import ROOT, Group, find, load
from roofline.cli.parser import Parser, UsageError, columns, summary
from roofline.common import env, log
from roofline.common.errors import RooflineError
from roofline.common.names import did_you_mean

GLOBAL_FLAGS = {  # what may stand before the command's name
    "--debug": "Show the whole traceback of an error.",
    "--version": "Print the version.",
    "--no-tune": "Do not use what `roofline tune` chose.",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words`, or this process's arguments, call; the exit status.

    2 for a call that is not understood, 1 for an error with a cause and a remedy, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if words is None else words)
    count = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
    name, debug = "", False
    try:
        flags = words[:count]
        if "--help" in flags or "-h" in flags:
            return _print_help("", ROOT)
        for flag in flags:
            if flag not in GLOBAL_FLAGS:
                raise UsageError(f"there is no option {flag}{did_you_mean(flag, GLOBAL_FLAGS)}")
        debug = "--debug" in flags
        if "--version" in flags:
            import roofline

            print(roofline.__version__)
            return 0
        if "--no-tune" in flags:
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
        called = " ".join(filter(None, ("roofline", name or error.group, "--help")))
        print(f"roofline: {error} ({called} tells more)", file=sys.stderr)
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
        print("\nOptions:", *columns(GLOBAL_FLAGS.items(), width), sep="\n")
    return 0
