"""Reads the configuration of a run: a YAML file, changes from the command line, and `${name}` references."""

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.mistaken_files import unreadable
from roofline.common.yaml_text import read_yaml
from roofline.train.config.conflicts import conflicts
from roofline.train.config.faults import Fault, error_of, faults_of, names_key, new_faults, without
from roofline.train.config.refused import REASONS
from roofline.train.config.schema import TrainConfig

Check = Callable[[TrainConfig], Iterable[Fault]]
# In place of keys that every configuration has, while the others are checked.
_STAND_INS: JsonObject = {
    "max_seq_len": 2,
    "model": {"name": "mpt_causal_lm"},
    "train_loader": {"name": "synthetic"},
    "optimizer": {"name": "adamw", "lr": 1},
    "max_duration": "1ba",
    "global_train_batch_size": 1,
}


def read_config(path: Path | str, changes: Sequence[str] = (), further: Check | None = None) -> TrainConfig:
    """The configuration in a YAML file, with changes such as "optimizer.lr=1e-3".

    further: what else must hold, such as `run.preflight.faults`. Raises ConfigError that names every fault with its
    key, and the change that it comes from.
    """
    import yaml

    path = Path(path)
    try:
        text = path.read_text("utf-8")
        read, anchors = read_yaml(text), _anchored(text)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise unreadable(path, f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read.value, dict):
        kind = "empty" if read.value is None else "a list" if isinstance(read.value, list) else "one value"
        advice = "name the YAML file of a run; docs/reference/training.md lists its keys"
        raise unreadable(path, f"{path} is {kind}, and a configuration has keys on top: {advice}")
    repeated = [Fault(key.path, str(key)) for key in read.repeated]
    return parse_config(read.value, str(path), changes, further, anchors, repeated)


def parse_config(
    mapping: JsonMapping,
    where: str = "configuration",
    changes: Sequence[str] = (),
    further: Check | None = None,
    anchors: Collection[str] = (),
    earlier: Sequence[Fault] = (),
) -> TrainConfig:
    """The configuration in a parsed file, after changes.

    `${name}` is replaced by that key's value; top-level keys that only such references use are variables and are taken
    out. where: the file's name, for messages; "" where there is none. further: as for `read_config`. anchors: top-level
    keys that YAML's own references use, which are variables, too. earlier: faults that reading the file has come upon.

    Raises ConfigError.
    """
    changed = copy.deepcopy(dict(mapping))
    for change in changes:
        _change(changed, change)
    # LLM Foundry's files leave it blank, and may refer to it.
    name = env.foreign("RUN_NAME") or os.path.splitext(os.path.basename(where))[0]
    if changed.get("run_name") is None:
        changed["run_name"] = name
    filled, variables, unfilled = _interpolate(changed)
    faults = [*earlier, *unfilled]
    variables |= set(anchors).difference(REASONS)
    values = {key: value for key, value in filled.items() if key in TrainConfig.model_fields or key not in variables}
    values.pop("variables", None)
    if values.get("run_name") is None:
        values["run_name"] = name
    config, absent = _checked(values, faults)
    for check in (conflicts, further):
        if check is not None and config is not None:
            faults += new_faults(check(config), [*faults, *absent])
    if faults or config is None:
        raise error_of(faults, lambda fault: _origin(fault, changed, [] if fault in earlier else changes) or where)
    return config


def _anchored(text: str) -> set[str]:
    """The top-level keys of a YAML file whose value has an anchor that another place of it names."""
    import yaml

    root = yaml.compose(text, yaml.SafeLoader)
    tokens = list(yaml.scan(text, yaml.SafeLoader))
    aliases = {token.value for token in tokens if isinstance(token, yaml.AliasToken)}
    anchors = [token for token in tokens if isinstance(token, yaml.AnchorToken) and token.value in aliases]
    if not isinstance(root, yaml.MappingNode):
        return set()
    return {
        str(key.value)
        for key, value in root.value
        if any(key.end_mark.index < anchor.start_mark.index < value.end_mark.index for anchor in anchors)
    }


