"""Files of Mixtral. GGUF files call its architecture llama, and say how many experts there are."""

import re
from pathlib import Path

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.experts import EXPERTS, HONOURED_GGUF, experts_to_gguf, gguf_experts, hf_experts
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.tensor_names import ATTENTION, NORMS, TensorNames
from roofline.weights.quantised.method import TensorSource

# What transformers has in memory, and writes with save_original_format=False -> what it writes otherwise.
_IN_MEMORY = re.compile(r"(?P<layer>.+)\.mlp\.(?P<part>gate|experts\.\d+\.(?:gate|up|down)_proj)\.weight")
_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def experts_as_published(path: Path, source: TensorSource) -> TensorSource:
    """The tensors of a model's files, with those of experts one by one and under their published names."""
    return renamed(stacked_experts_apart(path, source), _as_published)


def _as_published(name: str) -> str:
    match = _IN_MEMORY.fullmatch(name)
    if match is None:
        return name
    before, _, part = match["part"].rpartition(".")
    return ".".join(filter(None, (match["layer"], "block_sparse_moe", before, _PARTS.get(part, part), "weight")))


NAMES = TensorNames(
    NORMS
    | ATTENTION
    | EXPERTS
    | {
        "mlp.router": ("ffn_gate_inp", "block_sparse_moe.gate"),
        "mlp.experts.{expert}.gate": ("", "block_sparse_moe.experts.{expert}.w1"),
        "mlp.experts.{expert}.up": ("", "block_sparse_moe.experts.{expert}.w3"),
        "mlp.experts.{expert}.down": ("", "block_sparse_moe.experts.{expert}.w2"),
    },
    hf_apart=experts_as_published,
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields, ("num_local_experts",))
    ours = hf_fields.sizes(fields, "mixtral")
    ours["kv_heads"] = hf_fields.kv_heads(fields)
    ours["head_dim"] = hf_fields.head_dim(fields)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-5)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": fields.get("sliding_window", int)}
    ours |= hf_experts(fields, "num_local_experts")
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields, 1e6)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    experts = {"num_local_experts": config["experts"], "num_experts_per_tok": config["experts_per_token"]}
    window = {"sliding_window": config["sliding_window"]}
    return hf_fields.to_hf(config, "mixtral", "Mixtral") | experts | window


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters permute the rows of q and k."""
    config = gguf_fields.read(model, "mixtral", "interleaved", HONOURED_GGUF)
    return config | gguf_experts(model.fields)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """The architecture is llama's, with experts."""
    return gguf_fields.GgufForm("llama", "interleaved", experts_to_gguf(config))
