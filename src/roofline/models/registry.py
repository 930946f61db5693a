"""Family names -> the module (or any object) with check, spec, embed, block, head. Imported when asked for."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import cast

from roofline.common import extensions
from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.models.config import ModelConfig
from roofline.models.family import Family

_FAMILIES: dict[str, str | Family] = {
    "arcee": "roofline.models.arcee",
    "bert": "roofline.models.bert",
    "deepseek": "roofline.models.deepseek",
    "gemma": "roofline.models.gemma",
    "vaultgemma": "roofline.models.vaultgemma",
    "gemma1": "roofline.models.gemma1",
    "gemma3n": "roofline.models.gemma3n",
    "gemma4": "roofline.models.gemma4",
    "glm": "roofline.models.glm",
    "glm4": "roofline.models.glm4",
    "gpt_oss": "roofline.models.gpt_oss",
    "granite": "roofline.models.granite",
    "hyperclovax": "roofline.models.hyperclovax",
    "gpt2": "roofline.models.gpt2",
    "gpt_neox": "roofline.models.gpt_neox",
    "olmo2": "roofline.models.olmo2",
    "opt": "roofline.models.opt",
    "minicpm3": "roofline.models.minicpm3",
    "youtu": "roofline.models.latent",
    "phi3": "roofline.models.phi3",
    "routed": "roofline.models.routed",
    **dict.fromkeys(
        ("dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hy_v3", "minimax_m2"), "roofline.models.routed"
    ),
    "olmoe": "roofline.models.routed",
    "bailing_moe": "roofline.models.routed",
    "flex_olmo": "roofline.models.flex_olmo",
    "hunyuan_moe": "roofline.models.hunyuan_moe",
    "smollm3": "roofline.models.smollm3",
    "llama": "roofline.models.llama",
    "mistral": "roofline.models.llama",
    "seed_oss": "roofline.models.llama",
    "ernie4_5": "roofline.models.llama",
    "helium": "roofline.models.llama",
    "exaone4": "roofline.models.exaone4",
    "exaone": "roofline.models.llama",
    "hunyuan": "roofline.models.hunyuan",
    "mixtral": "roofline.models.moe",
    "mimo2": "roofline.models.mimo2",
    "ministral3": "roofline.models.ministral3",
    "mpt": "roofline.models.mpt",
    "qwen": "roofline.models.qwen",
    "qwen2": "roofline.models.qwen",
    "qwen3": "roofline.models.qwen",
    "qwen_moe": "roofline.models.moe",
    "qwen3_next": "roofline.models.qwen3_next",
    "qwen3_5": "roofline.models.qwen3_next",
    "lfm2": "roofline.models.lfm2",
    "granite_hybrid": "roofline.models.granite_hybrid",
    "bamba": "roofline.models.bamba",
    "jamba": "roofline.models.jamba",
    "nemotron_h": "roofline.models.nemotron_h",
    "falcon_h1": "roofline.models.falcon_h1",
    "granite_moe": "roofline.models.granite_moe",
    "mamba": "roofline.models.mamba",
    "mamba2": "roofline.models.mamba2",
}


# What files call a family from outside: ("gguf", architecture) or ("hf", model_type) -> (family, the one of ours that
# its fields are read like).
_FILE_KINDS: dict[tuple[str, str], tuple[str, str]] = {}
_LIKE: dict[str, str] = {}  # family from outside -> the one of ours that its files are read like


def register(name: str, family: "str | Family", *, gguf: str = "", hf: str = "", like: str = "llama") -> None:
    """Add a family: an object, or the dotted name of a module to import when it is asked for.

    Args:
        gguf: the `general.architecture` of its GGUF files, if there are any; hf: the `model_type` of its config.json.
        like: the architecture and model_type of ours whose fields and conventions (rope, biases) its files follow.

    Raises ConfigError when the name, or what its files are called, is taken.
    """
    kinds = [(file, kind) for file, kind in (("gguf", gguf), ("hf", hf)) if kind]
    clash = next((kind for kind in kinds if kind in _FILE_KINDS), None)
    if name in _FAMILIES or clash:
        files = f"a family for {' '.join(clash)}" if clash else ""
        what = f"a model family named {name!r}" if name in _FAMILIES else files
        raise ConfigError(f"{what} is already registered")
    _FAMILIES[name] = family
    _LIKE[name] = like
    _FILE_KINDS.update(dict.fromkeys(kinds, (name, like)))


def known_like(like: str, model_types: Iterable[str]) -> str:
    """`like` itself, when it is one of ours. Raises ConfigError."""
    if like not in model_types:
        raise ConfigError(f"a registered family says like={like!r}: {unknown('model_type of ours', like, model_types)}")
    return like


def like_of(name: str) -> str | None:
    """The architecture or model_type of ours that the files of a registered family are read like."""
    return _LIKE.get(name)


def file_kind(file: str, kind: str) -> tuple[str, str] | None:
    """(family, the one of ours its fields are read like) of a kind of "gguf" or "hf" file that was registered."""
    return _FILE_KINDS.get((file, kind))


def get(name: str) -> Family:
    """The family of that name. Raises ConfigError with the nearest known name."""
    if name not in _FAMILIES:
        extensions.load()
    if name not in _FAMILIES:
        raise ConfigError(unknown("model family", name, _FAMILIES))
    family = _FAMILIES[name]
    return cast(Family, import_module(family)) if isinstance(family, str) else family


def configure(mapping: Mapping[str, object]) -> tuple[Family, ModelConfig]:
    """Family and checked configuration of a mapping with the fields of the family's `Config`, or of ModelConfig where
    it has none. Raises ConfigError, UnsupportedError."""
    name = mapping.get("family")
    if not isinstance(name, str):
        raise ConfigError(f"model config: family={name!r} is not the name of a model family")
    family = get(name)
    kind: type[ModelConfig] = getattr(family, "Config", ModelConfig)
    cfg = kind.of(mapping)
    family.check(cfg)
    return family, cfg


def config_of(mapping: Mapping[str, object]) -> ModelConfig:
    """The configuration alone, as `configure` gives it."""
    return configure(mapping)[1]
