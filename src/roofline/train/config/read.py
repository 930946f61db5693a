"""Reads the configuration of a run: a YAML file, changes from the command line, and `${name}` references."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roofline.common.errors import ConfigError
from roofline.train.config.errors import said
from roofline.train.config.schema import TrainConfig


def read_config(path: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """A YAML file with changes such as "optimizer.lr=1e-3". Raises ConfigError naming key and cause."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no keys")
    return parse_config(found, str(path), changes)


def parse_config(mapping: Mapping[str, Any], where: str = "configuration", changes: Sequence[str] = ()) -> TrainConfig:
    """A parsed file, changed: ${names} replaced, top-level names that only they use taken out. Raises ConfigError."""
    changed = copy.deepcopy(dict(mapping))
    for change in changes:
        _change(changed, change)
    filled, used = _interpolated(changed, where)
    plain = {key: value for key, value in filled.items() if key in TrainConfig.model_fields or key not in used}
    plain.pop("variables", None)
    if plain.get("run_name") is None:
        plain["run_name"] = os.path.splitext(os.path.basename(where))[0]
    try:
        return TrainConfig.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(f"{where}: {said(error, plain, TrainConfig)}") from error


def _change(mapping: dict[str, Any], change: str) -> None:
    import yaml

    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {change}: it is written KEY.KEY=VALUE")
    node = mapping
    *path, last = key.split(".")
    for step in path:
        inner = node.get(step)
        if inner is None:
            inner = node[step] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change}: {step} holds no keys")
        node = inner
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change}: the value is no YAML") from error


def _interpolated(mapping: Mapping[str, Any], where: str) -> tuple[dict[str, Any], set[str]]:
    """Every ${a.b} replaced by that key's value, and the top-level names used."""
    used: set[str] = set()

    def value_of(name: str, seen: tuple[str, ...]) -> Any:
        if name in seen:
            raise ConfigError(f"{where}: ${{{name}}} leads to itself")
        node: Any = mapping
        for step in name.split("."):
            if not isinstance(node, Mapping) or step not in node:
                raise ConfigError(f"{where}: ${{{name}}} names a key that is not there")
            node = node[step]
        used.add(name.split(".")[0])
        return fill(node, (*seen, name))

    def fill(node: Any, seen: tuple[str, ...] = ()) -> Any:
        if isinstance(node, Mapping):
            return {key: fill(value, seen) for key, value in node.items()}
        if isinstance(node, list):
            return [fill(value, seen) for value in node]
        if not isinstance(node, str):
            return node
        whole = re.fullmatch(r"\$\{([\w.]+)\}", node)
        if whole:
            return value_of(whole[1], seen)
        if other := re.search(r"\$\{(?![\w.]+\})[^}]*\}?", node):
            raise ConfigError(f"{where}: {other[0]} is no key: only ${{name}} and ${{name.name}} are filled in")
        return re.sub(r"\$\{([\w.]+)\}", lambda m: str(value_of(m[1], seen)), node)

    return fill(mapping), used
