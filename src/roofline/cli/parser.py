"""The command line of a command, made from its signature and the options that it declares.

A command is a function. Each parameter is a value without a name (`Annotated[str, Argument("...")]`), one option
(`Annotated[int, Option("...")]`), or a declared group (`options: LoadOptions`, perhaps `Annotated` with `Without`),
which becomes one flag for each option in it. A name that several groups declare is one flag, and sets all of them.
Below `@reads_option_file` a command has `--config FILE` too: all of its options from a YAML file (option_file.py).
"""

import inspect
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args, get_origin

from roofline.common.errors import ConfigError, RooflineError
from roofline.common.fields import shorten
from roofline.common.names import did_you_mean
from roofline.common.options import Option, Options, declared

if TYPE_CHECKING:
    from roofline.cli.option_file import FileEntry

Command = Callable[..., int | None]
Reading = tuple[Option, str, object]  # an option or argument, the flag or place that gives it, its value
CONFIG = Option(
    "YAML file of options, each as `max-running: 8`, a list where it may be repeated. What the call itself says wins; "
    "--no-NAME switches off what the file switches on.",
).bind("config", Path | None, None)
OwnWords = Callable[[Sequence[str], Container[str]], list[str]]
_FOREIGN = (  # patterns of what no option is named in: a path at the beginning of a message, and what is quoted
    r"""^[^:'"]*/[^:'"]*:""",
    r"""(?<!\w)'(?:[^'\\]|\\.)*'(?!\w)""",
    r"""(?<!\w)"(?:[^"\\]|\\.)*"(?!\w)""",
)


def understands(own_words: OwnWords) -> Callable[[Command], Command]:
    """A command whose words are rewritten first: it takes flags as another program calls them."""

    def mark(command: Command) -> Command:
        command.own_words = own_words  # type: ignore[attr-defined]  # `Parser` asks for it
        return command

    return mark


def reads_option_file(command: Command) -> Command:
    """A command that takes its options from a YAML file too, by `--config FILE`."""
    command.reads_option_file = True  # type: ignore[attr-defined]  # `Parser` asks for it
    return command


class UsageError(RooflineError):
    """A call that a command, or a group of commands, does not understand; group: the group's name, if one does not."""

    def __init__(self, message: str, group: str = "") -> None:
        super().__init__(message)
        self.group = group


class Argument:
    """A value without a name, in the order of the parameters."""

    def __init__(self, help: str) -> None:
        self.help = help


