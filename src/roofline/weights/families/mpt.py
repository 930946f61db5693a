"""Files of MPT: config.json with its own names, LLM Foundry's and transformers', and GGUF files.

Of what LLM Foundry can switch on, honoured is what has the same mathematics here; the rest is refused by name.
"""

from collections.abc import Mapping
from fractions import Fraction

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields
from roofline.weights.families.shared.canonical import Config, checked, checked_rope_scaling, refuse_unless_neutral
from roofline.weights.families.shared.gguf_fields import GgufModel
from roofline.weights.families.shared.hf_fields import refuse_features
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    layer={
        "attn_norm": ("attn_norm", "norm_1"),
        "attn.qkv": ("attn_qkv", "attn.Wqkv"),
        "attn.o": ("attn_output", "attn.out_proj"),
        "mlp_norm": ("ffn_norm", "norm_2"),
        "mlp.gate": ("", "ffn.gate"),
        "mlp.up": ("ffn_up", "ffn.up_proj"),
        "mlp.down": ("ffn_down", "ffn.down_proj"),
    },
    top={
        "embed": ("token_embd", "transformer.wte"),
        "positions": ("position_embd", "transformer.wpe"),
        "final_norm": ("output_norm", "transformer.norm_f"),
        "head": ("output", "lm_head"),
    },
    hf_layers="transformer.blocks",
    hf_prefix="transformer.",
)

ALIBI_BIAS_MAX = 8  # of the slope of the last head, as a power of 1/2
_ALIBI = "attention.max_alibi_bias"  # of GGUF files
REQUIRED = {"d_model": "width", "n_layers": "layers", "n_heads": "heads", "vocab_size": "vocab"}
_SPELLED = {ours: theirs for theirs, ours in REQUIRED.items()} | {
    "max_position": "max_seq_len",
    "norm_eps": "layer_norm_epsilon",
    "ffn": "expansion_ratio",
    "kv_heads": "attn_config.kv_n_heads",
    "rope_theta": "attn_config.rope_theta",
}
# What transformers (names of all its models) and LLM Foundry (`norm_eps`) call some of them.
_OTHER_SPELLINGS = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
_OTHER_SPELLINGS |= {"norm_eps": "norm_eps"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("logit_scale", "block_overrides"), ()),
    "norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "use_pad_tok_in_ffn": (True,),
    "quantization_config": (),
}
_NEUTRAL_ATTENTION: dict[str, tuple[object, ...]] = {
    "attn_type": ("multihead_attention", "grouped_query_attention", "multiquery_attention"),
    **dict.fromkeys(("clip_qkv", "softmax_scale", "attn_logit_softcapping", "kv_dim", "attn_temperature_tuning"), ()),
    **dict.fromkeys(("prefix_lm", "qk_ln", "qk_gn", "attn_uses_sequence_id"), (False,)),
    "fused_qkv": (True,),
    "sliding_window_size": (-1,),
    "alibi_bias_max": (ALIBI_BIAS_MAX,),
}
_ROPE_IMPLS = ("dail", "hf")
_NEUTRAL_DAIL: dict[str, tuple[object, ...]] = {"type": ("original",), "pos_idx_in_fp32": (True,)}
_FFN_KEYS = ("ffn_type", "ffn_hidden_size", "ffn_act_fn", "fc_type")
_NEUTRAL_FFN: dict[str, tuple[object, ...]] = {"ffn_type": ("mptmlp", "mptglu")}
# What LLM Foundry calls an activation of torch.nn.functional, with its arguments -> ours.
ACTIVATIONS: dict[str, dict[str, object]] = {
    "gelu": {"name": "gelu", "approximate": "none"},
    "gelu_tanh": {"name": "gelu", "approximate": "tanh"},
    "silu": {"name": "silu"},
    "relu": {"name": "relu"},
}


def from_gguf(model: GgufModel, architecture: str) -> Config:
    """The canonical configuration: ALiBi where the files name its largest slope's exponent, else learned positions."""
    fields, learned = model.fields, "positions.weight" in model.shapes
    gguf_fields.refuse_rope(fields)
    gguf_fields.refuse_window(fields)
    config = gguf_fields.read(model, "mpt", "half", (_ALIBI,), gguf_fields.EPSILON)
    bias = fields.get(_ALIBI, float, 0.0)
    if bias != (0.0 if learned else ALIBI_BIAS_MAX):
        what = f"{fields.path}: {fields.within}{_ALIBI} = {bias}{' beside learned positions' if learned else ''}"
        raise UnsupportedError(what, f"there are learned positions, or it is {ALIBI_BIAS_MAX}")
    return config | {"positions": "learned" if learned else "alibi", "bias": biased(model, "attn.qkv")}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """How a file says a configuration: the kind of the norm and the activation are no keys, but of the architecture."""
    gguf_fields.refuse_unsaid(
        config,
        {"rope": config["positions"] == "rope", "RMS norms": config.get("rms"), "a gated MLP": config.get("gated")},
    )
    keys = dict.fromkeys(("rope.dimension_count", "rope.freq_base"))
    alibi = ALIBI_BIAS_MAX if config["positions"] == "alibi" else 0
    return gguf_fields.GgufForm("mpt", "half", {**keys, _ALIBI: float(alibi)}, gguf_fields.EPSILON)


