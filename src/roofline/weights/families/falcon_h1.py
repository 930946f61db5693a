"""Files of Falcon-H1. GGUF files have no multipliers: their matrices hold the products."""

from collections.abc import Mapping, Sequence

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, scans
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import ATTENTION, TOP, TensorNames

# Ours -> a key of config.json, all of which are 1 where they are not said.
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "logits_multiplier": "lm_head_multiplier",
    "key_multiplier": "key_multiplier",
    "attention_in_multiplier": "attention_in_multiplier",
    "attention_out_multiplier": "attention_out_multiplier",
    "scan_in_multiplier": "ssm_in_multiplier",
    "scan_out_multiplier": "ssm_out_multiplier",
}
_MLP = ("gate_multiplier", "down_multiplier")  # a list of the two in config.json
_PARTS = "part_multipliers"


def without_factors(config: Config) -> Config:
    """The configuration whose matrices hold the products."""
    return {key: value for key, value in config.items() if key not in (*_MULTIPLIERS, *_MLP, _PARTS)}


def gguf_factors(config: Config) -> Mapping[str, Sequence[tuple[int, float]]]:
    """Of each parameter that GGUF files have multiplied: rows, and their factor, one stretch after another."""

    def factor(name: str) -> float:
        return float(config.get(name, 1.0))

    z, x, b, c, steps = (factor("scan_in_multiplier") * float(part) for part in config.get(_PARTS, (1.0,) * 5))
    inner, group = config["inner"], config.get("groups", 1) * config["states"]
    wide, narrow = (config[heads] * config["head_dim"] for heads in ("heads", "kv_heads"))
    before, key = factor("attention_in_multiplier"), factor("key_multiplier")
    return {
        "embed": [(config["vocab"], factor("embedding_multiplier"))],
        "head": [(config["vocab"], factor("logits_multiplier"))],
        "attn.q": [(wide, before)],
        "attn.k": [(narrow, before * key)],
        "attn.v": [(narrow, before)],
        "attn.o": [(config["width"], factor("attention_out_multiplier"))],
        "mlp.gate": [(config["ffn"], factor("gate_multiplier"))],
        "mlp.down": [(config["width"], factor("down_multiplier"))],
        "ssm.z": [(inner, z)],
        "ssm.xbc": [(inner, x), (group, b), (group, c)],
        "ssm.dt": [(config["scan_heads"], steps)],
        "ssm.o": [(config["width"], factor("scan_out_multiplier"))],
    }