class Only:
    """In `Annotated` with a declared group: this command offers only these of its options."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Without:
    """In `Annotated` with a declared group: this command does not offer these options."""

    def __init__(self, *names: str) -> None:
        self.names = names


class NamedOptions:
    """In `Annotated[frozenset[str], NamedOptions()]`: the names of the options that the call names."""


class Parser:
    """Reads the words of a command's call. name: of the command, for messages, such as "tune run"; command: the
    function that is called with what `parse` returns."""

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        self.arguments: list[Option] = []
        self.options: dict[str, Option] = {}  # by the name of the parameter, or of the field of a group
        self.flags: dict[str, tuple[Option, bool]] = {}  # --flag -> its option, and what a switch of that name sets
        self._typed: dict[str, str] = {}  # option or argument -> the flag, or the place, that the call gives it by
        self._words: list[str] = []  # of the call, and what stands behind the = of --flag=VALUE
        self._command = command
        # Rewrites words of other programs' calls; given them and our flags. Raises ValueError for what we have not.
        self._own_words: OwnWords | None = getattr(command, "own_words", None)
        self._groups: list[tuple[str, type[Options], object]] = []  # parameter, class, default
        self._names_parameter = ""
        self._grouped: set[str] = set()  # names of options that groups declare
        for parameter in inspect.signature(command).parameters.values():
            self._add(parameter)
        self._reads_file = hasattr(command, "reads_option_file")
        if self._reads_file:
            self.options[CONFIG.name] = CONFIG
        for option in self.options.values():
            for on, off in option.flag_pairs():
                self.flags[on] = option, True
                if off:
                    self.flags[off] = option, False
        if self._reads_file:  # which may have switched on what is off by default
            for name, option in self.options.items():
                if option.kinds == (bool,):
                    self.flags.setdefault(f"--no-{name.replace('_', '-')}", (option, False))

    def _add(self, parameter: inspect.Parameter) -> None:
        kind, extras = parameter.annotation, list[object]()
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
        default = ... if parameter.default is parameter.empty else parameter.default
        if isinstance(kind, type) and issubclass(kind, Options):
            self._groups.append((parameter.name, kind, default))
            options = declared(kind)
            self._grouped.update(options)
            names = {name for name, option in options.items() if option.command_line}
            for extra in extras:
                if isinstance(extra, Only):
                    names &= {*extra.names}
                elif isinstance(extra, Without):
                    names -= {*extra.names}
            for name, option in options.items():
                if name in names and name not in self.options:
                    own = default is ... or getattr(default, name) == option.default
                    self.options[name] = option if own else replace(option, default=getattr(default, name))
            return
        for extra in extras:
            if isinstance(extra, Argument):
                self.arguments.append(Option(extra.help).bind(parameter.name, kind, default))
            elif isinstance(extra, NamedOptions):
                self._names_parameter = parameter.name
            elif isinstance(extra, Option):
                self.options[parameter.name] = extra.bind(parameter.name, kind, default)

    def parse(self, words: Sequence[str]) -> dict[str, object]:
        """The command's keyword arguments. Raises UsageError, and what groups of options raise for their values."""
        words = self._in_own_words(words)
        self._words = [*words, *(word.partition("=")[2] for word in words if word.startswith("-"))]
        values = self._collect(self._read_words(words))
        file = values.pop(CONFIG.name, None) if self._reads_file else None
        if not isinstance(file, Path):
            return self._keywords(values)
        lines: dict[str, list[int]] = {}
        from_file = self._file_values(file, lines)
        try:
            return self._keywords({**from_file, **values})
        except ConfigError as error:  # about options together, or more of one than its bounds
            message = self.in_flags(str(error))
            named = {name: _in(message, name, self._typed.get(name, "")) for name in from_file.keys() - values.keys()}
            places = sorted(line for name in named if named[name] for line in lines[name])
            where = f", line{'s' * (len(places) > 1)} {' and '.join(map(str, places))}" if places else ""
            raise ConfigError(f"{file}{where}: {message}") from error

    def _in_own_words(self, words: Sequence[str]) -> Sequence[str]:
        """The words with flags of another program as ours. Raises UsageError for what we have not."""
        if self._own_words is None:
            return words
        try:
            return self._own_words(words, self.flags)
        except ValueError as error:
            raise UsageError(self.in_flags(str(error))) from None

    def _has_own_word(self, flag: str) -> bool:
        """Whether a flag, not ours, is another program's: rewritten, or refused with what to do instead."""
        try:
            return self._in_own_words([flag]) != [flag]
        except UsageError:
            return True

    def _read_words(self, words: Sequence[str]) -> Iterator[Reading]:
        """What each word, or flag with its value, gives."""
        places, rest, plain = list(self.arguments), list(words), False
        while rest:
            word = rest.pop(0)
            if not plain and word.startswith("-") and word not in ("-", "--"):
                yield self._read_flag(word, rest)
            elif not plain and word == "--":
                plain = True
            else:
                if not places:
                    raise UsageError(f"there is an argument too many: {word!r}")
                option = places[0]
                yield option, option.name.upper(), _read(option, option.name.upper(), word)
                if not option.repeated:
                    places.pop(0)

    def _collect(self, readings: Iterable[Reading]) -> dict[str, object]:
        """The values by the names of their options, and in `_typed` how each was given."""
        values: dict[str, object] = {}
        for option, flag, value in readings:
            before = self._typed.setdefault(option.name, flag)
            if before != flag and not option.repeated and option.kinds != (bool,):
                raise UsageError(f"{before} and {flag} say the same: leave one of the two out")
            if option is CONFIG and option.name in values:
                raise UsageError(f"{flag} is there twice: write the options into one file")
            if option.repeated:
                value = [*values.get(option.name, ()), value]  # type: ignore[misc]  # a list, where it is there
            values[option.name] = value
        return values

    def _file_values(self, path: Path, lines: dict[str, list[int]]) -> dict[str, object]:
        """The values that a file of options gives, by the names of the options, whose lines `lines` is told. Raises
        ConfigError with the line."""
        from roofline.cli.option_file import read_option_file

        words: list[str] = []
        readings: list[Reading] = []
        for entry in read_option_file(path):
            try:
                argument = self._file_argument(entry)
                entry_words = self._file_words(entry) if argument is None else []
                # Each by itself, for the line of what is wrong; then all, since some of other programs' go together.
                alone = [argument] if argument is not None else self._read_words(self._in_own_words(entry_words))
                for option, _, _ in alone:
                    lines.setdefault(option.name, []).append(entry.line)
            except UsageError as error:
                raise ConfigError(f"{path}, line {entry.line}: {error}") from None
            words += entry_words
            readings += [argument] if argument is not None else []
            self._words += entry.texts
        readings += self._read_words(self._in_own_words(words))
        given: set[str] = set()
        for option, flag, _ in readings:
            if option.name in given and not option.repeated:
                places = " and ".join(map(str, lines[option.name]))
                raise ConfigError(f"{path}: lines {places} both give {flag}: keep one of them")
            given.add(option.name)
        typed = self._typed
        self._typed = {}
        values = self._collect(readings)
        self._typed |= typed
        return values

    def _file_argument(self, entry: "FileEntry") -> Reading | None:
        """What an entry gives that names a value without a name of the command line, such as `model`."""
        argument = next((each for each in self.arguments if each.name.replace("_", "-") == entry.name), None)
        if argument is None:
            return None
        if len(entry.texts) != 1 or entry.is_list:
            raise UsageError(f"{entry.name} needs one value: {argument.help}")
        return argument, argument.name.upper(), _read(argument, entry.name, entry.texts[0])

    def _file_words(self, entry: "FileEntry") -> list[str]:
        """An entry of a file as words of a call."""
        flag = f"--{entry.name}"
        option, on = self.flags.get(flag, (None, True))
        if option is CONFIG:
            raise UsageError("config: a file of options names no further one")
        if option is not None and option.kinds == (bool,):
            if entry.switch is None:
                raise UsageError(f"{entry.name}: {option.remedy()}")
            return [next(name for name, meaning in self.flags.items() if meaning == (option, entry.switch == on))]
        if option is not None:
            if not entry.texts and not entry.is_list:
                raise UsageError(f"{entry.name} has no value: {option.remedy()}, or leave the line out")
            if entry.is_list and not option.repeated:
                raise UsageError(f"{entry.name} has one value, and this is a list: {option.remedy()}")
            return [f"{flag}={text}" for text in entry.texts]
        if not self._has_own_word(flag):
            known = [*(name[2:] for name in self.flags if name[:2] == "--"), *(each.name for each in self.arguments)]
            raise UsageError(f"there is no option {shorten(entry.name)!r}{did_you_mean(entry.name, known)}")
        if entry.switch is not None:
            return [flag if entry.switch else f"--no-{entry.name}"]
        return [f"{flag}={text}" for text in entry.texts] or [f"{flag}={'[]' if entry.is_list else 'null'}"]

    def in_flags(self, message: str) -> str:
        """An error's message, with options of this command, which the library names as a program does, or as keys of
        a configuration, as flags: as they were typed, or else by the first of their flags. What is quoted, a path
        before the first colon, and words of the call are other people's text, and stay as they are."""
        sections = {option.key.rpartition(".")[0] for option in self.options.values()} - {""}
        if sections:
            message = re.sub(rf"(?m)^(\s*)(?:{'|'.join(sorted(sections))}): ", r"\1", message)
        words = {*self._words, *map(os.path.normpath, self._words)}
        words = {word for word in words if self._flags_for_names(word) != word}
        call = [rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(words, key=len, reverse=True)]
        parts = re.split(f"({'|'.join([*call, *_FOREIGN])})", message)
        parts[::2] = map(self._flags_for_names, parts[::2])
        return "".join(parts)

    def _flags_for_names(self, text: str) -> str:
        for name, option in self.options.items():
            if option.kinds == (bool,):
                continue
            flag = self._typed.get(name) or next(option.flag_pairs())[0]
            if option.key and not any(word.startswith(f"{option.key}=") for word in self._words):
                key = rf"(?<![\w(/'\"-.]){re.escape(option.key)}"
                text = re.sub(f"{key} ?= ?", f"{flag} ", text)
                text = re.sub(rf"{key}(?![\w/]|\.\w)", flag, text)
            start = rf"(?<![\w(/'\"-.]){name}"  # not of a path, of Python or of a configuration
            text = re.sub(f"{start}=", f"{flag} ", text)
            if "_" in name:  # others are words
                text = re.sub(rf"{start}(?![\w/])", flag, text)
        return text

    def _read_flag(self, word: str, rest: list[str]) -> tuple[Option, str, object]:
        """The option that a word names, its flag, and its value, which may be the next word."""
        name, equals, text = word.partition("=")
        if name not in self.flags and word[:2] in self.flags and len(word) > 2:
            name, equals, text = word[:2], "=", word[2:]  # -mNAME
        if name not in self.flags:
            raise UsageError(f"there is no option {name}{did_you_mean(name, self.flags)}")
        option, on = self.flags[name]
        if option.kinds == (bool,):
            if equals:
                raise UsageError(f"{name} takes no value")
            return option, name, on
        if not equals:
            if not rest or rest[0].partition("=")[0] in (*self.flags, "--"):
                raise UsageError(f"{name} needs a value: {option.remedy()}")
            text = rest.pop(0)
        return option, name, _read(option, name, text)

    def _keywords(self, values: dict[str, object]) -> dict[str, object]:
        own = [*self.arguments, *(option for name, option in self.options.items() if name not in self._grouped)]
        missing = [option for option in own if option.default is ... and option.name not in values]
        if missing:
            label = missing[0].name.upper() if missing[0] in self.arguments else next(missing[0].flag_pairs())[0]
            raise UsageError(f"{label} is missing: {missing[0].help}")
        keywords = {option.name: values[option.name] for option in own if option.name in values}
        if self._names_parameter:
            keywords[self._names_parameter] = frozenset(values)
        for parameter, kind, default in self._groups:
            options = declared(kind)
            changes = {name: value for name, value in values.items() if name in options}
            keywords[parameter] = kind(**changes) if default is ... else replace(default, **changes)  # type: ignore
        return keywords

    def help(self, width: int = 80) -> str:
        """The text of --help: options by topic, those of the command itself first."""
        topics: dict[str, list[Option]] = {"": []}
        for option in self.options.values():
            topics.setdefault(option.topic, []).append(option)
        names = [f"[{o.name.upper()}]" if o.default is not ... else o.name.upper() for o in self.arguments]
        lines = [f"Usage: roofline {' '.join((self.name, '[OPTIONS]' * bool(self.options), *names))}", ""]
        lines += [*(inspect.getdoc(self._command) or "").splitlines(), ""]
        if self.arguments:
            rows = [(option.name.upper(), _explain(option)) for option in self.arguments]
            lines += ["Arguments:", *columns(rows, width), ""]
        for title, options in topics.items():
            if options:
                rows = [(_names(option), _explain(option)) for option in options]
                lines += [f"{title or 'Options'}:", *columns(rows, width), ""]
        return "\n".join(lines)


