"""Files of Nemotron-H and Nemotron 3: each layer has one norm and one mixer, whatever that is."""

import re
from dataclasses import replace
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.weights.families.shared import gguf_fields, hf_fields, scans
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    HONOURED_GGUF,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.tensor_names import TensorNames
from roofline.weights.quantised.method import TensorSource

_STACKED = re.compile(r"(.+)\.mixer\.experts\.(up_proj|down_proj)")
_APART = re.compile(r"(.+)\.mlp\.experts\.(\d+\..+)")


def _stacked_name(name: str) -> str:
    name = re.sub(r"^model\.", "backbone.", name)  # as transformers has it in memory
    return _STACKED.sub(r"\1.mlp.experts.\2", name)


def _apart(path: Path, source: TensorSource) -> TensorSource:
    apart = stacked_experts_apart(path, renamed(source, _stacked_name))
    return renamed(apart, lambda name: _APART.sub(r"\1.mixer.experts.\2", name))


NAMES = TensorNames(
    {f"attn.{part}": (f"attn_{theirs}", f"mixer.{part}_proj") for part, theirs in zip("qkv", "qkv", strict=True)}
    | scans.names("mixer")
    | {
        "norm": ("attn_norm", "norm"),
        "attn.o": ("attn_output", "mixer.o_proj"),
        "mlp.up": ("ffn_up", "mixer.up_proj"),
        "mlp.down": ("ffn_down", "mixer.down_proj"),
        "mlp.router": ("ffn_gate_inp", "mixer.gate"),
        "mlp.latent_in": ("ffn_latent_down", "mixer.fc1_latent_proj"),
        "mlp.latent_out": ("ffn_latent_up", "mixer.fc2_latent_proj"),
        "mlp.shared.up": ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
        "mlp.shared.down": ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
        "mlp.experts.up": ("ffn_up_exps", "mixer.experts.up_proj"),
        "mlp.experts.down": ("ffn_down_exps", "mixer.experts.down_proj"),
        "mlp.experts.{expert}.up": ("", "mixer.experts.{expert}.up_proj"),
        "mlp.experts.{expert}.down": ("", "mixer.experts.{expert}.down_proj"),
    },
    top={
        "embed": ("token_embd", "backbone.embeddings"),
        "final_norm": ("output_norm", "backbone.norm_f"),
        "head": ("output", "lm_head"),
    },
    hf_layers="backbone.layers",
    hf_prefix="backbone.",
    hf_before=("model.",),
    modules_before=("backbone.", "model."),
    hf_unread=r"mtp\..+",
    bare=scans.bare_names("mixer") | {"mlp.choice.bias": ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias")},
    parted=scans.PARTED,
    hf_apart=_apart,
    joined=scans.joined,
    unadapted=scans.UNADAPTED,
    gguf_joined=scans.JOINED_GGUF,
    gguf_negated=scans.NEGATED,
    gguf_shapes=scans.gguf_shapes,
)
_DEFAULTS: dict[str, object] = {"vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
_DEFAULTS |= {"num_key_value_heads": 8, "max_position_embeddings": 4096, "intermediate_size": 21_504}
_DEFAULTS |= {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4}
_DEFAULTS |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
_DEFAULTS |= {"moe_shared_expert_intermediate_size": 7688}
_SIZES = {"scan_heads": "mamba_num_heads", "groups": "n_groups", "states": "ssm_state_size", "taps": "conv_kernel"}
_OF_EXPERTS = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
_OLDER = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
_OLDER |= {"mamba_dt_limit": "time_step_limit"}
_SCAN, _ATTENTION, _SPARSE, _DENSE = "linear_attention", "full_attention", "moe", "mlp"
_LETTERS = {"M": _SCAN, "*": _ATTENTION, "E": _SPARSE, "-": _DENSE}
_WORDS = {"mamba": _SCAN, "attention": _ATTENTION}  # names of before
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("use_bias", "mamba_proj_bias"), (False,)),
    "mamba_hidden_act": ("silu", "swish"),
    "n_shared_experts": (1,),
    "sliding_window": (),
}
_HONOURED = ("n_routed_experts", "mlp_bias", "auto_map")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. Steps have the bounds of time_step_limit, as in NVIDIA's program: transformers takes
    time_step_min for the least step of a prompt, and none while it decodes."""
    older = {today: fields.values[key] for key, today in _OLDER.items() if key in fields.values}
    fields = hf_fields.with_defaults(fields.changed(older), _DEFAULTS)
    kinds = _kinds(fields)
    refuse_unless_neutral(fields, _NEUTRAL)
    fields = fields.changed(
        {"num_hidden_layers": len(kinds), "rms_norm_eps": fields.get("layer_norm_epsilon", float, 1e-5)}
    )
    hf_fields.refuse_features(fields, _HONOURED)
    ours = hf_fields.sizes(fields, "nemotron_h")
    ours |= {"kv_heads": hf_fields.kv_heads(fields, heads_by_default=True), "head_dim": fields.need("head_dim", int)}
    ours |= {"norm_eps": fields.need("rms_norm_eps", float), "tied": fields.get("tie_word_embeddings", bool, False)}
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": None, "positions": "none"}
    ours |= {"rope_theta": 1e4, "rope_scaling": None} | hf_fields.activation(fields, "mlp_hidden_act", "relu2")
    ours |= {"mlp_bias": True} if fields.get("mlp_bias", bool, False) else {}
    ours |= {"recurrent": [kind == _SCAN for kind in kinds], "dense": [i for i, k in enumerate(kinds) if k == _DENSE]}
    ours |= {"dense_ffn": ours["ffn"]} if ours["dense"] else {}
    sparse = [i for i, kind in enumerate(kinds) if kind == _SPARSE]
    if sparse:
        ours |= {"sparse": sparse} | _experts(fields)
    for key in _OF_EXPERTS:
        fields.values.get(key)  # is of no account where there are no experts
    return checked(fields, ours | _scans(fields), hf_fields.SPELLED | {"norm_eps": "layer_norm_epsilon"})


def _kinds(fields: Fields) -> list[str]:
    """What each layer is, as a list of words or a string of letters says."""
    words = fields.elements("layers_block_type", str) or fields.elements("layer_types", str)
    if words is not None:
        kinds = [_WORDS.get(word, word) for word in words]
    else:
        letters = fields.get("hybrid_override_pattern", str)
        kinds = [_SCAN, _SPARSE, _ATTENTION, _DENSE] if letters is None else [_LETTERS.get(x, x) for x in letters]
    new = next((kind for kind in kinds if kind not in _LETTERS.values()), None)
    if new is not None:
        raise UnsupportedError(f"{fields.path}: layers_block_type {shorten(new)!r}", "we do not have such layers")
    return kinds


def _experts(fields: Fields) -> Config:
    scale = fields.get("routed_scaling_factor", float, 1.0)
    if scale <= 0:
        fields.refuse("routed_scaling_factor", f"{describe(scale)} is not above 0")
    latent = fields.get("moe_latent_size", int)
    if latent is not None and not 1 <= latent <= 1 << 20:
        fields.refuse("moe_latent_size", f"{describe(latent)} is not from 1 to {1 << 20}")
    return hf_experts(fields, "n_routed_experts") | {
        "ffn": expert_size(fields, "moe_intermediate_size"),
        "shared_ffn": expert_size(fields, "moe_shared_expert_intermediate_size"),
        "renormalise": fields.get("norm_topk_prob", bool, True),
        "expert_groups": fields.get("n_group", int, 1),
        "kept_groups": fields.get("topk_group", int, 1),
        "routed_scale": scale,
        **({} if latent is None else {"latent": latent}),
    }


def _scans(fields: Fields) -> Config:
    for key in ("expand", "num_nextn_predict_layers", "mtp_layers_block_type"):
        fields.values.get(key)  # channels are counted by heads; layers that guess further tokens are not read
    ours = scans.read_sizes(fields, _SIZES)
    ours["inner"] = ours["scan_heads"] * scans.read_sizes(fields, {"inner": "mamba_head_dim"})["inner"]
    scans.check_sizes(fields, ours, "mamba_num_heads", "n_groups")
    ours["conv_bias"] = fields.get("use_conv_bias", bool, True)
    return ours | scans.step_bounds(fields, "time_step_limit")


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "nemotron_h", "NemotronH")
    for key in ("rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters"):
        del fields[key]
    kinds = _kinds_of(config)
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    fields |= scans.sizes_to_hf(config, _SIZES) | {
        "layer_norm_epsilon": config["norm_eps"],
        "layers_block_type": kinds,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "mamba_head_dim": config["inner"] // config["scan_heads"],
        "use_conv_bias": config.get("conv_bias", True),
        **scans.step_bounds_to_hf(config, "time_step_limit"),
        "mlp_hidden_act": hf_fields.activation_to_hf(config),
        "mlp_bias": config.get("mlp_bias", False),
        "intermediate_size": config.get("dense_ffn") or config["ffn"],
    }
    if not config.get("experts"):
        return fields
    return fields | {
        "n_routed_experts": config["experts"],
        "num_experts_per_tok": config["experts_per_token"],
        "moe_intermediate_size": config["ffn"],
        "moe_shared_expert_intermediate_size": config["shared_ffn"],
        "moe_latent_size": config.get("latent") or None,
        "norm_topk_prob": config.get("renormalise", True),
        "n_group": config.get("expert_groups", 1),
        "topk_group": config.get("kept_groups", 1),
        "routed_scaling_factor": config.get("routed_scale", 1.0),
    }


def _kinds_of(config: Config) -> list[str]:
    kinds = [_SCAN if scan else _ATTENTION for scan in config["recurrent"]]
    for layer in config.get("dense", ()):
        kinds[layer] = _DENSE
    for layer in config.get("sparse", ()):
        kinds[layer] = _SPARSE
    return kinds


_HEADS, _FFN = "attention.head_count_kv", "feed_forward_length"
_EACH, _SHARED, _LATENT = "expert_feed_forward_length", "expert_shared_feed_forward_length", "moe_latent_size"
_NORM, _SCALE, _COUNT = "expert_weights_norm", "expert_weights_scale", "expert_shared_count"
_GROUPS = ("expert_group_count", "expert_group_used_count")
_GGUF = (*HONOURED_GGUF, *scans.GGUF_HONOURED, _EACH, _SHARED, _LATENT, _NORM, _SCALE, _COUNT, *_GROUPS)
_UNREAD = (gguf_fields.EPSILON, "rope.scaling.finetuned", "expert_gating_func", "nextn_predict_layers")


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration: layers of which files say a width of the MLP are one, or experts; those of which
    they say 0 heads of keys besides are scans. Nothing turns, whatever files say of rope; converters permute the rows
    of q and k all the same."""
    fields, further = model.fields, model.fields.get("nextn_predict_layers", int, 0)
    layers = fields.need("block_count", int) - further
    widths, heads = _by_layer(fields, _FFN, layers), _by_layer(fields, _HEADS, layers)
    changes = {"block_count": layers, _FFN: max([1, *widths]), _HEADS: max([1, *heads])}
    turning = {key: None for key in fields.values if key.startswith("rope.")}
    plain = replace(model, fields=fields.changed({**changes, **turning}))
    gguf_fields.refuse_window(fields)
    refuse_unless_neutral(fields, {"expert_gating_func": (0, 2), _COUNT: (1,)})
    epsilon = gguf_fields.RMS_EPSILON if gguf_fields.RMS_EPSILON in fields.values else gguf_fields.EPSILON
    honoured = (*_GGUF, *_UNREAD, *turning)
    config = gguf_fields.read(plain, "nemotron_h", "interleaved", honoured, epsilon)
    if len({*widths, 0}) > 2 or len({*heads, 0}) > 2:
        fields.refuse(_FFN, f"or {_HEADS} has several numbers above 0")
    inner = [i for i, width in enumerate(widths) if width]
    config |= {"positions": "none", "activation": "relu_squared"} | scans.from_gguf(fields)
    config |= {"recurrent": [not count and not width for count, width in zip(heads, widths, strict=True)]}
    config["conv_bias"] = any(".ssm.conv.bias" in name for name in model.shapes)
    if any(name.endswith(".mlp.up.bias") for name in model.shapes):
        config["mlp_bias"] = True
    if not fields.get("expert_count", int, 0):
        return config | {"dense": inner, "dense_ffn": config["ffn"] if inner else 0}
    return config | {"sparse": inner} | _gguf_routed(fields)


