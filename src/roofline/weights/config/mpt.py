"""The config.json of an MPT model -> the canonical configuration: its own names, LLM Foundry's and transformers'."""

from collections.abc import Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.weights.config.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.files.mapped import JsonObject, refuse

REQUIRED = {"d_model": "width", "n_layers": "layers", "n_heads": "heads", "vocab_size": "vocab"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logit_scale": (),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "use_pad_tok_in_ffn": (True,),
    "ffn_config": ({"ffn_type": "mptmlp"}, {"ffn_type": "mptmlp", "fc_type": "torch"}),
    "quantization_config": (),
}
_NEUTRAL_ATTENTION: dict[str, tuple[object, ...]] = {
    "attn_type": ("multihead_attention",),
    **dict.fromkeys(("clip_qkv", "softmax_scale"), ()),
    **dict.fromkeys(("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id"), (False,)),
    "sliding_window_size": (-1,),
    "alibi_bias_max": (8,),
}


def from_mpt(path: Path, config: JsonObject) -> Config:
    """The canonical configuration of a parsed config.json. Raises ConfigError, UnsupportedError naming the field."""
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        refuse(path, "attn_config", "is not a mapping")
    refuse_unless_neutral(path, config, _NEUTRAL)
    refuse_unless_neutral(path, attention, _NEUTRAL_ATTENTION)
    ours: Config = {"family": "mpt", "rope_theta": 1e4, "rope_scaling": None, "rope_style": "half"}
    for key, name in REQUIRED.items():
        if not isinstance(config.get(key), int) or config[key] < 1:
            refuse(path, key, f"{config.get(key)!r} is not a whole number of at least 1")
        ours[name] = config[key]
    width, heads, ratio = ours["width"], ours["heads"], config.get("expansion_ratio", 4)
    if width % heads:
        refuse(path, "n_heads", f"{heads} heads do not divide a width of {width}")
    if not isinstance(ratio, int | float) or not 0 < ratio < 1 << 16 or ratio * width != int(ratio * width):
        refuse(path, "expansion_ratio", f"{ratio!r} times {width} is not a whole number")
    no_bias = config.get("no_bias", True)
    ours |= {"kv_heads": heads, "head_dim": width // heads, "ffn": int(ratio * width)}
    ours |= {"max_position": config.get("max_seq_len", 2048), "norm_eps": config.get("layer_norm_epsilon", 1e-5)}
    ours |= {"tied": config.get("tie_word_embeddings", True) is not False, "bias": not no_bias}
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": None}
    ours["positions"] = _positions(path, config, attention)
    return checked(path, ours)


def _positions(path: Path, config: JsonObject, attention: JsonObject) -> str:
    """transformers computes ALiBi whatever the file says; LLM Foundry reads these two, and its files have both."""
    if attention.get("alibi", True):
        return "alibi"
    if not config.get("learned_pos_emb", True):
        raise UnsupportedError(f"{path}: an MPT without positions", "it has neither ALiBi nor learned ones")
    return "learned"
