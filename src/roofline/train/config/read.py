"""Reads the configuration of a run: a YAML file, changes from the command line, and `${name}` references."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.names import did_you_mean
from roofline.train.config.schema import TrainConfig


def read_config(path: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a YAML file, with changes such as "optimizer.lr=1e-3".

    Raises ConfigError that names the key and what is wrong with it.
    """
    import yaml

    try:
        mapping = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path} holds no keys")
    return parse_config(mapping, str(path), changes)


def parse_config(mapping: JsonMapping, where: str = "configuration", changes: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a parsed file, after changes.

    `${name}` is replaced by that key's value; top-level keys that only such references use are variables and are taken
    out. where: the file's name, for messages. Raises ConfigError.
    """
    changed = copy.deepcopy(dict(mapping))
    for change in changes:
        _change(changed, change)
    filled, variables = _interpolate(changed, where)
    values = {key: value for key, value in filled.items() if key in TrainConfig.model_fields or key not in variables}
    values.pop("variables", None)
    if values.get("run_name") is None:
        values["run_name"] = os.path.splitext(os.path.basename(where))[0]
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_fault(error, values, TrainConfig)}") from error


def _change(mapping: JsonObject, change: str) -> None:
    """Apply a change KEY.KEY=VALUE, in place."""
    import yaml

    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {change}: it is written KEY.KEY=VALUE")
    node = mapping
    *path, last = key.split(".")
    for step in path:
        if node.get(step) is None:
            node[step] = {}
        node = node[step]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {change}: {step} holds no keys")
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change}: the value is no YAML") from error


def _interpolate(mapping: JsonMapping, where: str) -> tuple[JsonObject, set[str]]:
    """The mapping with every ${a.b} replaced by that key's value, and the top-level names that were referred to."""
    used: set[str] = set()

    def value_of(name: str, parents: tuple[str, ...]) -> object:
        if name in parents:
            raise ConfigError(f"{where}: ${{{name}}} leads to itself")
        node: object = mapping
        for step in name.split("."):
            if not isinstance(node, Mapping) or step not in node:
                raise ConfigError(f"{where}: ${{{name}}} names a key that is not there")
            node = node[step]
        used.add(name.split(".")[0])
        return fill(node, (*parents, name))

    def fill(node: object, parents: tuple[str, ...] = ()) -> object:
        if isinstance(node, Mapping):
            return {key: fill(value, parents) for key, value in node.items()}
        if isinstance(node, list):
            return [fill(value, parents) for value in node]
        if not isinstance(node, str):
            return node
        if reference := re.fullmatch(r"\$\{([\w.]+)\}", node):
            return value_of(reference[1], parents)
        if other := re.search(r"\$\{(?![\w.]+\})[^}]*\}?", node):
            raise ConfigError(f"{where}: {other[0]} is no key: only ${{name}} and ${{name.name}} are filled in")
        return re.sub(r"\$\{([\w.]+)\}", lambda m: str(value_of(m[1], parents)), node)

    return {key: fill(value) for key, value in mapping.items()}, used


def _first_fault(error: ValidationError, values: JsonMapping, root: type[BaseModel]) -> str:
    """The first fault of `values` as a `root`: the key, what is wrong with it, and the nearest known key.

    A value of a union type has a fault for each of its types: their messages are joined.
    """
    fault, *rest = error.errors()
    path = _path(fault, values)
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key}{did_you_mean(path[-1], _section_keys(path[:-1], root))}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    same_key = [other for other in rest if _path(other, values) == path]
    texts = dict.fromkeys(f"{each['msg'][0].lower()}{each['msg'][1:]}" for each in (fault, *same_key))
    more = f" (and {len(rest) - len(same_key)} more)" if len(rest) > len(same_key) else ""
    value = "" if fault["input"] is None else f" = {str(fault['input'])[:80]}"
    return f"{key}{value}: {', or '.join(texts)}{more}"


def _path(fault: ErrorDetails, values: JsonMapping) -> list[str]:
    """The keys that lead to a fault, without the names of types that pydantic puts between them."""
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
    section, steps = root, iter(path)
    for step in steps:
        field = section.model_fields.get(step)
        options = [field.annotation, *get_args(field.annotation)] if field is not None else []
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if field is None or inner is None:
            return []
        section = inner
        if get_origin(field.annotation) is dict:
            next(steps, None)
    return list(section.model_fields)
