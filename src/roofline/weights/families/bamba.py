"""Files of Bamba. In GGUF files it is Granite 4 without multipliers whose layers turn."""

from dataclasses import replace

from roofline.common.fields import Fields
from roofline.weights.families.granite import GGUF_MULTIPLIERS
from roofline.weights.families.shared import gguf_fields, hf_fields, scans
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import ATTENTION, TOP, TensorNames

NAMES = TensorNames(
    ATTENTION
    | scans.names("mamba")
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "mlp_norm": ("ffn_norm", "pre_ff_layernorm"),
        **{f"mlp.{part}": (f"ffn_{part}", f"feed_forward.{part}_proj") for part in ("gate", "up", "down")},
    },
    top=TOP | {"final_norm": ("output_norm", "model.final_layernorm")},
    bare=scans.bare_names("mamba"),
    parted=scans.PARTED,
    joined=scans.joined,
    gguf_joined=scans.JOINED_GGUF,
    gguf_negated=scans.NEGATED,
    gguf_shapes=scans.gguf_shapes,
)
_DEFAULTS: dict[str, object] = {"vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336}
_DEFAULTS |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
_DEFAULTS |= {"max_position_embeddings": 262_144, "mamba_n_heads": 128, "mamba_n_groups": 1}
_DEFAULTS |= {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_TURNED, _ROTARY = 0.5, "attn_rotary_emb"
_BIASES = ("attention_bias", "mlp_bias")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. A partial_rotary_factor counts inside rope_parameters alone; attn_rotary_emb, which
    transformers does not read and other programs do, has to say the same."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS).changed({"partial_rotary_factor": None})
    ours = hf_fields.decoder(fields, "bamba", _BIASES, eps=1e-5, turned=_TURNED)
    hf_fields.biases(fields, ours)
    turned = ours.get("rotary_dim") or ours["head_dim"]
    refuse_unless_neutral(fields, {_ROTARY: (turned,), **dict.fromkeys(("layer_types", "layers_block_type"), ())})
    attending = fields.elements("attn_layer_indices", int) or []
    beyond = next((layer for layer in attending if not 0 <= layer < ours["layers"]), None)
    if beyond is not None:
        fields.refuse("attn_layer_indices", f"{beyond} is not the number of one of {ours['layers']} layers")
    ours["recurrent"] = [layer not in attending for layer in range(ours["layers"])]
    return checked(fields, ours | scans.hf_scans(fields, ours["width"]), hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    turned = config.get("rotary_dim") or config["head_dim"]
    fields = hf_fields.to_hf({**config, "rotary_dim": turned}, "bamba", "Bamba")
    return fields | {
        **scans.sizes_to_hf(config, scans.HF_SIZES),
        "attention_bias": config["attention_bias"],
        "mlp_bias": config.get("mlp_bias", False),
        "attn_layer_indices": [layer for layer, scan in enumerate(config["recurrent"]) if not scan],
        _ROTARY: turned,
        "mamba_expand": scans.expansion(config),
        "mamba_d_head": config["inner"] // config["scan_heads"],
        "mamba_conv_bias": config.get("conv_bias", True),
        "mamba_proj_bias": False,
        **scans.step_bounds_to_hf(config, "time_step_limit"),
    }


_HEADS, _TURNS, _DIMENSIONS = "attention.head_count_kv", "rope.scaling.finetuned", "rope.dimension_count"


def is_bamba(model: gguf_fields.GgufModel) -> bool:
    """Whether a file of the architecture granitehybrid is Bamba's: scans beside attention that turns, no experts, and
    no multiplier, all of which Granite's files have."""
    fields = model.fields
    turns, scanned = fields.get(_TURNS, bool, True), 0 in gguf_fields.heads_by_layer(fields)
    multiplied = any(fields.get(key, float, 0.0) for key in GGUF_MULTIPLIERS)
    return turns and scanned and not multiplied and not fields.get("expert_count", int, 0)


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. Rows that turn together lie beside each other."""
    fields = model.fields
    gguf_fields.refuse_window(fields)
    heads = gguf_fields.heads_by_layer(fields)
    plain = replace(model, fields=fields.changed({_HEADS: max([1, *heads]), _TURNS: None}))
    honoured = (*scans.GGUF_HONOURED, *GGUF_MULTIPLIERS, _DIMENSIONS, "expert_shared_feed_forward_length")
    config = gguf_fields.read(plain, "bamba", "interleaved", honoured)
    gguf_fields.check_heads(fields, heads, config["layers"])
    refuse_unless_neutral(fields, {"expert_shared_feed_forward_length": (0, config["ffn"])})
    config |= {"recurrent": [not count for count in heads]} | scans.from_gguf(fields)
    config["conv_bias"] = any(name.endswith(".ssm.conv.bias") for name in model.shapes)
    biases = {".".join(name.split(".")[2:4]) for name in model.shapes if name.endswith(".bias")}
    config["attention_bias"] = bool({"attn.q", "attn.k", "attn.v"} & biases)
    config |= {"output_bias": True} if "attn.o" in biases else {}
    return config | ({"mlp_bias": True} if "mlp.up" in biases else {})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    unsaid = {"no scan": not any(config["recurrent"]), **scans.unsaid(config)}
    unsaid["scans that are not twice as wide as the model"] = config["inner"] != 2 * config["width"]
    gguf_fields.refuse_unsaid(config, unsaid)
    keys = scans.gguf_keys(config) | gguf_fields.turned_part(config) | {_TURNS: True}
    keys |= {_HEADS: [0 if scan else config["kv_heads"] for scan in config["recurrent"]]}
    return gguf_fields.GgufForm("granitehybrid", "interleaved", keys)
