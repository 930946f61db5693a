"""Files of GPT-2, whose matrices Hugging Face has as [inputs, outputs]."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    layer={
        "attn_norm": ("attn_norm", "ln_1"),
        "attn.qkv": ("attn_qkv", "attn.c_attn"),
        "attn.o": ("attn_output", "attn.c_proj"),
        "mlp_norm": ("ffn_norm", "ln_2"),
        "mlp.up": ("ffn_up", "mlp.c_fc"),
        "mlp.down": ("ffn_down", "mlp.c_proj"),
    },
    top={
        "embed": ("token_embd", "transformer.wte"),
        "positions": ("position_embd", "transformer.wpe"),
        "final_norm": ("output_norm", "transformer.ln_f"),
        "head": ("output", "lm_head"),
    },
    hf_layers="transformer.h",
    hf_prefix="transformer.",
    transposed=("attn.qkv", "attn.o", "mlp.up", "mlp.down"),
)
REQUIRED = {"n_embd": "width", "n_layer": "layers", "n_head": "heads", "vocab_size": "vocab"}
REQUIRED |= {"n_positions": "max_position"}
_SPELLED = {ours: theirs for theirs, ours in REQUIRED.items()} | {"norm_eps": "layer_norm_epsilon", "ffn": "n_inner"}
# What transformers calls the same for all its models.
_COMMON = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_COMMON |= {"max_position_embeddings": "n_positions"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "quantization_config": (),
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields)
    refuse_unless_neutral(fields, _NEUTRAL)
    fields = _respelled(fields)
    ours = hf_fields.sizes(fields, "gpt2", REQUIRED)
    ours["ffn"] = fields.get("n_inner", int, 4 * ours["width"])
    return checked(fields, ours | _rest(fields, ours, "layer_norm_epsilon"), _SPELLED)


def _rest(fields: Fields, ours: Config, epsilon: str) -> Config:
    config: Config = {"kv_heads": ours["heads"], "head_dim": hf_fields.divided(fields, ours, "n_head")}
    config |= {"norm_eps": fields.get(epsilon, float, 1e-5), "tied": fields.get("tie_word_embeddings", bool, True)}
    config |= hf_fields.activation(fields, "activation_function", "gelu_new")
    return config | hf_fields.learned_positions() | {"bias": True}


def _respelled(fields: Fields) -> Fields:
    """The same under the type's own names. Raises ConfigError where two names have two values."""
    changes: dict[str, object] = {}
    for common, gpt2_name in _COMMON.items():
        value = fields.values.get(common)
        if value is None:
            continue
        if fields.values.get(gpt2_name, value) != value:
            fields.refuse(common, f"{value!r} is not the {fields.values[gpt2_name]!r} that {gpt2_name} says")
        changes |= {common: None, gpt2_name: value}
    return fields.changed(changes)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: config[ours] for theirs, ours in REQUIRED.items()},
        "n_inner": config["ffn"],
        "layer_norm_epsilon": config["norm_eps"],
        "activation_function": hf_fields.activation_to_hf(config),
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; which activation there is is no key of such files, but of the architecture."""
    gguf_fields.refuse_rope(model.fields)
    config = gguf_fields.read(model, "gpt2", "half", epsilon=gguf_fields.EPSILON)
    return config | hf_fields.learned_positions() | {"bias": True, "activation": "gelu_tanh"}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """It turns nothing: such files have no key of rope."""
    none = dict.fromkeys(("rope.dimension_count", "rope.freq_base"))
    return gguf_fields.GgufForm("gpt2", "half", none, gguf_fields.EPSILON)
