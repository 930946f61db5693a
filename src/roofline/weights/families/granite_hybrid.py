"""Files of Granite 4. A model whose layers all attend, and turn, is Granite's, dense or with experts, by other names.

Hugging Face's files call an MLP, where there are no experts, what they call the shared expert beside some.
"""

from dataclasses import replace

from roofline.common.fields import Fields
from roofline.weights.families import bamba, granite, granite_moe
from roofline.weights.families.shared import gguf_fields, hf_fields, scans
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    HONOURED_GGUF,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.tensor_names import MLP, JoinedRows


def joined(config: Config) -> dict[str, JoinedRows]:
    """The rows of our parameters in the tensors of a layer."""
    if config.get("experts") or not config.get("ffn"):
        return granite_moe.joined(config) | scans.joined(config)
    rows, width = range(config["ffn"]), range(config["width"])
    gate_up: JoinedRows = [("mlp.gate", rows), ("mlp.up", rows)]
    return {"mlp.shared.gate_up": gate_up, "mlp.shared.down": [("mlp.down", width)]} | scans.joined(config)


NAMES = replace(
    granite_moe.NAMES,
    layer=MLP | granite_moe.LAYER | scans.names("mamba"),
    bare=scans.bare_names("mamba"),
    parted=scans.PARTED,
    joined=joined,
    gguf_joined=scans.JOINED_GGUF,
    gguf_negated=scans.NEGATED,
    gguf_shapes=scans.gguf_shapes,
)
_DEFAULTS = granite_moe.DEFAULTS | {"shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1}
_DEFAULTS |= {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
# Names of before -> today's; today's stand for themselves.
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; layers turn q and k where position_embedding_type says "rope"."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    kinds = fields.get("layers_block_type", list) or fields.get("layer_types", list)
    layers = fields.need("num_hidden_layers", int)
    if kinds is None:
        kinds = ["linear_attention"] * min(layers, 1 << 14)
    today = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    fields = fields.changed({"layer_types": today})
    types = hf_fields.layer_types(fields, ("full_attention", "linear_attention")) or []
    turns = fields.get("position_embedding_type", str) == "rope"
    experts = fields.need("num_local_experts", int)
    shared = expert_size(fields, "shared_intermediate_size")
    if turns and "linear_attention" not in types:
        if experts:
            return granite_moe.from_hf(fields, "granitemoeshared")
        return checked(fields.changed({}), _dense(fields, "granite", shared), hf_fields.SPELLED)
    if experts:
        ours = granite.decoder(fields, "granite_hybrid", ("num_local_experts",))
        ours |= hf_experts(fields, "num_local_experts") | {"shared_ffn": shared}
    else:
        ours = _dense(fields, "granite_hybrid", shared)
    ours |= {"positions": "rope" if turns else "none", "recurrent": [kind == "linear_attention" for kind in types]}
    return checked(fields, ours | scans.hf_scans(fields, ours["width"]), hf_fields.SPELLED)


def _dense(fields: Fields, family: str, ffn: int) -> Config:
    """The configuration of a model without experts."""
    fields = fields.changed({"intermediate_size": ffn, "num_local_experts": None, "mlp_bias": None})
    return granite.decoder(fields, family)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "granitemoehybrid", "GraniteMoeHybrid")
    experts = config.get("experts", 0)
    return fields | {
        **{key: config[key] for key in granite.MULTIPLIERS},
        **scans.sizes_to_hf(config, scans.HF_SIZES),
        "attention_bias": config["attention_bias"],
        "num_local_experts": experts,
        "num_experts_per_tok": config.get("experts_per_token", 0),
        "shared_intermediate_size": config["shared_ffn"] if experts else config["ffn"],
        "position_embedding_type": "rope" if config.get("positions", "rope") == "rope" else "nope",
        "layer_types": ["linear_attention" if scan else "full_attention" for scan in config["recurrent"]],
        "mamba_expand": scans.expansion(config),
        "mamba_d_head": config["inner"] // config["scan_heads"],
        "mamba_conv_bias": config.get("conv_bias", True),
        "mamba_proj_bias": False,
        **scans.step_bounds_to_hf(config, "time_step_limit"),
    }


_HEADS, _TURNS = "attention.head_count_kv", "rope.scaling.finetuned"
_GGUF = (*HONOURED_GGUF, *scans.GGUF_HONOURED, granite_moe.SHARED, _TURNS)


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration: layers of which files say 0 heads of keys are scans, and by its name
    rope.scaling.finetuned says whether the others turn. Converters permute the rows of q and k."""
    if bamba.is_bamba(model):
        return bamba.from_gguf(model, architecture)
    fields = model.fields
    heads = gguf_fields.heads_by_layer(fields)
    turns = fields.get(_TURNS, bool, True)
    plain = replace(model, fields=fields.changed({_HEADS: max([1, *heads]), _TURNS: None}))
    config = granite.decoder_from_gguf(plain, "granite_hybrid", _GGUF)
    gguf_fields.check_heads(fields, heads, config["layers"])
    config |= {"positions": "rope" if turns else "none", "recurrent": [not count for count in heads]}
    config |= scans.from_gguf(fields) | {"conv_bias": any(".ssm.conv.bias" in name for name in model.shapes)}
    for name in ("attention_bias", "output_bias"):
        parts = ("q", "k", "v") if name == "attention_bias" else ("o",)
        if any(shape.endswith(tuple(f".attn.{part}.bias" for part in parts)) for shape in model.shapes):
            config[name] = True
    if fields.get("expert_count", int, 0):
        config |= gguf_experts(fields) | {"shared_ffn": granite_moe.shared_size(fields, granite_moe.SHARED)}
    else:
        refuse_unless_neutral(fields, {granite_moe.SHARED: (0, config["ffn"])})
    return config


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    unsaid = {"no scan": not any(config["recurrent"]), **scans.unsaid(config)}
    unsaid["scans that are not twice as wide as the model"] = config["inner"] != 2 * config["width"]
    gguf_fields.refuse_unsaid(config, unsaid)
    keys = granite.multiplier_keys(config) | scans.gguf_keys(config)
    keys |= {_HEADS: [0 if scan else config["kv_heads"] for scan in config["recurrent"]]}
    keys |= {_TURNS: config.get("positions", "rope") == "rope"}
    if config.get("experts"):
        keys |= experts_to_gguf(config) | {granite_moe.SHARED: config["shared_ffn"]}
    return gguf_fields.GgufForm("granitehybrid", "interleaved", keys)