NAMES = TensorNames(
    ATTENTION
    | scans.names("mamba")
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        **{f"mlp.{part}": (f"ffn_{part}", f"feed_forward.{part}_proj") for part in ("gate", "up", "down")},
    },
    top=TOP | {"final_norm": ("output_norm", "model.final_layernorm")},
    # Its name has no ending in GGUF files.
    bare=scans.bare_names("mamba") | {"mlp_norm.weight": ("ffn_norm", "pre_ff_layernorm.weight")},
    parted=scans.PARTED,
    joined=scans.joined,
    unadapted=scans.UNADAPTED,
    gguf_joined=scans.JOINED_GGUF,
    gguf_negated=scans.NEGATED,
    gguf_shapes=scans.gguf_shapes,
    gguf_factors=gguf_factors,
    gguf_config=without_factors,
)
_DEFAULTS: dict[str, object] = {"vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336}
_DEFAULTS |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
_DEFAULTS |= {"max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1}
_DEFAULTS |= {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("projectors_bias", "mamba_proj_bias"), (False,)),
    "mamba_use_mlp": (True,),  # of the first files; nobody reads it
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, _NEUTRAL)
    honoured = ("attention_bias", "mlp_bias", "embedding_multiplier")
    ours = hf_fields.decoder(fields, "falcon_h1", honoured, eps=1e-5)
    hf_fields.biases(fields, ours)
    ours |= {"recurrent": [True] * ours["layers"]} | _scans(fields, ours["width"])
    normed, before = fields.get("mamba_rms_norm", bool, False), fields.get("mamba_norm_before_gate", bool, True)
    ours["scan_norm"] = ("before" if before else "behind") if normed else "none"
    for name, key in _MULTIPLIERS.items():
        ours[name] = fields.get(key, float, 1.0)
    gate, down = _list(fields, "mlp_multipliers", 2)
    return checked(
        fields,
        ours | {"gate_multiplier": gate, "down_multiplier": down, _PARTS: _list(fields, "ssm_multipliers", 5)},
        hf_fields.SPELLED,
    )


def _list(fields: Fields, key: str, count: int) -> list[float]:
    values = fields.elements(key, float)
    if values is None:
        return [1.0] * count
    if len(values) != count:
        fields.refuse(key, f"has {len(values)} values, not {count}")
    return [float(value) for value in values]


def _scans(fields: Fields, width: int) -> Config:
    ours = scans.read_sizes(fields, scans.HF_SIZES)
    if fields.values.get("mamba_d_ssm") is None:
        fields = fields.changed({"mamba_d_ssm": scans.expanded(fields, "mamba_expand", width)})
    ours |= scans.read_sizes(fields, {"inner": "mamba_d_ssm"})
    scans.check_sizes(fields, ours, "mamba_n_heads", "mamba_n_groups")
    scans.check_head(fields, ours, "mamba_d_head")
    ours["conv_bias"] = fields.get("mamba_conv_bias", bool, True)
    return ours | scans.step_bounds(fields, "time_step_limit")


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    norm = config.get("scan_norm", "none")
    return hf_fields.to_hf(config, "falcon_h1", "FalconH1") | {
        **scans.sizes_to_hf(config, scans.HF_SIZES),
        **{key: config.get(ours, 1.0) for ours, key in _MULTIPLIERS.items()},
        "mlp_multipliers": [config.get(name, 1.0) for name in _MLP],
        "ssm_multipliers": list(config.get(_PARTS, (1.0,) * 5)),
        "attention_bias": config["attention_bias"],
        "mlp_bias": config.get("mlp_bias", False),
        "mamba_d_ssm": config["inner"],
        "mamba_d_head": config["inner"] // config["scan_heads"],
        "mamba_conv_bias": config.get("conv_bias", True),
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "mamba_rms_norm": norm != "none",
        "mamba_norm_before_gate": norm == "before",
        **scans.step_bounds_to_hf(config, "time_step_limit"),
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters permute no rows."""
    fields = model.fields
    gguf_fields.refuse_window(fields)
    config = gguf_fields.read(model, "falcon_h1", "half", scans.GGUF_HONOURED) | scans.from_gguf(fields)
    config |= {"recurrent": [True] * config["layers"]}
    config["conv_bias"] = "layers.0.ssm.conv.bias" in model.shapes
    config["scan_norm"] = "behind" if "layers.0.ssm.norm.weight" in model.shapes else "none"
    biases = {name.split(".")[3] for name in model.shapes if ".attn." in name and name.endswith(".bias")}
    config |= {"attention_bias": bool({"q", "k", "v"} & biases)} | ({"output_bias": True} if "o" in biases else {})
    return config | ({"mlp_bias": True} if "layers.0.mlp.up.bias" in model.shapes else {})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not, and for what one
    matrix cannot hold twice."""
    plain = all(factor == 1 for stretches in gguf_factors(config).values() for _, factor in stretches)
    biased = config["attention_bias"] or config.get("mlp_bias")
    unsaid = {"a norm before the gate": config.get("scan_norm") == "before", **scans.unsaid(config)}
    unsaid["multipliers, and a head that is the embedding"] = config["tied"] and not plain
    unsaid["multipliers and biases"] = biased and not plain
    gguf_fields.refuse_unsaid(config, unsaid)
    return gguf_fields.GgufForm("falcon-h1", "half", scans.gguf_keys(config))
