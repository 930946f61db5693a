"""Files of Jamba, whose steps, B and C are normed with weights, and whose layers attend, or have experts, by turns."""

from dataclasses import replace
from pathlib import Path

from roofline.common.fields import Fields, describe
from roofline.weights.families import mamba
from roofline.weights.families.shared import gguf_fields, hf_fields, scans
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import EXPERTS, HONOURED_GGUF, experts_to_gguf, gguf_experts, hf_experts
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.tensor_names import ATTENTION, TOP, TensorNames
from roofline.weights.quantised.method import TensorSource

_PARTS = ("gate", "up", "down")
_NORMS = {"rank_norm": ("ssm_dt_norm", "dt_layernorm"), "b_norm": ("ssm_b_norm", "b_layernorm")}
_NORMS |= {"c_norm": ("ssm_c_norm", "c_layernorm")}


def _apart(path: Path, source: TensorSource) -> TensorSource:
    """As published, from what transformers has in memory: all experts of a layer in two tensors."""
    alike = renamed(source, lambda name: name.replace(".feed_forward.", ".mlp."))
    return renamed(stacked_experts_apart(path, alike), lambda name: name.replace(".mlp.", ".feed_forward."))


NAMES = TensorNames(
    ATTENTION
    | EXPERTS
    | mamba.names("mamba")
    | {f"ssm.{ours}": (gguf, f"mamba.{theirs}") for ours, (gguf, theirs) in _NORMS.items()}
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "mlp_norm": ("ffn_norm", "pre_ff_layernorm"),
        "mlp.router": ("ffn_gate_inp", "feed_forward.router"),
        **{f"mlp.{part}": (f"ffn_{part}", f"feed_forward.{part}_proj") for part in _PARTS},
        **{f"mlp.experts.{{expert}}.{n}": ("", f"feed_forward.experts.{{expert}}.{n}_proj") for n in _PARTS},
    },
    top=TOP | {"final_norm": ("output_norm", "model.final_layernorm")},
    bare=mamba.bare_names("mamba"),
    parted=scans.PARTED,
    hf_apart=_apart,
    joined=mamba.joined,
    experts_module="feed_forward.experts",
    unadapted=scans.PASSED_BY,
    gguf_negated=scans.NEGATED,
    gguf_joined=mamba.NAMES.gguf_joined,
)
_DEFAULTS: dict[str, object] = {"vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336}
_DEFAULTS |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
_DEFAULTS |= {"max_position_embeddings": 262_144, "num_experts": 16, "num_experts_per_tok": 2}
_DEFAULTS |= {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_SIZES = {"states": "mamba_d_state", "taps": "mamba_d_conv"}
_PERIODS = {"attn_layer": (8, 4), "expert_layer": (2, 1)}  # transformers' defaults of period and offset
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mamba_proj_bias": (False,),
    "mamba_inner_layernorms": (True,),  # of the first files; nobody reads it
    **dict.fromkeys(("sliding_window", "layer_types", "layers_block_type"), ()),
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; num_local_experts is another name of num_experts. Published files have an auto_map
    to the classes that transformers has today."""
    if "num_local_experts" in fields.values:
        fields = fields.changed({"num_experts": fields.values["num_local_experts"], "num_local_experts": None})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, _NEUTRAL)
    ours = hf_fields.decoder(fields, "jamba", ("num_experts", "auto_map"))
    ours |= {"positions": "none", "rope_theta": 1e4, "rope_scaling": None}
    layers, attending = range(ours["layers"]), _by_turns(fields, "attn_layer")
    ours["recurrent"] = [layer not in attending for layer in layers]
    ours |= scans.read_sizes(fields, _SIZES)
    ours["inner"] = scans.expanded(fields, "mamba_expand", ours["width"])
    ours |= {"rank": mamba.rank(fields, "mamba_dt_rank", ours["width"])}
    ours |= {"scan_norms": "weights", "scan_eps": ours["norm_eps"]}
    ours["conv_bias"] = fields.get("mamba_conv_bias", bool, True)
    sparse = _by_turns(fields, "expert_layer")
    if fields.need("num_experts", int) > 1 and any(layer in sparse for layer in layers):
        dense = [layer for layer in layers if layer not in sparse]
        ours |= hf_experts(fields, "num_experts") | _routed(dense, ours["ffn"])
    return checked(fields, ours, hf_fields.SPELLED)


def _by_turns(fields: Fields, kind: str) -> range:
    """The numbers of the layers of a kind, one of each period."""
    period, offset = (
        fields.get(f"{kind}_{part}", int, default)
        for part, default in zip(("period", "offset"), _PERIODS[kind], strict=True)
    )
    if not 1 <= period <= 1 << 20:
        fields.refuse(f"{kind}_period", f"{describe(period)} is not from 1 to {1 << 20}")
    if not 0 <= offset < period:
        fields.refuse(f"{kind}_offset", f"{describe(offset)} is not from 0 to {period - 1}, below {kind}_period")
    return range(offset, 1 << 20, period)


def _routed(dense: list[int], ffn: int) -> Config:
    """What its experts have in common: the chances of those that are chosen do not add up to 1."""
    return {"renormalise": False, "dense": dense, "dense_ffn": ffn if dense else 0}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "jamba", "Jamba")
    for key in ("rope_theta", "rope_parameters"):
        del fields[key]
    layers, dense = range(config["layers"]), config.get("dense", ())
    attending = [layer for layer in layers if not config["recurrent"][layer]]
    sparse = [layer for layer in layers if layer not in dense] if config.get("experts") else []
    return fields | {
        **scans.sizes_to_hf(config, _SIZES),
        **_period(attending, "attn_layer", config["layers"]),
        **_period(sparse, "expert_layer", config["layers"]),
        "num_experts": config.get("experts", 0) or 1,
        "num_experts_per_tok": config.get("experts_per_token", 0) or 1,
        "mamba_expand": scans.expansion(config),
        "mamba_dt_rank": config["rank"],
        "mamba_conv_bias": config.get("conv_bias", True),
        "mamba_proj_bias": False,
    }


def _period(numbers: list[int], kind: str, layers: int) -> Config:
    """The inverse of `_by_turns`, where it has one."""
    period = numbers[1] - numbers[0] if len(numbers) > 1 else layers
    return {f"{kind}_period": period, f"{kind}_offset": numbers[0] if numbers else 0}


_HEADS = "attention.head_count_kv"
_GGUF_SIZES = {"inner": "ssm.inner_size", "states": "ssm.state_size", "taps": "ssm.conv_kernel"}
_GGUF_SIZES |= {"rank": "ssm.time_step_rank"}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration: layers of which files say 0 heads of keys are scans, those with a router have
    experts."""
    fields = model.fields
    gguf_fields.refuse_window(fields)
    heads = gguf_fields.heads_by_layer(fields)
    turning = {key: None for key in fields.values if key.startswith("rope.")}  # nothing turns, whatever they say
    plain = replace(model, fields=fields.changed({_HEADS: max([1, *heads]), **turning}))
    config = gguf_fields.read(plain, "jamba", "half", (*HONOURED_GGUF, *_GGUF_SIZES.values(), *turning))
    gguf_fields.check_heads(fields, heads, config["layers"])
    config |= {"positions": "none", "recurrent": [not count for count in heads]}
    config |= scans.read_sizes(fields, _GGUF_SIZES) | {"scan_norms": "weights", "scan_eps": config["norm_eps"]}
    config["conv_bias"] = any(name.endswith(".ssm.conv.bias") for name in model.shapes)
    dense = [n for n in range(config["layers"]) if f"layers.{n}.mlp.router.weight" not in model.shapes]
    if len(dense) < config["layers"]:
        config |= gguf_experts(fields) | _routed(dense, config["ffn"])
    return config


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    unsaid = {"convolutions without a bias": not config.get("conv_bias", True)}
    unsaid["scans that are not twice as wide as the model"] = config["inner"] != 2 * config["width"]
    gguf_fields.refuse_unsaid(config, unsaid)
    keys = scans.sizes_to_hf(config, _GGUF_SIZES)
    keys |= {_HEADS: [0 if scan else config["kv_heads"] for scan in config["recurrent"]]}
    keys |= {"rope.freq_base": None, "rope.dimension_count": None}
    keys |= experts_to_gguf(config if config.get("experts") else {"experts": 1, "experts_per_token": 1})
    return gguf_fields.GgufForm("jamba", "half", keys)
