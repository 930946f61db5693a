"""What readers of models share whose layers are all scans: no attention, no MLP, no end of positions."""

from collections.abc import Collection

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral

ABSENT = ("heads", "kv_heads", "head_dim", "ffn")
POSITIONS = 1 << 20  # what llama.cpp's converter writes: there is no last one
TOP = {
    "embed": ("token_embd", "backbone.embeddings"),
    "final_norm": ("output_norm", "backbone.norm_f"),
    "head": ("output", "lm_head"),
}
HF_ALSO = {"backbone.embedding": "embed"}  # in files of before
_REQUIRED = {"hidden_size": "width", "num_hidden_layers": "layers", "vocab_size": "vocab"}
_SPELLED = {ours: theirs for theirs, ours in _REQUIRED.items()} | {"norm_eps": "layer_norm_epsilon"}
_EMPTY: Config = {
    **{**dict.fromkeys(ABSENT, 0), "max_position": POSITIONS, "positions": "none", "rope_style": "half"},
    **{"rope_theta": 1e4, "rope_scaling": None, "attention_bias": False, "qk_norm": False, "sliding_window": None},
}


def from_hf(fields: Fields, family: str, tied: bool) -> Config:
    """The canonical configuration but for the scan. tied: transformers' default."""
    hf_fields.refuse_features(fields)
    refuse_unless_neutral(fields, {"use_bias": (False,)})
    ours = hf_fields.sizes(fields, family, _REQUIRED) | _EMPTY
    ours["norm_eps"] = fields.get("layer_norm_epsilon", float, 1e-5)
    ours["tied"] = fields.get("tie_word_embeddings", bool, tied)
    ours["conv_bias"] = fields.get("use_conv_bias", bool, True)
    ours["recurrent"] = [True] * ours["layers"]
    return checked(fields, ours, _SPELLED, ABSENT)


def channels(fields: Fields, width: int) -> int:
    """The channels of the scans of a model of that width."""
    times = fields.get("expand", int, 2)
    if not 1 <= times <= 1 << 10:
        fields.refuse("expand", f"{describe(times)} is not from 1 to {1 << 10}")
    return times * width


def to_hf(config: Config, kind: str, name: str) -> Config:
    """The inverse: the fields of a config.json. name: of transformers' classes."""
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        **{theirs: config[ours] for theirs, ours in _REQUIRED.items()},
        "layer_norm_epsilon": config["norm_eps"],
        "use_conv_bias": config.get("conv_bias", True),
        "use_bias": False,
        "hidden_act": "silu",
        "state_size": config["states"],
        "conv_kernel": config.get("taps", 4),
        "expand": config["inner"] // config["width"],
    }


def from_gguf(model: gguf_fields.GgufModel, family: str, honoured: Collection[str]) -> Config:
    """The canonical configuration but for the scan; honoured: the keys of that."""
    fields = model.fields
    gguf_fields.refuse_unknown(fields, (*honoured, gguf_fields.RMS_EPSILON))
    ours: Config = {"family": family, **_EMPTY, "vocab": gguf_fields.vocabulary(fields, model.shapes)}
    ours |= {"layers": fields.need("block_count", int), "width": fields.need("embedding_length", int)}
    ours["max_position"] = fields.need("context_length", int)
    ours["norm_eps"] = fields.need(gguf_fields.RMS_EPSILON, float)
    ours["tied"] = "head.weight" not in model.shapes
    ours["conv_bias"] = any(name.endswith(".conv.bias") for name in model.shapes)
    ours = checked(fields, ours, gguf_fields.SPELLED | {"norm_eps": gguf_fields.RMS_EPSILON}, ABSENT)
    return ours | {"recurrent": [True] * ours["layers"]}


def gguf_keys(config: Config) -> Config:
    """Keys that say nothing, which such files have; those of heads of keys and of their size they have not."""
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    return {**dict.fromkeys(absent), "attention.head_count": 0, "feed_forward_length": 0}
