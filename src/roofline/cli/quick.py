"""The quick way into a command: reads well-formed calls without Typer.

What it does not understand to the letter (--help, an unknown option, a wrong value) it leaves to Typer, which explains.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from roofline.cli.options import Argument, Option, described
from roofline.common.errors import RooflineError

COMMANDS = {
    "generate": "run.generate",
    "serve": "run.serve",
    "chat": "run.chat",
}  # those whose start is waited for -> module


def run(words: Sequence[str]) -> int | None:
    """Run the command that `words` call and return the exit status, None when they are not for us."""
    if not words or words[0] not in COMMANDS:
        return None
    command = import_module(f"roofline.cli.{COMMANDS[words[0]]}").command
    values = parse(command, words[1:])
    if values is None:
        return None
    from roofline.common import env, log

    env.quiet_numpy()
    try:
        log.configure()
        command(**values)
        sys.stdout.flush()
    except RooflineError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; nothing is to be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parse(command: Callable[..., Any], words: Sequence[str]) -> dict[str, Any] | None:
    """The keyword arguments that `words` give a command, None where they are not exactly right."""
    parameters = described(command)
    if not all(about for _, _, about in parameters):
        return None
    named = _names(parameters)
    places = [(parameter.name, kind) for parameter, kind, about in parameters if isinstance(about, Argument)]
    values = {p.name: p.default for p, _, _ in parameters if p.default is not p.empty}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            if not places:
                return None
            target, kind = places.pop(0)
            value = _read(word, kind)
        else:
            name, equals, given = word.partition("=")
            if name not in named or (named[name].kind is bool and equals):
                return None
            target, kind, about, on = named[name]
            if kind is bool:
                value = on
            else:
                value = _read(given if equals else _next(rest), kind, about)
        if value is None:
            return None
        values[target] = value
    return values if len(values) == len(parameters) else None


class _Named(NamedTuple):
    target: str  # the parameter
    kind: Any
    about: Option
    on: bool  # what a switch of this name sets


def _names(parameters: list[tuple[Any, Any, Any]]) -> dict[str, _Named]:
    """Names on the command line -> what they set."""
    named = {}
    for parameter, kind, about in parameters:
        if isinstance(about, Option):
            for name in about.names or (f"--{parameter.name.replace('_', '-')}",):
                on, _, off = name.partition("/")
                named[on] = _Named(parameter.name, kind, about, True)
                if off:
                    named[off] = _Named(parameter.name, kind, about, False)
    return named


def _next(rest: list[str]) -> str | None:
    """The word that follows an option; None where there is none, or where it looks like an option itself."""
    if not rest or (rest[0].startswith("-") and not rest[0][1:2].isdigit()):
        return None
    return rest.pop(0)


def _read(word: str | None, kind: Any, about: Option | None = None) -> Any:
    """A word as a value of a type, None when it is none, or out of bounds."""
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return word if word in get_args(kind) else None
    if word is None or kind is str:
        return word
    if kind not in (int, float):
        return None
    try:
        value = kind(word)
    except ValueError:
        return None
    low, high = (about.min, about.max) if about is not None else (None, None)
    return value if (low is None or value >= low) and (high is None or value <= high) else None
