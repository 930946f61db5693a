"""Named shapes to train, to measure and to plan with (presets.toml): MPT, Llama, Mistral, Qwen and others."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.models.registry import configure
from roofline.models.spec import expand

_BY_LAYER = {"layer_windows", "turning", "recurrent"}  # lists that rows begin, and that layers repeat
_ABSENT = {"rope_scaling": None, "sliding_window": None}  # TOML has no word for none


@dataclass(frozen=True)
class ModelPreset:
    """One named shape. config: canonical; parameters: published, tied ones once; source: where both are from;
    published: how the weights are quantised as published, as `quant_method` calls it, "" where they are in BF16."""

    name: str
    config: Mapping[str, Any]
    parameters: int
    source: str
    published: str = ""


@cache
def presets() -> Mapping[str, ModelPreset]:
    """All of them by name. Of MPT, mpt-SIZE is the benchmark form, mpt-SIZE-alibi the released one."""
    tables = tomllib.loads(Path(__file__).with_name("presets.toml").read_text("utf-8"))
    defaults = _ABSENT | tables.pop("defaults")["shared"]
    found = {}
    for group in tables.values():
        for name, row in group["models"].items():
            config = defaults | group["shared"] | row
            for key in _BY_LAYER & config.keys():
                config[key] = [config[key][layer % len(config[key])] for layer in range(config["layers"])]
            found[name] = ModelPreset(
                name=name,
                config=config,
                parameters=config.pop("parameters"),
                source=group["source"],
                published=group.get("published", ""),
            )
    return found


def names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(presets())


def preset(name: str) -> dict[str, Any]:
    """The canonical configuration of a name, as `models.registry.configure` takes it. Raises ConfigError."""
    if name not in presets():
        raise ConfigError(unknown("model preset", name, names()))
    return dict(presets()[name].config)


def parameter_count(config: Mapping[str, object]) -> int:
    """Parameters of a configuration, tied ones once."""
    family, cfg = configure(config)
    return sum(prod(param.shape) for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None)
