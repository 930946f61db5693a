"""Files of Mixtral. GGUF files call its architecture llama, and say how many experts there are."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.experts import EXPERTS, HONOURED_GGUF, experts_to_gguf, gguf_experts, hf_experts
from roofline.weights.families.shared.tensor_names import ATTENTION, NORMS, TensorNames

NAMES = TensorNames(
    NORMS
    | ATTENTION
    | EXPERTS
    | {
        "mlp.router": ("ffn_gate_inp", "block_sparse_moe.gate"),
        "mlp.experts.{expert}.gate": ("", "block_sparse_moe.experts.{expert}.w1"),
        "mlp.experts.{expert}.up": ("", "block_sparse_moe.experts.{expert}.w3"),
        "mlp.experts.{expert}.down": ("", "block_sparse_moe.experts.{expert}.w2"),
    }
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
