"""Options declared once: a frozen dataclass whose fields say their help, choices, bounds and which backends have them.

A subclass of `Options` declares a group of options (loading, engine, serving). From the declaration come the checks of
values, the command line (cli/parser.py), the keywords of `load` and `LLM`, what other processes are sent (`changes`),
what a draft model inherits (`for_draft`), and the table in docs/options.md.

    @dataclass(frozen=True)
    class LoadOptions(Options):
        threads: int | None = option(None, "Compute threads. None: the usable cores.", minimum=1, backends=("cpu",))
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.names import did_you_mean

T = TypeVar("T")
A = TypeVar("A", bound="Options")
B = TypeVar("B", bound="Options")
Choices = Sequence[str] | Callable[[str], Sequence[str]]

_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


@dataclass(eq=False, repr=False)  # half the time to define and to make of a frozen one
class Option:
    """What is declared of one option.

    Args:
        help: one line, for `--help` and the docs.
        flags: names on the command line; none: `--name`, and for a switch that is on by default `--name/--no-name`.
        choices: allowed texts, or a function of the text at hand that lists them ("" for all that are known so far).
        minimum, maximum: bounds of a number, inclusive.
        unit: what a number counts: tokens, layers, seconds.
        topic: heading under which `--help` and the docs list it.
        backends: those that have it; none: all. elsewhere: whether another value than the default is "refused" by
            other backends, or "ignored" because there it makes no difference.
        instead: what else may help where a backend does not have it.
        for_draft: a draft model that is loaded beside the model inherits the value.
        command_line: whether commands offer it.
        key: of a run's configuration, whose value it is: errors that name the key are told of the option.
        secret: its value is never shown.

    The rest is filled in from the field: its name, default (... where there is none), the types of its values,
    whether None is allowed and whether it is a list; texts that its type lists (Literal) are choices, or, beside a
    number, allowed words.
    """

    help: str
    flags: tuple[str, ...] = ()
    choices: Choices = ()
    minimum: float | None = None
    maximum: float | None = None
    unit: str = ""
    topic: str = ""
    backends: tuple[str, ...] = ()
    elsewhere: Literal["refused", "ignored"] = "refused"
    instead: tuple[str, ...] = ()
    for_draft: bool = True
    command_line: bool = True
    secret: bool = False
    key: str = ""
    name: str = ""
    default: object = ...
    kinds: tuple[type, ...] = ()
    words: tuple[str, ...] = ()
    optional: bool = False
    repeated: bool = False

    def bind(self, name: str, annotation: object, default: object) -> "Option":
        """This option as the field or parameter of that name, type and default."""
        parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        optional, repeated = types.NoneType in parts, any(get_origin(part) is list for part in parts)
        parts = tuple(get_args(part)[0] if get_origin(part) is list else part for part in parts)
        words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
        kinds = tuple(part for part in parts if part in _KIND_NAMES)
        return replace(self, name=name, default=default, kinds=kinds, words=words, optional=optional, repeated=repeated)

    def allowed(self, text: str = "") -> tuple[str, ...]:
        """All texts that may be given; empty where any may, or where the values are numbers. text: the one at hand."""
        choices = self.choices(text) if callable(self.choices) else self.choices
        return tuple(choices) or self.words

    def flag_pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each way to write the option on a command line: (flag, flag that switches it off or "")."""
        dashed = self.name.replace("_", "-").strip("-")
        default = f"--{dashed}/--no-{dashed}" if self.kinds == (bool,) and self.default is True else f"--{dashed}"
        for flag in self.flags or (default,):
            on, _, off = flag.partition("/")
            yield on, off

    def remedy(self) -> str:
        """What to give, for an error message: "choose one of a, b", "give a whole number of at least 1"."""
        if not self.kinds or (self.kinds == (str,) and self.allowed()):
            return f"choose one of {', '.join(self.allowed())}"
        text = "give " + _KIND_NAMES[self.kinds[0]]
        text += f" of {self.unit}" if self.unit and self.kinds[0] is not str else ""
        bounds = [("at least", self.minimum), ("at most", self.maximum)]
        limits = " and ".join(f"{name} {limit:,g}" for name, limit in bounds if limit is not None)
        text += f", {limits}" if limits else ""
        return text + "".join(f", or {word!r}" for word in self.words)

    def check(self, value: object) -> None:
        """Raises ConfigError, which names option, value and remedy, for a value that the option cannot have."""
        if value is None and self.optional:
            return
        if self.repeated and isinstance(value, list):
            for element in value:
                replace(self, repeated=False).check(element)
            return
        if isinstance(value, bool):
            fits = bool in self.kinds
        elif isinstance(value, str):
            allowed = self.allowed(value)
            fits = value in allowed if allowed else str in self.kinds
        elif isinstance(value, int | float):
            fits = float in self.kinds or (int in self.kinds and isinstance(value, int))
            fits = fits and (isinstance(value, int) or isfinite(value))
            fits = fits and (self.minimum is None or value >= self.minimum)
            fits = fits and (self.maximum is None or value <= self.maximum)
        else:
            fits = Path in self.kinds and isinstance(value, Path)
        if not fits:
            near = did_you_mean(value, self.allowed()) if isinstance(value, str) else ""
            setting = self.name if self.secret else f"{self.name}={value!r}"
            raise ConfigError(f"{setting} cannot be used: {self.remedy()}{'' if self.secret else near}")

    def check_backend(self, value: object, backend: str) -> None:
        """Raises UnsupportedError for a value other than the default where the backend does not have the option."""
        if self.backends and self.elsewhere == "refused" and backend not in self.backends and value != self.default:
            only = (
                f"only backend {' and '.join(self.backends)} {'has' if len(self.backends) == 1 else 'have'} this option"
            )
            instead = (*self.instead, *(f"backend={name}" for name in self.backends))
            raise UnsupportedError(f"{self.name}={value!r} with backend {backend!r}", only, instead)

    def parse(self, text: str) -> object:
        """The value, or the element of a list, that a text of the command line stands for. Raises as `check`."""
        value: object = text
        kind = next((kind for kind in (int, float, Path) if kind in self.kinds and text not in self.words), str)
        with contextlib.suppress(ValueError):
            value = kind(text)
        replace(self, repeated=False).check(value)
        return value


