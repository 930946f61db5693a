"""The faults of a configuration: all of them, each with its key, in one error."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.names import did_you_mean
from roofline.train.config.refused import REASONS


@dataclass(frozen=True)
class Fault:
    """A fault of the value at `key` ("optimizer.lr"), or of a section's keys together. text: names key and cause."""

    key: str
    text: str

    def follows_from(self, other: "Fault") -> bool:
        """Whether it may be there only because `other` is: it is of the same key, of one inside, or names it."""
        if self.key == other.key or self.key.startswith(f"{other.key}."):
            return True
        names = [other.key.rpartition(".")[2], *re.findall(r"did you mean '(\w+)'", other.text)]
        return other.key.startswith(f"{self.key}.") and any(names_key(self.text, name) for name in names)


def names_key(text: str, key: str) -> bool:
    """Whether a text has a key's name as a word of its own."""
    return re.search(rf"\b{re.escape(key)}\b", text) is not None


def error_of(faults: Sequence[Fault], origin: Callable[[Fault], str]) -> ConfigError:
    """The error that has all faults, a line each. origin: the file, or the change, that a fault comes from."""
    lines = [f"{place}: {fault.text}" if (place := origin(fault)) else fault.text for fault in faults]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n  ".join([f"{len(lines)} faults of the configuration:", *lines]))


def new_faults(faults: Iterable[Fault], earlier: Sequence[Fault]) -> list[Fault]:
    """Those of `faults` that do not follow from an earlier one."""
    return [fault for fault in faults if not any(fault.follows_from(other) for other in earlier)]


def faults_of(error: ValidationError, values: JsonMapping, root: type[BaseModel]) -> list[Fault]:
    """All faults of `values` as a `root`: the key of each, what is wrong with it, and the nearest known key."""
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for fault in error.errors():
        by_key.setdefault(tuple(_path(fault, values)), []).append(fault)
    return [Fault(".".join(path), _text(path, faults, root)) for path, faults in by_key.items()]


def without(values: JsonMapping, faults: Iterable[Fault], stand_ins: JsonMapping) -> JsonObject:
    """The values without those that have faults, so that the others can be checked further.

    A section that lacks a key goes with it; stand_ins: in place of top-level keys that every configuration has.
    """
    copied: JsonObject = copy.deepcopy(dict(values))
    for fault in faults:
        node: object = copied
        *path, last = fault.key.split(".")
        for depth, step in enumerate([*path, last]):
            inner = node.get(step) if isinstance(node, dict) else None
            if depth == len(path) or not isinstance(inner, dict) or (depth == len(path) - 1 and last not in inner):
                if isinstance(node, dict):
                    node.pop(step, None)
                break
            node = inner
    return {**{key: value for key, value in stand_ins.items() if key not in copied}, **copied}


def _text(path: Sequence[str], faults: Sequence[ErrorDetails], root: type[BaseModel]) -> str:
    """The faults of one key: a value of a union type has one for each of its types."""
    key, first = ".".join(path), faults[0]
    reason = REASONS.get(key) or REASONS.get(".".join(path[-2:]))
    if first["type"] == "extra_forbidden":
        if reason is not None:
            return f"{key} is no key here: {reason}"
        return f"unknown key {key}{did_you_mean(path[-1], _section_keys(path[:-1], root))}"
    if first["type"] == "missing":
        return f"{key} is missing"
    words = (fault["msg"].removeprefix("Value error, ") for fault in faults)
    texts = dict.fromkeys(f"{text[0].lower()}{text[1:]}" for text in words)
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):  # a section's keys against each other
        return f"{key}: {', or '.join(texts)}"
    value = "" if first["input"] is None else f" = {str(first['input'])[:80]}"
    return f"{key}{value}: {', or '.join(texts)}{f': {reason}' if reason else ''}"


def _path(fault: ErrorDetails, values: JsonMapping) -> list[str]:
    """The keys that lead to a fault, without the names of types that pydantic puts between them."""
    if not fault["loc"]:
        return []
    *steps, last = fault["loc"]
    missing = fault["type"] == "missing"
    path: list[str] = []
    node: object = values
    for step in steps if missing else (*steps, last):
        try:
            node = node[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(step))
    return [*path, str(last)] if missing else path


def _section_keys(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """The keys of the section at a path."""
    section, steps = root, iter(step for step in path if not step.isdigit())
    for step in steps:
        field = section.model_fields.get(step)
        inner = next(_sections(field.annotation), None) if field is not None else None
        if field is None or inner is None:
            return []
        section = inner
        if get_origin(field.annotation) is dict:
            next(steps, None)
    return list(section.model_fields)


def _sections(kind: object) -> Iterator[type[BaseModel]]:
    """The sections that a type names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _sections(inner)