def _gguf_routed(fields: Fields) -> Config:
    scale = fields.get(_SCALE, float, 0.0)
    return gguf_experts(fields) | {
        "ffn": expert_size(fields, _EACH),
        "shared_ffn": expert_size(fields, _SHARED),
        "renormalise": fields.get(_NORM, bool, False),
        "expert_groups": fields.get(_GROUPS[0], int, 1),
        "kept_groups": fields.get(_GROUPS[1], int, fields.get(_GROUPS[0], int, 1)),
        "routed_scale": scale or 1.0,  # 0 says nothing
        **({"latent": fields.need(_LATENT, int)} if fields.get(_LATENT, int, 0) else {}),
    }


def _by_layer(fields: Fields, key: str, layers: int) -> list[int]:
    """A number for each layer of the model."""
    numbers = fields.elements(key, int) or []
    if len(numbers) < layers:
        fields.refuse(key, f"has {len(numbers)} values for {layers} layers")
    return numbers[: max(0, layers)]


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    dense, sparse = config.get("dense", ()), config.get("sparse", ())
    grouped = config.get("expert_groups", 1) > 1
    unsaid = {"another activation": config.get("activation") != "relu_squared", **scans.unsaid(config)}
    unsaid |= {"MLPs and experts": dense and sparse, "groups of experts": sparse and grouped}
    gguf_fields.refuse_unsaid(config, unsaid | {"no shared experts": sparse and not config.get("shared_ffn")})
    kinds, inner = _kinds_of(config), config["ffn"]
    keys = scans.gguf_keys(config) | {"rope.scaling.finetuned": False}
    keys |= {_FFN: [inner if kind in (_DENSE, _SPARSE) else 0 for kind in kinds], "rope.freq_base": None}
    keys |= {_HEADS: [config["kv_heads"] if kind == _ATTENTION else 0 for kind in kinds]}
    if not sparse:
        return gguf_fields.GgufForm("nemotron_h", "interleaved", keys, gguf_fields.EPSILON)
    keys |= experts_to_gguf(config) | {_EACH: inner, _SHARED: config["shared_ffn"], _COUNT: 1}
    keys |= {_NORM: config.get("renormalise", True), _SCALE: config.get("routed_scale", 1.0)}
    keys |= dict.fromkeys(_GROUPS, 1)
    keys |= {_LATENT: config["latent"]} if config.get("latent") else {}
    return gguf_fields.GgufForm("nemotron_h_moe", "interleaved", keys, gguf_fields.EPSILON)
