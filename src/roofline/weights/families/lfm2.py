"""Files of LFM2, with an MLP or with experts: w1, w3 and w2 are gate, up and down."""

import re
from dataclasses import replace
from pathlib import Path

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    EXPERTS,
    HONOURED_GGUF,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.tensor_names import ATTENTION, TOP, TensorNames
from roofline.weights.quantised.method import TensorSource

_IN_MEMORY = re.compile(r"(.+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def _apart(path: Path, source: TensorSource) -> TensorSource:
    """As published, from what transformers has in memory: all experts of a layer in two tensors."""
    alike = renamed(source, lambda name: name.replace(".feed_forward.", ".mlp."))
    return renamed(stacked_experts_apart(path, alike), _as_published)


def _as_published(name: str) -> str:
    match = _IN_MEMORY.fullmatch(name)
    if match is None:
        return name.replace(".mlp.", ".feed_forward.")
    return f"{match[1]}.feed_forward.experts.{match[2]}.{_PARTS[match[3]]}.weight"


NAMES = TensorNames(
    ATTENTION
    | EXPERTS
    | {
        "attn_norm": ("attn_norm", "operator_norm"),
        "mlp_norm": ("ffn_norm", "ffn_norm"),
        "attn.o": ("attn_output", "self_attn.out_proj"),
        "attn.q_norm": ("attn_q_norm", "self_attn.q_layernorm"),
        "attn.k_norm": ("attn_k_norm", "self_attn.k_layernorm"),
        "short.bcx": ("shortconv.in_proj", "conv.in_proj"),
        "short.conv": ("shortconv.conv", "conv.conv"),
        "short.out": ("shortconv.out_proj", "conv.out_proj"),
        "mlp.router": ("ffn_gate_inp", "feed_forward.gate"),
        **{f"mlp.{ours}": (f"ffn_{ours}", f"feed_forward.{theirs}") for ours, theirs in _PARTS.items()},
        **{f"mlp.experts.{{expert}}.{o}": ("", f"feed_forward.experts.{{expert}}.{t}") for o, t in _PARTS.items()},
    },
    top=TOP | {"final_norm": ("token_embd_norm", "model.embedding_norm")},
    bare={"mlp.choice.bias": ("exp_probs_b.bias", "feed_forward.expert_bias")},
    parted=("short.conv",),
    experts_module="feed_forward.experts",
    hf_apart=_apart,
)
_KINDS = ("full_attention", "conv")
_DENSE, _EXPERTS = "lfm2", "lfm2_moe"
_BOTH = {"vocab_size": 65_536, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
_BOTH |= {"max_position_embeddings": 128_000}
_DEFAULTS = {
    _DENSE: {**_BOTH, "hidden_size": 2560, "intermediate_size": 12_288},
    _EXPERTS: {
        **{**_BOTH, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792},
        **{"num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32},
    },
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. tie_embedding and block_ff_dim are older names, which transformers reads first;
    use_pos_enc and block_use_swiglu are of the first files, and nobody reads them."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS[model_type])
    refuse_unless_neutral(fields, {"use_pos_enc": (True,), "block_use_swiglu": (True,)})
    eps = fields.get("norm_eps", float, 1e-5)
    tied = fields.get("tie_embedding", bool, fields.get("tie_word_embeddings", bool, True))
    fields = fields.changed({"rms_norm_eps": eps, "tie_word_embeddings": tied})
    if model_type == _DENSE:
        fields = fields.changed({"intermediate_size": _ffn(fields)})
    ours = hf_fields.decoder(fields, "lfm2", ("num_experts",), heads_by_default=False, theta=1e6)
    ours |= {"qk_norm": True, "taps": _taps(fields, "conv_L_cache", fields.get("conv_L_cache", int, 3))}
    ours["conv_bias"] = fields.get("conv_bias", bool, False)
    ours["recurrent"] = _recurrent(fields, ours["layers"], model_type)
    if model_type == _EXPERTS:
        ours |= _hf_routed(fields, ours)
    return checked(fields, ours, hf_fields.SPELLED | {"norm_eps": "norm_eps"})


def _ffn(fields: Fields) -> int:
    """The inner width of the MLP, of which files say 3/2 of it, before it is made a multiple."""
    key = "block_ff_dim" if fields.values.get("block_ff_dim") is not None else "intermediate_size"
    ffn = fields.need(key, int)
    if not 1 <= ffn <= 1 << 22:
        fields.refuse(key, f"{describe(ffn)} is not from 1 to {1 << 22}")
    if not fields.get("block_auto_adjust_ff_dim", bool, True):
        return ffn
    ffn = int(2 * ffn / 3)
    if "block_ffn_dim_multiplier" in fields.values and fields.values["block_ffn_dim_multiplier"] is None:
        return ffn
    factor, step = fields.get("block_ffn_dim_multiplier", float, 1.0), fields.get("block_multiple_of", int, 256)
    if not 1 <= step <= 1 << 22 or not 0 < factor <= 1 << 10:
        fields.refuse("block_multiple_of", f"{describe(step)}, and {factor} beside it, are not above 0 and small")
    return -(-int(factor * ffn) // step) * step


def _taps(fields: Fields, key: str, taps: int) -> int:
    if not 2 <= taps <= 1 << 10:
        fields.refuse(key, f"{describe(taps)} is not from 2 to {1 << 10}")
    return taps


def _recurrent(fields: Fields, layers: int, model_type: str) -> list[bool]:
    """Of each layer whether it is a convolution; the older full_attn_idxs has the numbers of the others."""
    types, attending = hf_fields.layer_types(fields, _KINDS), fields.elements("full_attn_idxs", int)
    if types is not None:  # by which transformers goes where there are both
        return [kind == "conv" for kind in types]
    if model_type == _EXPERTS:
        fields.refuse("layer_types", "is missing: which layers attend must be said")
    return [attending is not None and layer not in attending for layer in range(layers)]


def _hf_routed(fields: Fields, ours: Config) -> Config:
    dense = _dense(fields, "num_dense_layers", fields.need("num_dense_layers", int), ours)
    scale = fields.get("routed_scaling_factor", float, 1.0)
    if scale <= 0:
        fields.refuse("routed_scaling_factor", f"{describe(scale)} is not above 0")
    return hf_experts(fields, "num_experts") | {
        "ffn": expert_size(fields, "moe_intermediate_size"),
        "renormalise": fields.get("norm_topk_prob", bool, True),
        "score": "sigmoid",
        "choice_bias": fields.get("use_expert_bias", bool, True),
        "routed_scale": scale,
        **dense,
    }


def _dense(fields: Fields, key: str, count: int, ours: Config) -> Config:
    """The layers that have an MLP: the first so many."""
    if not 0 <= count <= 1 << 14:
        fields.refuse(key, f"{describe(count)} is not from 0 to {1 << 14}")
    layers = list(range(min(count, ours["layers"])))
    return {"dense": layers, "dense_ffn": ours["ffn"] if layers else 0}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    experts = bool(config.get("experts"))
    fields = hf_fields.to_hf(config, _EXPERTS if experts else _DENSE, "Lfm2Moe" if experts else "Lfm2")
    for key in ("rms_norm_eps", "hidden_act"):
        del fields[key]
    fields |= {"norm_eps": config["norm_eps"], "conv_bias": config.get("conv_bias", False)}
    fields |= {"conv_L_cache": config.get("taps", 3), "layer_types": [_KINDS[conv] for conv in config["recurrent"]]}
    if not experts:
        plain = {"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
        return fields | plain
    return fields | {
        "intermediate_size": config.get("dense_ffn") or config["ffn"],
        "moe_intermediate_size": config["ffn"],
        "num_dense_layers": len(config.get("dense", ())),
        "num_experts": config["experts"],
        "num_experts_per_tok": config["experts_per_token"],
        "norm_topk_prob": config.get("renormalise", True),
        "use_expert_bias": config.get("choice_bias", False),
        "routed_scaling_factor": config.get("routed_scale", 1.0),
    }


_TAPS, _HEADS, _SIGMOID = "shortconv.l_cache", "attention.head_count_kv", 2
_EACH, _FIRST, _SCORE = "expert_feed_forward_length", "leading_dense_block_count", "expert_gating_func"
_GGUF = (*HONOURED_GGUF, _TAPS, _EACH, _FIRST, _SCORE)


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. Layers of which files say 0 heads of keys are convolutions; that the weights of
    experts add up to 1 they do not say."""
    fields = model.fields
    gguf_fields.refuse_window(fields)
    heads = gguf_fields.heads_by_layer(fields)
    fields = fields.changed({_HEADS: max([1, *heads])})
    config = gguf_fields.read(replace(model, fields=fields), "lfm2", "half", _GGUF)
    gguf_fields.check_heads(fields, heads, config["layers"])
    config |= {"qk_norm": True, "taps": _taps(fields, _TAPS, fields.need(_TAPS, int))}
    config["recurrent"] = [not count for count in heads]
    if architecture == "lfm2moe":
        refuse_unless_neutral(fields, {_SCORE: (_SIGMOID,)})
        config |= _dense(fields, _FIRST, fields.get(_FIRST, int, 0), config) | gguf_experts(fields)
        config |= {"ffn": expert_size(fields, _EACH), "renormalise": True, "score": "sigmoid", "choice_bias": True}
    return config


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    experts, wide = bool(config.get("experts")), config["heads"] * config["head_dim"] != config["width"]
    scored = config.get("renormalise", True) and config.get("choice_bias") and config.get("routed_scale", 1.0) == 1.0
    first = list(config.get("dense", ())) == list(range(len(config.get("dense", ()))))
    unsaid = {"biases": config.get("conv_bias"), "heads together of another width than the model": wide}
    unsaid["weights of experts that are scaled, do not add up to 1, or are chosen without a bias"] = (
        experts and not scored
    )
    unsaid["a dense layer between those of experts"] = experts and not first
    gguf_fields.refuse_unsaid(config, unsaid)
    keys: Config = {_TAPS: config.get("taps", 3)}
    keys[_HEADS] = [0 if conv else config["kv_heads"] for conv in config["recurrent"]]
    if not experts:
        return gguf_fields.GgufForm("lfm2", "half", keys)
    keys |= experts_to_gguf(config) | {_EACH: config["ffn"], _FIRST: len(config["dense"]), _SCORE: _SIGMOID}
    keys["feed_forward_length"] = config.get("dense_ffn") or config["ffn"]
    return gguf_fields.GgufForm("lfm2moe", "half", keys)
