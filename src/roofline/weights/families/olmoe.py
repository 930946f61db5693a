"""Files of OLMoE."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import hf_experts
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.routed_fields import LAYER, GgufRouter
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(LAYER, hf_apart=stacked_experts_apart)
_DEFAULTS = {
    **{"vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
}
# What these models do not have, at the values that say so.
UNREAD = {key: routed_fields.UNREAD[key] for key in ("n_group", "topk_group", "routed_scaling_factor")}
_ROUTER = GgufRouter(
    "softmax", reads_score=False, reads_norm=False, own_size=False, dense=False, shared="", groups=False
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; the norms of q and k are as wide as the model."""
    fields = routed_fields.with_names(fields, {"num_local_experts": "num_experts"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, UNREAD)
    ours = hf_fields.decoder(fields, "olmoe", ("attention_bias", "num_experts"), eps=1e-5)
    hf_fields.biases(fields, ours)
    if ours["head_dim"] * ours["heads"] != ours["width"]:
        fields.refuse("head_dim", f"of {ours['heads']} heads is not the width of {ours['width']}")
    ours |= hf_experts(fields, "num_experts") | {"qk_norm": True, "wide_qk_norm": True}
    ours["renormalise"] = fields.get("norm_topk_prob", bool, False)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "olmoe", "Olmoe") | {"attention_bias": config["attention_bias"]}
    fields |= {"num_experts": config["experts"], "num_experts_per_tok": config["experts_per_token"]}
    return fields | {"norm_topk_prob": config.get("renormalise", True)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; weights of experts do not add up to 1."""
    gguf_fields.refuse_window(model.fields)
    config = routed_fields.gguf_routed(model, "olmoe", _ROUTER, "half")
    return config | {"qk_norm": True, "wide_qk_norm": True}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    unsaid = {"biases of attention": config["attention_bias"], "grouped heads": config["kv_heads"] != config["heads"]}
    gguf_fields.refuse_unsaid(config, unsaid)
    return routed_fields.routed_to_gguf(config, "olmoe", _ROUTER, "half")