def from_hf(fields: Fields, model_type: str = "mpt") -> Config:
    """The canonical configuration of a parsed config.json. Raises ConfigError, UnsupportedError naming the field."""
    refuse_features(fields, ("auto_map",))  # of what it names, the code is known
    attention = fields.inside("attn_config")
    refuse_unless_neutral(fields, _NEUTRAL)
    _check_code(fields)
    refuse_unless_neutral(attention, _NEUTRAL_ATTENTION)
    ours: Config = {"family": "mpt", "rope_style": "half"}
    for key, name in REQUIRED.items():
        ours[name] = fields.need(key, int)
        if ours[name] < 1:
            fields.refuse(key, f"{describe(ours[name])} is not at least 1")
    width, heads = ours["width"], ours["heads"]
    if width % heads:
        fields.refuse("n_heads", f"{heads} heads do not divide d_model={width}")
    ours |= {"kv_heads": _kv_heads(attention, heads), "head_dim": width // heads} | _mlp(fields, width)
    if "rms" in fields.get("norm_type", str, "").lower():
        ours["rms"] = True
    ours["max_position"] = fields.get("max_seq_len", int, 2048)
    ours["norm_eps"] = fields.get("layer_norm_epsilon", float, fields.get("norm_eps", float, 1e-5))
    ours["tied"] = fields.get("tie_word_embeddings", bool, True)
    ours["bias"] = not fields.get("no_bias", bool, True)
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": None}
    ours["positions"] = _positions(fields, attention)
    ours |= _rope(attention)
    _refuse_other_spellings(fields, ours)
    sized = fields.inside("ffn_config").get("ffn_hidden_size", int) is not None
    return checked(fields, ours, _SPELLED | ({"ffn": "ffn_config.ffn_hidden_size"} if sized else {}))


def _check_code(fields: Fields) -> None:
    """auto_map may name LLM Foundry's own classes, whose mathematics this is."""
    for key, name in fields.inside("auto_map").values.items():
        if str(name).rpartition(".")[2] not in ("MPTConfig", "MPTForCausalLM"):
            what = f"{fields.path}: auto_map.{shorten(key)} = {shorten(str(name))}"
            raise UnsupportedError(what, "we do not run code of files", ["MPTConfig", "MPTForCausalLM"])


def _positions(fields: Fields, attention: Fields) -> str:
    """transformers computes ALiBi whatever the file says; LLM Foundry reads these, and its files have all of them.

    Rotary positions and ALiBi each stand instead of learned ones, whatever learned_pos_emb says.
    """
    learned, rope = fields.get("learned_pos_emb", bool, True), attention.get("rope", bool, False)
    alibi = attention.get("alibi", bool, not rope)
    if alibi and rope:
        raise UnsupportedError(
            f"{fields.path}: attn_config.alibi beside attn_config.rope", "we have one of them at once"
        )
    if alibi or rope:
        return "alibi" if alibi else "rope"
    if not learned:
        raise UnsupportedError(
            f"{fields.path}: an MPT without positions",
            "it needs attn_config.rope, attn_config.alibi or learned_pos_emb",
        )
    return "learned"


def _kv_heads(attention: Fields, heads: int) -> int:
    """How many heads of k and v there are, which attn_type says, and for grouped queries kv_n_heads."""
    kind = attention.get("attn_type", str, "multihead_attention")
    if kind == "grouped_query_attention":
        return attention.need("kv_n_heads", int)
    implied = 1 if kind == "multiquery_attention" else heads
    if attention.get("kv_n_heads", int, implied) != implied:
        attention.refuse(
            "kv_n_heads", f"{attention.values['kv_n_heads']} is not the {implied} that attn_type {kind} has"
        )
    return implied


def _rope(attention: Fields) -> Config:
    """rope_theta and rope_scaling: LLM Foundry reads rope_dail_config or rope_hf_config, as rope_impl says."""
    if not attention.get("rope", bool, False):
        return {"rope_theta": 1e4, "rope_scaling": None}
    impl = attention.get("rope_impl", str, "dail")
    if impl not in _ROPE_IMPLS:
        raise UnsupportedError(
            f"{attention.path}: attn_config.rope_impl {shorten(impl)!r}", "unknown here", _ROPE_IMPLS
        )
    refuse_unless_neutral(attention.inside("rope_dail_config"), _NEUTRAL_DAIL)
    hf = attention.inside("rope_hf_config")
    kind = hf.get("type", str, "no_scaling")
    if impl == "dail" and kind != "no_scaling":
        hf.refuse("type", f"{shorten(kind)} is read with rope_impl: hf alone")
    scaling = checked_rope_scaling(hf, "none" if kind == "no_scaling" else kind)
    return {"rope_theta": attention.get("rope_theta", float, 1e4), "rope_scaling": scaling}


def _mlp(fields: Fields, width: int) -> Config:
    """ffn and, where they are not those of ModelConfig, gated and activation."""
    ffn = fields.inside("ffn_config")
    refuse_unless_neutral(ffn, _NEUTRAL_FFN)
    refuse_unless_neutral(ffn, dict.fromkeys(set(ffn.values) - set(_FFN_KEYS), ()))
    if ffn.values.get("fc_type", "torch") not in ("torch", {"name": "torch"}):
        raise UnsupportedError(
            f"{ffn.path}: ffn_config.fc_type {describe(ffn.values['fc_type'])}", "unknown here", ["torch"]
        )
    size, ratio = ffn.get("ffn_hidden_size", int), fields.get("expansion_ratio", float, 4.0)
    if size is None and (not 0 < ratio < 1 << 16 or ratio * width != int(ratio * width)):
        fields.refuse("expansion_ratio", f"{ratio!r} times {width} is not a whole number")
    ours: Config = {"ffn": int(ratio * width) if size is None else size}
    if ffn.get("ffn_type", str) == "mptglu":
        ours["gated"] = True
    activation = _activation(ffn.get("ffn_act_fn", dict, ACTIVATIONS["gelu"]), ffn)
    return ours | ({} if activation == "gelu" else {"activation": activation})


def _activation(function: Mapping[str, object], ffn: Fields) -> str:
    """Our name of a function of torch.nn.functional and its arguments."""
    default = {"approximate": "none"} if function.get("name") == "gelu" else {}
    name = next((ours for ours, theirs in ACTIVATIONS.items() if theirs == default | dict(function)), None)
    if name is None:
        what = f"{ffn.path}: ffn_config.ffn_act_fn = {shorten(str(dict(function)))}"
        raise UnsupportedError(what, "we do not have it", [str(theirs) for theirs in ACTIVATIONS.values()])
    return name


def _refuse_other_spellings(fields: Fields, ours: Config) -> None:
    """Refuse a file that says something twice, and not the same: its readers would not agree on the model."""
    for key, name in _OTHER_SPELLINGS.items():
        value = fields.get(key, float)
        if value is not None and value != ours[name]:
            fields.refuse(key, f"{value!r} is not the {ours[name]!r} that {_SPELLED[name]} says")


def to_hf(config: Config) -> Config:
    """LLM Foundry's names; transformers' own MPT has neither rope nor grouped queries, gated MLPs or RMS norms."""
    positions, ratio = config["positions"], Fraction(config["ffn"], config["width"])
    attention: dict[str, object] = {"alibi": positions == "alibi", "alibi_bias_max": 8}
    if config["kv_heads"] != config["heads"]:
        attention |= {"attn_type": "grouped_query_attention", "kv_n_heads": config["kv_heads"]}
    if positions == "rope":
        attention |= {"rope": True, "rope_theta": config["rope_theta"]} | _rope_to_hf(config)
    fields: dict[str, object] = {"norm_type": "low_precision_rmsnorm"} if config.get("rms") else {}
    if config.get("gated") or config.get("activation", "gelu") != "gelu":
        kind, activation = "mptglu" if config.get("gated") else "mptmlp", config.get("activation", "gelu")
        ffn = {"ffn_type": kind, "ffn_hidden_size": config["ffn"], "ffn_act_fn": ACTIVATIONS[activation]}
        fields["ffn_config"] = ffn
    return fields | {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        **{theirs: config[ours] for theirs, ours in REQUIRED.items()},
        "expansion_ratio": ratio.numerator if ratio.denominator == 1 else float(ratio),
        "max_seq_len": config["max_position"],
        "no_bias": not config["bias"],
        "learned_pos_emb": positions == "learned",
        "layer_norm_epsilon": config["norm_eps"],
        "attn_config": attention,
    }


def _rope_to_hf(config: Config) -> dict[str, object]:
    """What LLM Foundry calls the scaling of rope. Raises ConfigError where it has none such."""
    scaling = dict(config["rope_scaling"] or {"rope_type": "no_scaling"})
    kind = scaling.pop("rope_type")
    if kind not in ("no_scaling", "linear", "llama3") or config["rope_style"] != "half":
        what = f"rope scaling {kind!r} with rope_style {config['rope_style']!r}"
        raise ConfigError(f"an mpt model with {what} has no config.json that others read")
    return {"rope_impl": "dail" if kind == "no_scaling" else "hf", "rope_hf_config": {"type": kind, **scaling}}
