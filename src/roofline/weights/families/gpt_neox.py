"""Files of GPT-NeoX and Pythia, whose rows of q, k and v Hugging Face has head by head."""

from roofline.common.fields import Fields
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    layer={
        "attn_norm": ("attn_norm", "input_layernorm"),
        "attn.qkv": ("attn_qkv", "attention.query_key_value"),
        "attn.o": ("attn_output", "attention.dense"),
        "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
        "mlp.up": ("ffn_up", "mlp.dense_h_to_4h"),
        "mlp.down": ("ffn_down", "mlp.dense_4h_to_h"),
    },
    top={
        "embed": ("token_embd", "gpt_neox.embed_in"),
        "final_norm": ("output_norm", "gpt_neox.final_layer_norm"),
        "head": ("output", "embed_out"),
    },
    hf_layers="gpt_neox.layers",
    hf_prefix="gpt_neox.",
    hf_also={"lm_head": "embed_out"},
    by_head=("attn.qkv",),
)
_SPELLED = hf_fields.SPELLED | {"norm_eps": "layer_norm_eps"}
# The type's own names -> what transformers calls the same for all its models, and the type's defaults.
_ROPE = {"rotary_emb_base": ("rope_theta", 1e4), "rotary_pct": ("partial_rotary_factor", 0.25)}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields, ("hidden_act", "attention_bias", "partial_rotary_factor"))
    refuse_unless_neutral(fields, {"quantization_config": ()})
    ours = hf_fields.sizes(fields, "gpt_neox")
    ours |= {"kv_heads": ours["heads"], "head_dim": hf_fields.divided(fields, ours, "num_attention_heads")}
    ours["norm_eps"] = fields.get("layer_norm_eps", float, 1e-5)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"bias": True, "attention_bias": fields.get("attention_bias", bool, True)}
    ours |= {"qk_norm": False, "sliding_window": None}
    ours |= hf_fields.activation(fields, "hidden_act", "gelu")
    ours |= {} if fields.get("use_parallel_residual", bool, True) else {"parallel": False}
    turned = _with_common_names(fields)
    ours |= hf_fields.turned_part(turned, ours["head_dim"], 0.25)
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(turned, partial=True)
    return checked(fields, ours, _SPELLED)


def _with_common_names(fields: Fields) -> Fields:
    """The fields of rope under the names that all types share, which transformers does not read of this one. Raises
    ConfigError where such a name says something else."""
    changes: dict[str, object] = {}
    for neox_name, (common, default) in _ROPE.items():
        value = fields.positive(neox_name) or default
        if (fields.positive(common) or value) != value:
            fields.refuse(
                common, f"{fields.values[common]!r} is not the {value!r} that {neox_name}, or its default, says"
            )
        changes[common] = value
    return fields.changed(changes)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "gpt_neox", "GPTNeoX")
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "partial_rotary_factor"):
        fields.pop(key, None)
    part = (config.get("rotary_dim") or config["head_dim"]) / config["head_dim"]
    fields["rope_parameters"] |= {"partial_rotary_factor": part}
    return fields | {
        "layer_norm_eps": config["norm_eps"],
        "hidden_act": hf_fields.activation_to_hf(config),
        "attention_bias": config["attention_bias"],
        "use_parallel_residual": config.get("parallel", True),
        "rotary_pct": part,
        "rotary_emb_base": config["rope_theta"],
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters put the rows of q, k and v one below the other."""
    honoured = ("rope.dimension_count", "use_parallel_residual")
    gguf_fields.refuse_window(model.fields)
    config = gguf_fields.read(model, "gpt_neox", "half", honoured, gguf_fields.EPSILON)
    config |= {"bias": True, "attention_bias": biased(model, "attn.qkv")}
    return config | ({} if model.fields.get("use_parallel_residual", bool, True) else {"parallel": False})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return the keys of a GGUF file; which activation there is is none of them, but follows from the architecture."""
    keys = gguf_fields.turned_part(config) | {"use_parallel_residual": config.get("parallel", True)}
    return gguf_fields.GgufForm("gptneox", "half", keys, gguf_fields.EPSILON)
