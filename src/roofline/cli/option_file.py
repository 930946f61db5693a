"""A YAML file of options: each entry is an option as the command line has it, without the dashes before its name.

    model: smollm2-135m
    max-running: 16
    adapter: [sql=adapters/sql, poems=adapters/poems]
    page: false

Values are taken as they are written, not as YAML understands them: `speculate: off` is the word off, `port: 0o17` no
port. What true and false mean (and yes, no, on, off, unquoted) is kept beside the text, for switches.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.fields import shorten
from roofline.common.files import cause_of
from roofline.common.mistaken_files import unreadable

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

MAX_BYTES = 1 << 18
_STANDARD = "tag:yaml.org,2002:"
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|'.*$|\".*$")  # in YAML's messages: text of the file, which may be a secret


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """An option as a file has it.

    name: with dashes inside, none before. line: from 1. texts: the value, or the values of a list, as they are written;
    an object as JSON; of a value that is empty none. is_list: whether it was written as a list. switch: what it means
    to an option that is switched on and off, None for what is neither true nor false.
    """

    name: str
    line: int
    texts: tuple[str, ...]
    is_list: bool = False
    switch: bool | None = None


def read_option_file(path: Path) -> list[FileEntry]:
    """Return the entries of a file of options, in their order. Raises ConfigError with the line of what is wrong, and
    without its text."""
    import yaml

    from roofline.common.yaml_text import read_yaml

    text = _text_of(path)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError(
                f"{path}: refers to a part of itself (*name), which files of options do not: write it out"
            )
        root, read = yaml.compose(text, yaml.SafeLoader), read_yaml(text)
    except yaml.YAMLError as error:
        raise unreadable(path, f"{path}: is no YAML{_place(error)}") from None
    except (ValueError, RecursionError):  # a date that is none, a number of thousands of digits; nesting
        raise ConfigError(f"{path}: has a value that cannot be read") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise unreadable(path, f"{path}: has no options on top: write each as `name: value`")
    if read.repeated:
        raise ConfigError(f"{path}: {shorten(str(read.repeated[0]))}")
    entries = [_entry(path, key, value) for key, value in root.value]
    names: dict[str, int] = {}
    for entry in entries:  # max_running and max-running
        if entry.name in names:
            lines = f"lines {names[entry.name]} and {entry.line}"
            raise ConfigError(f"{path}: {shorten(entry.name)} is there twice, on {lines}: keep one of the two")
        names[entry.name] = entry.line
    return entries


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {cause_of(error)}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes, so it is no file of options")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise unreadable(path, f"{path}: is not UTF-8") from None


def _place(error: Exception) -> str:
    """Where YAML's reader stopped, and why, without text of the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    reason = _QUOTED.sub("...", str(problem).splitlines()[0]) if problem else ""
    return where + (f": {reason}" if reason else "")


def _entry(path: Path, key: "Node", value: "Node") -> FileEntry:
    import yaml

    line = key.start_mark.line + 1
    assert isinstance(key, yaml.ScalarNode), "no other key can be read"
    name = key.value.replace("_", "-")
    if isinstance(value, yaml.SequenceNode):
        texts = [text for element in value.value for text in _texts(path, name, element)]
        return FileEntry(name=name, line=line, texts=tuple(texts), is_list=True)
    if isinstance(value, yaml.ScalarNode) and value.tag == f"{_STANDARD}bool":
        switch = yaml.SafeLoader.bool_values[value.value.lower()]
        return FileEntry(name=name, line=line, texts=(value.value,), switch=switch)
    return FileEntry(name=name, line=line, texts=tuple(_texts(path, name, value)))


def _texts(path: Path, name: str, node: "Node") -> Iterable[str]:
    """The text of a value, none where it is empty."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return () if node.tag == f"{_STANDARD}null" else (str(node.value),)
    if isinstance(node, yaml.MappingNode):
        return (_as_json(path, name, node),)
    raise ConfigError(
        f"{path}, line {node.start_mark.line + 1}: {shorten(name)}: a list in a list is no option's value"
    )


def _as_json(path: Path, name: str, node: "MappingNode") -> str:
    """An object as the command line writes one."""
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return json.dumps(loader.construct_document(node), separators=(",", ":"))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        line = node.start_mark.line + 1
        raise ConfigError(f"{path}, line {line}: {shorten(name)}: is an object that JSON cannot write") from None
    finally:
        loader.dispose()
