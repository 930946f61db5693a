"""Files of Youtu: DeepSeek's attention in Llama's layers."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, latent_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | MLP | latent_fields.ATTENTION)
_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_DEFAULTS |= {"v_head_dim": 128, "num_key_value_heads": 16}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields, ("auto_map",))
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    ours = hf_fields.sizes(fields, "youtu")
    ours |= latent_fields.hf_attention(fields, ours["heads"])
    ours |= latent_fields.hf_style(fields)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, True)
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields)
    return checked(fields, ours, hf_fields.SPELLED | {"head_dim": "qk_nope_head_dim"})


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    written = {key: value for key, value in config.items() if key != "rotary_dim"}
    fields = hf_fields.to_hf(written, "youtu", "Youtu") | latent_fields.attention_to_hf(config)
    return fields | {"rope_interleave": config["rope_style"] != "half"}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; DeepSeek's files are told from these by their experts (`deepseek.from_gguf`)."""
    config = gguf_fields.read(model, "youtu", "interleaved", latent_fields.GGUF_KEYS + latent_fields.GGUF_DENSE)
    return config | latent_fields.gguf_attention(model, config)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """DeepSeek's architecture, all of whose layers are dense."""
    keys = latent_fields.attention_to_gguf(config)
    sizes = {"leading_dense_block_count": config["layers"], "expert_feed_forward_length": config["ffn"]}
    return gguf_fields.GgufForm("deepseek2", "interleaved", keys | sizes | {"expert_shared_count": 0})
