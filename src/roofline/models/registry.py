"""Family names -> the module (or any object) with check, spec, embed, block, head. Imported when asked for."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Protocol, cast

from roofline.common.errors import ConfigError
from roofline.models.config import ModelConfig
from roofline.models.spec import Param


class Family(Protocol):
    """One architecture: a check, a table of parameters, and three plain functions in the op vocabulary."""

    def check(self, cfg: ModelConfig) -> None: ...

    def spec(self, cfg: ModelConfig) -> tuple[Param, ...]: ...

    def embed(self, cfg: ModelConfig, w: Any, batch: Any) -> Any: ...

    def block(self, cfg: ModelConfig, w: Any, x: Any, layer: int, batch: Any) -> Any: ...

    def head(self, cfg: ModelConfig, w: Any, x: Any, batch: Any) -> Any: ...


_FAMILIES: dict[str, Any] = {
    "llama": "roofline.models.llama",
    "mistral": "roofline.models.llama",
    "qwen": "roofline.models.qwen",
    "qwen2": "roofline.models.qwen",
    "qwen3": "roofline.models.qwen",
}


def register(name: str, family: "str | Family") -> None:
    """Add a family: an object, or the dotted name of a module to import when it is asked for.

    Raises ConfigError when the name is taken.
    """
    if name in _FAMILIES:
        raise ConfigError(f"a model family named {name!r} is already registered")
    _FAMILIES[name] = family


def get(name: str) -> Family:
    """The family of that name. Raises ConfigError with the nearest known name."""
    if name not in _FAMILIES:
        near = get_close_matches(name, _FAMILIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no model family {name!r}{hint} (known: {', '.join(sorted(_FAMILIES))})")
    found = _FAMILIES[name]
    return cast(Family, import_module(found) if isinstance(found, str) else found)


def configure(mapping: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Family and checked configuration of a mapping with ModelConfig's fields. Raises ConfigError, UnsupportedError."""
    cfg = ModelConfig.of(mapping)
    family = get(cfg.family)
    family.check(cfg)
    return family, cfg
