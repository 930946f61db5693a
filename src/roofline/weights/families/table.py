"""Which module here reads the files of which model."""

from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from roofline.common.fields import Fields
from roofline.models.registry import like_of
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.gguf_fields import GgufForm, GgufModel
from roofline.weights.families.shared.tensor_names import TensorNames

# model_type of a config.json -> module.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_vl_text": "qwen",
    "mpt": "mpt",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen_moe",
    "qwen3_moe": "qwen_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "granitemoe": "granite_moe",
    "granitemoeshared": "granite_moe",
    "granitemoehybrid": "granite_hybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon_h1",
    "jamba": "jamba",
    "bamba": "bamba",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "qwen3_vl_moe_text": "qwen_moe",
    "gemma": "gemma1",
    "gemma2": "gemma",
    "vaultgemma": "vaultgemma",
    "gemma3_text": "gemma",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "gpt_oss": "gpt_oss",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "sarvam_mla": "deepseek",
    "glm4_moe_lite": "deepseek",
    "mistral4": "deepseek",
    "youtu": "youtu",
    "minicpm3": "minicpm3",
    "granite": "granite",
    "hyperclovax": "hyperclovax",
    "glm4": "glm4",
    "glm": "glm",
    "olmo2": "olmo2",
    "ministral3": "ministral3",
    "arcee": "arcee",
    "olmo3": "olmo2",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "helium": "helium",
    **dict.fromkeys(("internlm3", "iquestcoder", "cwm", "ministral"), "llama_alike"),
    "exaone": "exaone",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan",
    "glm4_moe": "glm4_moe",
    "solar_open": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
    "dots1": "dots1",
    "olmoe": "olmoe",
    "minimax_m2": "minimax_m2",
    "ernie4_5_moe": "ernie4_5_moe",
    "exaone_moe": "exaone_moe",
    "hy_v3": "hy_v3",
    "hunyuan_v1_moe": "hunyuan_moe",
    "flex_olmo": "flex_olmo",
    "sarvam_moe": "bailing_moe",
    "mimo_v2_flash": "mimo2",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "gpt_neox": "gpt_neox",
    "gpt2": "gpt2",
    "gpt-sw3": "gpt2",
    "opt": "opt",
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
}
# general.architecture of a GGUF file -> module.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3vl": "qwen",
    "qwen2moe": "qwen_moe",
    "qwen3moe": "qwen_moe",
    "qwen3vlmoe": "qwen_moe",
    "gemma": "gemma1",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "granitehybrid": "granite_hybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "falcon-h1": "falcon_h1",
    "jamba": "jamba",
    "granitemoe": "granite_moe",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek",
    "mistral4": "deepseek",
    "minicpm3": "minicpm3",
    "granite": "granite",
    "glm4": "glm4",
    "olmo2": "olmo2",
    "mistral3": "ministral3",
    "arcee": "arcee",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "exaone": "exaone",
    "hunyuan-dense": "hunyuan",
    "glm4moe": "glm4_moe",
    "chatglm": "glm",
    "dots1": "dots1",
    "olmoe": "olmoe",
    "minimax-m2": "minimax_m2",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "hunyuan-moe": "hunyuan_moe",
    "bailingmoe2": "bailing_moe",
    "hy_v3": "hy_v3",
    "mimo2": "mimo2",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "gptneox": "gpt_neox",
    "gpt2": "gpt2",
    "mpt": "mpt",
    "bert": "bert",
}


class FamilyFiles(Protocol):
    """How files of a family are read and written; each of these is a name in its module.

    NAMES: of its tensors. from_hf: the canonical configuration of a config.json with that model_type. to_hf: the fields
    that transformers needs of a canonical configuration, model_type among them. from_gguf: the canonical configuration
    of GGUF metadata with that architecture; only of families that ARCHITECTURES names.

    The readers raise ConfigError for missing and bad fields, UnsupportedError for what changes the mathematics and the
    family does not have.
    """

    NAMES: TensorNames

    def from_hf(self, fields: Fields, model_type: str) -> Config: ...

    def to_hf(self, config: Config) -> Config: ...

    def from_gguf(self, model: GgufModel, architecture: str) -> Config: ...


@runtime_checkable
class WritesGguf(Protocol):
    """The same of families whose GGUF files we write. to_gguf: how a file says a configuration; raises
    UnsupportedError where none can."""

    def to_gguf(self, config: Config) -> GgufForm: ...


def module(name: str) -> FamilyFiles:
    """One of the modules that the tables name."""
    return cast(FamilyFiles, import_module(f"roofline.weights.families.{name}"))


def files_of(family: str) -> FamilyFiles:
    """How files of a family are read; one from outside is read like the one of ours that it names."""
    like, modules = like_of(family), MODEL_TYPES.values()
    if like is not None:  # what files call a family of ours, which ours may call another one
        return module(MODEL_TYPES.get(like) or ARCHITECTURES.get(like) or (like if like in modules else "llama"))
    return module(family if family in modules else ARCHITECTURES.get(family) or MODEL_TYPES.get(family, "llama"))


def families_with_guessing() -> tuple[str, ...]:
    """Return the families, sorted, of which a layer that guesses further tokens is read."""
    return tuple(sorted(name for name in set(MODEL_TYPES.values()) if files_of(name).NAMES.has_guessing))