def _checked(values: JsonMapping, faults: list[Fault]) -> tuple[TrainConfig | None, list[Fault]]:
    """The configuration of those values that are right by themselves; the faults of the others are added to `faults`.

    Also the sections that stand-ins are in place of. None if right and wrong values cannot be told apart, as with a key
    that is no text.
    """
    absent: list[Fault] = []
    while True:
        try:
            return TrainConfig.model_validate(values), absent
        except ValidationError as error:
            more = faults_of(error, values, TrainConfig)
            faults += new_faults(more, faults)
            right = without(values, more, _STAND_INS)
        if right == values:
            return None, absent
        absent += [Fault(key, "") for key, value in _STAND_INS.items() if right[key] is value]
        values = right


def _origin(fault: Fault, mapping: JsonMapping, changes: Sequence[str]) -> str | None:
    """The last change that a fault comes from: of its key, of what that refers to, or of a key that it names."""
    for change in reversed(changes):
        key = change.partition("=")[0]
        unknown = re.match(rf"unknown key {re.escape(fault.key)}(?![\w.])", fault.text) is not None
        inner = key.startswith(f"{fault.key}.") and (unknown or names_key(fault.text, key.rpartition(".")[2]))
        if key == fault.key or fault.key.startswith(f"{key}.") or inner or key in _references(mapping, fault):
            return f"--set {change}"
    return None


def _references(mapping: JsonMapping, fault: Fault) -> set[str]:
    """The keys that ${...} names in the value at a fault, or in those values of its section that it names."""
    names: set[str] = set()
    pending = [fault.key]
    while pending:
        node: object = mapping
        for step in pending.pop().split("."):
            node = node.get(step) if isinstance(node, Mapping) else None
        for name, value in node.items() if isinstance(node, Mapping) else [("", node)]:
            if isinstance(value, str) and (not name or names_key(fault.text, name)):
                fresh = set(re.findall(r"\$\{([\w.]+)\}", value)) - names
                names |= fresh
                pending += fresh
    return names


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
        read = read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change}: the value is no YAML") from error
    if read.repeated:
        raise ConfigError(f"--set {change}: {read.repeated[0]}")
    node[last] = read.value


def _interpolate(mapping: JsonMapping) -> tuple[JsonObject, set[str], list[Fault]]:
    """The mapping with every ${a.b} replaced by that key's value, the top-level names that were referred to, and the
    references that lead nowhere, in whose place there is null."""
    used: set[str] = set()
    faults: list[Fault] = []

    def value_of(name: str, parents: tuple[str, ...], key: str) -> object:
        used.add(name.split(".")[0])
        node: object = mapping
        for step in name.split("."):
            if not isinstance(node, Mapping) or step not in node:
                faults.append(Fault(key, f"{key}: ${{{name}}} names a key that is not there"))
                return None
            node = node[step]
        if name in parents:
            faults.append(Fault(key, f"{key}: ${{{name}}} leads to itself"))
            return None
        return fill(node, (*parents, name), key)

    def fill(node: object, parents: tuple[str, ...], key: str) -> object:
        if isinstance(node, Mapping):
            return {name: fill(value, parents, f"{key}.{name}") for name, value in node.items()}
        if isinstance(node, list):
            return [fill(value, parents, key) for value in node]
        if not isinstance(node, str):
            return node
        if reference := re.fullmatch(r"\$\{([\w.]+)\}", node):
            return value_of(reference[1], parents, key)
        if other := re.search(r"\$\{(?![\w.]+\})[^}]*\}?", node):
            text = f"{key}: {other[0]} is no key: only ${{name}} and ${{name.name}} are filled in"
            faults.append(Fault(key, text))
            return None
        return re.sub(r"\$\{([\w.]+)\}", lambda m: str(value_of(m[1], parents, key)), node)

    return {key: fill(value, (), str(key)) for key, value in mapping.items()}, used, faults