def option(
    default: T,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: Choices = (),
    minimum: float | None = None,
    maximum: float | None = None,
    unit: str = "",
    topic: str = "",
    backends: tuple[str, ...] = (),
    elsewhere: Literal["refused", "ignored"] = "refused",
    instead: tuple[str, ...] = (),
    for_draft: bool = True,
    command_line: bool = True,
    secret: bool = False,
    key: str = "",
) -> T:
    """A field of an `Options` class; the arguments are those of `Option`."""
    about = Option(
        help=help,
        flags=flags,
        choices=choices,
        minimum=minimum,
        maximum=maximum,
        unit=unit,
        topic=topic,
        backends=backends,
        elsewhere=elsewhere,
        instead=instead,
        for_draft=for_draft,
        command_line=command_line,
    )
    about.secret, about.key = secret, key
    return field(default=default, metadata={"option": about}, repr=not secret)


def declared(kind: "type[Options]") -> Mapping[str, Option]:
    """The declared options of a class, by name, in their order."""
    return _bind_all(fields(kind))


def same_option(kind: "type[Options]", name: str, default: object = ..., **changes: Any) -> Any:
    """A field that is declared as the option of that name of another class; changes: arguments of `Option`."""
    about = declared(kind)[name]
    default = about.default if default is ... else default
    return field(default=default, metadata={"option": replace(about, **changes)})


@cache
def _bind_all(all_fields: tuple[Field[object], ...]) -> Mapping[str, Option]:
    declarations = [(f, f.metadata["option"]) for f in all_fields if "option" in f.metadata]
    bound = {
        f.name: about.bind(f.name, f.type, ... if f.default is MISSING else f.default) for f, about in declarations
    }
    return types.MappingProxyType(bound)


@dataclass(frozen=True)
class Options:
    """Base of declared groups of options; values are checked at construction.

    elsewhere: names that other programs have for such options -> what to do here instead, for the error.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *_: object, **keywords: object) -> Self:
        # Before dataclass's own __init__, whose TypeError does not know what was meant.
        _check_names(cls, keywords, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, about in declared(type(self)).items():
            about.check(getattr(self, name))

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, object], owner: str = "") -> Self:
        """The options that keywords give. Raises TypeError, with the nearest name, for one that does not exist.

        owner: who takes the keywords, for the message; default the class.
        """
        _check_names(cls, keywords, owner or cls.__name__)
        return cls(**keywords)

    def changes(self) -> dict[str, Any]:
        """The options whose values are not the defaults: what is sent to another process, to be made anew there."""
        return {name: getattr(self, name) for name, about in declared(type(self)).items() if self._changed(about)}

    def for_draft(self) -> Self:
        """The options of a draft model that is loaded beside this one: those that it inherits, the others' defaults."""
        values = {name: getattr(self, name) for name, about in declared(type(self)).items() if about.for_draft}
        return type(self)(**values)

    def _changed(self, about: Option) -> bool:
        value = getattr(self, about.name)
        return type(value) is not type(about.default) or value != about.default


def _check_names(kind: "type[Options]", keywords: Mapping[str, object], owner: str) -> None:
    names = kind.__dataclass_fields__
    for name in keywords:
        if name not in names:
            instead = kind.elsewhere.get(name)
            near = did_you_mean(name, names) if instead is None else f": {instead}"
            raise TypeError(f"{owner} has no option {name!r}{near}")


def split_keywords(keywords: Mapping[str, object], first: type[A], second: type[B], *, owner: str) -> tuple[A, B]:
    """An instance of each class, with the keywords that it declares; one that both declare goes to both.

    Raises TypeError, with the nearest name, for a keyword that neither declares.
    """
    option_names = {**declared(first), **declared(second)}
    for name in keywords:
        if name not in option_names:
            raise TypeError(f"{owner} has no option {name!r}{did_you_mean(name, option_names)}")
    return (
        first.from_keywords({n: v for n, v in keywords.items() if n in declared(first)}),
        second.from_keywords({n: v for n, v in keywords.items() if n in declared(second)}),
    )