def summary(command: Command) -> str:
    """The first line of what a command says of itself, and those that its sentence goes on in."""
    lines: list[str] = []
    for line in (inspect.getdoc(command) or "").partition("\n\n")[0].splitlines():
        lines.append(line)
        if line.endswith("."):
            break
    return " ".join(lines)


def _in(message: str, name: str, flag: str) -> bool:
    """Whether a message names an option, as its flag or as Python does."""
    words = "|".join(re.escape(word) for word in (name, f"--{name.replace('_', '-')}", flag) if word)
    return re.search(rf"(?<![\w-])({words})(?![\w-])", message) is not None


def _read(option: Option, name: str, text: str) -> object:
    try:
        return replace(option, name=name).parse(text)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _explain(option: Option) -> str:
    notes = [option.help]
    if option.backends:
        notes.append(f"Backend {' or '.join(option.backends)}.")
    if option.repeated:
        notes.append("May be repeated.")
    if option.default not in (..., None, True, False, ""):
        notes.append(f"[default: {option.default}]")
    return " ".join(notes)


def _names(option: Option) -> str:
    names = {int: "N", float: "X", Path: "PATH", str: "TEXT", bool: ""}
    kinds = [] if option.kinds == (str,) and option.allowed() else [names[kind] for kind in option.kinds]
    value = " ".join(("", "|".join((*kinds, *option.allowed())))).rstrip()
    return ", ".join(f"{on}{'/' * bool(off)}{off}" for on, off in option.flag_pairs()) + value


def columns(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """Lines of two columns, the second one wrapped."""
    from textwrap import wrap

    rows = list(rows)
    indent = min(30, max(len(name) for name, _ in rows)) + 4
    for name, text in rows:
        lines = wrap(text, max(30, width - indent)) or [""]
        if len(name) + 4 > indent:
            yield f"  {name}"
        else:
            yield f"  {name:<{indent - 2}}{lines.pop(0)}".rstrip()
        yield from (" " * indent + line for line in lines)
