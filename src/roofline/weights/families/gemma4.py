"""Files of Gemma 4 (text).

Norms are whole in both kinds of files. Layers that read the keys and values of others have matrices for them in
published files, which nobody reads. GGUF's have a tensor of what the frequencies of rope are divided by in layers
without a window: 1 where they turn, a number beyond all positions where they do not.
"""

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import Fields, describe, has_type, refuse, shorten
from roofline.ops.rope_tables import PROPORTIONAL
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds
from roofline.weights.families.shared.canonical import Config, check_integer, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    HONOURED_GGUF,
    MOST_CHOSEN,
    MOST_EXPERTS,
    expert_size,
    experts_to_gguf,
    gguf_experts,
)
from roofline.weights.families.shared.tensor_names import (
    ATTENTION,
    MLP,
    POST_NORMS,
    QK_NORMS,
    TOP,
    JoinedRows,
    TensorNames,
    layer_part,
)
from roofline.weights.files.mapped import JsonObject

# Of all layers together, and of each layer, what it takes in beside the rows of the one before.
LAYER_INPUTS_TOP = {
    "layer_embed": ("per_layer_token_embd", "model.embed_tokens_per_layer"),
    "layer_projection": ("per_layer_model_proj", "model.per_layer_model_projection"),
    "layer_projection_norm": ("per_layer_proj_norm", "model.per_layer_projection_norm"),
}
LAYER_INPUTS = {
    "input.gate": ("inp_gate", "per_layer_input_gate"),
    "input.o": ("proj", "per_layer_projection"),
    "input_norm": ("post_norm", "post_per_layer_input_norm"),
}
LAYER = (
    ATTENTION
    | QK_NORMS
    | MLP
    | POST_NORMS
    | LAYER_INPUTS
    | {"attn_norm": ("attn_norm", "input_layernorm"), "mlp_norm": ("ffn_norm", "pre_feedforward_layernorm")}
)
_ROUTED = {
    "mlp.experts.gate": ("ffn_gate_exps", "experts.gate_proj"),
    "mlp.experts.up": ("ffn_up_exps", "experts.up_proj"),
    "mlp.router": ("ffn_gate_inp", "router.proj"),
    "mlp.dense_norm": ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    "mlp.experts_norm": ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    "mlp.experts_post_norm": ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
}


def joined(config: Config) -> dict[str, JoinedRows]:
    """The gates and ups of each expert in turn: so Hugging Face's files have them, and GGUF's may."""
    experts, ffn = config.get("experts", 0), config.get("expert_ffn", 0)
    rows = [(f"mlp.experts.{name}", range(n * ffn, (n + 1) * ffn)) for n in range(experts) for name in ("gate", "up")]
    return {"mlp.experts.gate_up": rows} if experts else {}


def shares_keys(config: JsonObject, name: str) -> bool:
    """Whether a parameter is one of the keys and values of a layer that reads those of another one."""
    before, part = layer_part(name)
    shared = ("attn.k", "attn.v", "attn.k_norm", "attn.v_norm")
    return part in shared and int(before.split(".")[1]) >= config["layers"] - config["sharing_layers"]


NAMES = TensorNames(
    LAYER | _ROUTED,
    top=TOP | LAYER_INPUTS_TOP,
    bare={
        "mlp.router_norm.weight": ("ffn_gate_inp.scale", "router.scale"),
        "mlp.expert_scale.weight": ("ffn_down_exps.scale", "router.per_expert_scale"),
        "mlp.experts.gate_up.weight": ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
        "mlp.experts.down.weight": ("ffn_down_exps.weight", "experts.down_proj"),
        "scalar.weight": ("layer_output_scale.weight", "layer_scalar"),
    },
    joined=joined,
    gguf_joined=("mlp.experts.gate_up",),
    experts_module="experts",
    stacked=("mlp.experts.gate_up", "mlp.experts.down"),
    spare=shares_keys,
)
_HONOURED = ("hidden_act", "hidden_activation", "final_logit_softcapping", "num_experts", "per_layer_config")
_UNIFIED = "gemma4_unified_text"
_SIZES: dict[str, object] = {
    **{"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}
_DEFAULTS = {
    "gemma4_text": _SIZES
    | {
        **{"max_position_embeddings": 131_072, "sliding_window": 512, "hidden_size_per_layer_input": 256},
        "vocab_size_per_layer_input": 262_144,
    },
    _UNIFIED: _SIZES | {"max_position_embeddings": 262_144, "sliding_window": 1024},
}
_INPUTS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_PATTERN = 6  # of so many layers the last one sees everything
_GLOBAL_DIM = 512
_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
_TURNED = 0.25
_FAR = 1e30  # what a frequency is divided by that turns nothing


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS[model_type])
    hf_fields.refuse_features(fields, _HONOURED)
    refuse_unless_neutral(fields, {"hidden_activation": ("gelu_pytorch_tanh",)})
    if model_type == _UNIFIED:  # transformers has neither for this type
        refuse_unless_neutral(fields, {"enable_moe_block": (False,), _INPUTS[0]: (0,)})
    ours = hf_fields.sizes(fields, "gemma4")
    ours |= {"kv_heads": hf_fields.kv_heads(fields), "head_dim": hf_fields.head_dim(fields, 256)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, True)
    ours |= {"attention_bias": False, "qk_norm": True}
    windows = _windows(fields, ours["layers"])
    hf_fields.windows(ours, windows)
    ours["keys_as_values"] = fields.get("attention_k_eq_v", bool, False)
    ours |= _global_heads(fields, ours, windows)
    ours["sharing_layers"] = sharing_of(
        fields, "num_kv_shared_layers", fields.get("num_kv_shared_layers", int, 0), windows
    )
    ours["wide_sharing"] = fields.get("use_double_wide_mlp", bool, False)
    ours["logit_cap"] = cap_of(fields, "final_logit_softcapping")
    if model_type != _UNIFIED:
        ours |= layer_inputs(fields, *_INPUTS)
        ours |= _experts(fields) if fields.get("enable_moe_block", bool, False) else {}
    ours |= _ropes(fields)
    return checked(fields, ours, hf_fields.SPELLED)


def _windows(fields: Fields, layers: int) -> list[int]:
    """The window of each layer; the last one has none, whatever layer_types says, as transformers has it."""
    window = fields.need("sliding_window", int)
    types = hf_fields.layer_types(fields)
    slides = [(layer + 1) % _PATTERN != 0 for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    slides[-1] = False
    if any(slides) and window < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    return [window if slide else 0 for slide in slides]


def _global_heads(fields: Fields, ours: Config, windows: list[int]) -> Config:
    """Heads of layers without a window: in older files by keys of their own, in newer ones layer by layer."""
    heads, by_layer = ours["kv_heads"], fields.get("per_layer_config", dict)
    if by_layer is None:
        dim = fields.get("global_head_dim", int, _GLOBAL_DIM)
        kv_heads = fields.get("num_global_key_value_heads", int)
        # Transformers leaves the second aside where values have a matrix of their own.
        read = {"head_dim": dim, "num_key_value_heads": kv_heads if kv_heads and ours["keys_as_values"] else heads}
    else:
        read = _of_layers(fields.inside("per_layer_config"), ours, windows)
    for key, name in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
        check_integer(fields, name, {"head_dim": "head_dim"}.get(key, "kv_heads"), read[key])
    if read["head_dim"] % 2 or ours["heads"] % read["num_key_value_heads"]:
        fields.refuse("global_head_dim", f"{read} of layers without a window do not fit {ours['heads']} heads")
    return {"global_head_dim": read["head_dim"], "global_kv_heads": read["num_key_value_heads"]}


def _of_layers(by_layer: Fields, ours: Config, windows: list[int]) -> dict[str, int]:
    """What per_layer_config says of all layers without a window alike. Raises UnsupportedError on anything else."""
    plain = {"head_dim": ours["head_dim"], "num_key_value_heads": ours["kv_heads"]}
    keys = {int(key): key for key in by_layer.values if key.isascii() and key.isdigit()}  # transformers writes "05"
    if len(keys) < len(by_layer.values) or any(layer >= len(windows) for layer in keys):
        raise ConfigError(f"{by_layer.path}: per_layer_config has keys that are no numbers of layers, each once")
    shapes: list[dict[str, int]] = []
    for layer, window in enumerate(windows):
        changes = by_layer.inside(keys.get(layer, str(layer)))
        read = {key: changes.get(key, int, value) for key, value in plain.items()}
        new = next((key for key in changes.values if key not in plain), None)
        if new is not None or (window and read != plain):
            what = f"{changes.path}: {changes.within}{shorten(new or 'head_dim')}"
            raise UnsupportedError(what, "of layers heads alone may differ, those without a window from the others")
        shapes += [] if window else [read]
    if any(read != shapes[0] for read in shapes):
        raise UnsupportedError(f"{by_layer.path}: per_layer_config", "layers without a window are all alike")
    return shapes[0]


def sharing_of(fields: Fields, key: str, sharing: int, windows: list[int]) -> int:
    """How many last layers read what others wrote; each kind of them needs one that writes."""
    if not 0 <= sharing < len(windows):
        fields.refuse(key, f"{describe(sharing)} of {len(windows)} layers")
    kinds = [window > 0 for window in windows]
    if sharing and set(kinds[: len(kinds) - sharing]) != set(kinds):
        fields.refuse(key, f"{describe(sharing)} leaves no layer of a kind before those that share")
    return sharing


def cap_of(fields: Fields, key: str) -> float:
    """A cap of logits, 0 for none. Raises ConfigError."""
    value = fields.get(key, float, 0.0)
    if value < 0 or (value == 0 and fields.values.get(key) is not None):
        fields.refuse(key, f"{describe(value)} is not above 0; null is no cap")
    return value


def layer_inputs(fields: Fields, width: str, vocab: str) -> Config:
    """The width of what each layer takes in, and the rows of its table; width, vocab: what the file calls them."""
    size = fields.get(width, int, 0)
    if not size:
        return {}
    rows = fields.need(vocab, int)
    check_integer(fields, width, "width", size)
    check_integer(fields, vocab, "vocab", rows)
    return {"layer_width": size, "layer_vocab": rows}


def _experts(fields: Fields) -> Config:
    experts, top = fields.need("num_experts", int), fields.need("top_k_experts", int)
    if not 1 <= experts <= MOST_EXPERTS:
        fields.refuse("num_experts", f"{describe(experts)} is not from 1 to {MOST_EXPERTS}")
    if not 1 <= top <= min(experts, MOST_CHOSEN):
        fields.refuse("top_k_experts", f"{describe(top)} is not from 1 to {min(experts, MOST_CHOSEN)}")
    return {"experts": experts, "experts_per_token": top, "expert_ffn": expert_size(fields, "moe_intermediate_size")}


def _ropes(fields: Fields) -> Config:
    """The tables of both kinds of layers. Keys beside them, of older types, are read by nobody."""
    refuse_unless_neutral(fields, {"rope_scaling": (), "rope_theta": ()})
    if fields.get("rope_parameters", dict) is None:
        full = {"rope_type": PROPORTIONAL, "partial_rotary_factor": _TURNED, "rope_theta": _THETAS["full_attention"]}
        fields = fields.changed({"rope_parameters": {"full_attention": full}})
    full_table = fields.inside("rope_parameters").inside("full_attention")
    if full_table.get("rope_type", str) != PROPORTIONAL:
        return layer_kinds.ropes_by_kind(fields, 1e4, 1e4)
    plain = {"rope_type": "default", "rope_theta": full_table.get("rope_theta", float, 1e4)}
    tables = {**fields.get("rope_parameters", dict, {}), "full_attention": plain}
    ropes = layer_kinds.ropes_by_kind(fields.changed({"rope_parameters": tables}), 1e4, 1e4)
    readable = ("rope_type", "rope_theta", "partial_rotary_factor", "factor")
    new = next((key for key in full_table.values if key not in readable), None)
    if new is not None:
        what = f"{fields.path}: {full_table.within}{shorten(new)}"
        raise UnsupportedError(what, "we do not know what it does to the mathematics")
    part, factor = full_table.get("partial_rotary_factor", float, 1.0), full_table.positive("factor")
    if not 0 <= part <= 1:
        full_table.refuse("partial_rotary_factor", f"{describe(part)} is not from 0 to 1")
    scaling = {"rope_type": PROPORTIONAL, "partial_rotary_factor": part} | ({"factor": factor} if factor else {})
    return ropes | {"rope_scaling": scaling}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "gemma4_text", "Gemma4")
    del fields["hidden_act"]
    windows = layer_kinds.window_of_each(config)
    fields = layer_kinds.nested_ropes(fields, config)
    heads = {"head_dim": config["global_head_dim"], "num_key_value_heads": config["global_kv_heads"]}
    if config["global_kv_heads"] != config["kv_heads"] and not config.get("keys_as_values"):
        fields["per_layer_config"] = {str(layer): heads for layer, window in enumerate(windows) if not window}
    if config.get("experts"):
        fields |= {"enable_moe_block": True, "num_experts": config["experts"]}
        fields |= {"top_k_experts": config["experts_per_token"], "moe_intermediate_size": config["expert_ffn"]}
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": config["global_head_dim"],
        "num_global_key_value_heads": config["global_kv_heads"],
        "attention_k_eq_v": config.get("keys_as_values", False),
        "num_kv_shared_layers": config.get("sharing_layers", 0),
        "use_double_wide_mlp": config.get("wide_sharing", False),
        "hidden_size_per_layer_input": config.get("layer_width", 0),
        "vocab_size_per_layer_input": config.get("layer_vocab") or config["vocab"],
        "final_logit_softcapping": config.get("logit_cap") or None,
        "sliding_window": max(windows) or 1,
        "layer_types": layer_kinds.kinds_of_layers(windows),
    }


_SWA = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
_CAP, _SHARING, _EXPERT_FFN = "final_logit_softcapping", "attention.shared_kv_layers", "expert_feed_forward_length"
_LAYER_WIDTH = "embedding_length_per_layer_input"
_LLAMA_CPP_CAP = 30.0  # of files that say none; 0 is no cap
_HONOURED_GGUF = (*_SWA, _CAP, _SHARING, _EXPERT_FFN, _LAYER_WIDTH, *HONOURED_GGUF, *gguf_fields.WINDOW_KEYS)
_BY_LAYER = ("feed_forward_length", "attention.head_count_kv")


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. Keys of heads are those of layers without a window, but for those that end in
    "swa"."""
    fields, layers = model.fields, model.fields.need("block_count", int)
    check_integer(fields, "block_count", "layers", layers)
    windows = gguf_fields.windows(fields, fields.need("attention.sliding_window", int), layers, _PATTERN)
    sharing = sharing_of(fields, _SHARING, fields.get(_SHARING, int, 0), windows)
    ffns, kv_heads = (_by_layer(fields, key, layers) for key in _BY_LAYER)
    slides = [window > 0 for window in windows]
    of_kinds = {
        kind: {kv for kv, slide in zip(kv_heads, slides, strict=True) if slide is kind} for kind in (True, False)
    }
    wide = [ffns[0] * (2 if layer >= layers - sharing else 1) for layer in range(layers)]
    if any(len(kinds) > 1 for kinds in of_kinds.values()) or (ffns != wide and len(set(ffns)) > 1):
        what = f"{fields.path}: {fields.within}{' or '.join(_BY_LAYER)}"
        raise UnsupportedError(what, "they differ among layers otherwise than this family's")
    dim, vocab = fields.need("attention.key_length", int), model.shapes.get("layer_embed.weight", (0,))[0]
    local = {_SWA[0]: fields.get(_SWA[0], int, dim)}
    for key, size in {_SWA[1]: local[_SWA[0]], _SWA[2]: local[_SWA[0]], "attention.value_length": dim}.items():
        if fields.get(key, int, size) != size:
            raise UnsupportedError(
                f"{fields.path}: {fields.within}{key}", f"it differs from the head's dimension {size}"
            )
    local_keys: Config = {
        "feed_forward_length": ffns[0],
        "attention.head_count_kv": next(iter(of_kinds[True]), kv_heads[0]),
    }
    local_keys |= {"attention.key_length": local[_SWA[0]], "attention.value_length": local[_SWA[0]]}
    local_keys |= {"rope.dimension_count": local[_SWA[0]], "attention.sliding_window": None}
    config = gguf_fields.read(
        gguf_fields.with_fields(model, fields.changed(local_keys)), "gemma4", "half", _HONOURED_GGUF
    )
    hf_fields.windows(config, windows)
    config |= {"qk_norm": True, "global_head_dim": dim, "global_kv_heads": next(iter(of_kinds[False]), kv_heads[0])}
    config |= {"sharing_layers": sharing, "wide_sharing": ffns == wide and len(set(ffns)) > 1}
    full = next((layer for layer, window in enumerate(windows) if not window), None)
    config["keys_as_values"] = full is not None and f"layers.{full}.attn.v.weight" not in model.shapes
    config["scales_layers"] = "layers.0.scalar.weight" in model.shapes
    config["logit_cap"] = fields.get(_CAP, float, _LLAMA_CPP_CAP)
    if config["logit_cap"] < 0:
        fields.refuse(_CAP, f"{describe(config['logit_cap'])} is below 0")
    width = fields.get(_LAYER_WIDTH, int, 0)
    config |= {"layer_width": width, "layer_vocab": vocab} if width else {}
    if fields.get("expert_count", int, 0):
        config |= gguf_experts(fields) | {"expert_ffn": expert_size(fields, _EXPERT_FFN)}
    config["local_theta"] = fields.positive("rope.freq_base_swa") or _THETAS["sliding_attention"]
    return config | {"rope_scaling": _of_factors(fields, model.rope_factors, dim, config["rope_scaling"])}


def _by_layer(fields: Fields, key: str, layers: int) -> list[int]:
    """A number for each layer, of a list or of one number for all."""
    if not has_type(fields.values.get(key), list):
        return [fields.need(key, int)] * layers
    values = fields.elements(key, int) or []
    if len(values) != layers:
        fields.refuse(key, f"has {len(values)} values for {layers} layers")
    return values


def _of_factors(fields: Fields, factors: np.ndarray | None, dim: int, scaling: Config | None) -> Config | None:
    """The scaling of layers without a window whose pairs turn up to some of them, and not from there on."""
    if factors is None:
        return scaling
    turned = int((factors == 1).sum())
    turns = factors.shape == (dim // 2,) and bool((factors[:turned] == 1).all() and (factors[turned:] >= 1e20).all())
    if not turns or scaling is not None:
        reason = f"is not {dim // 2} numbers of which the first ones are 1 and the others stop the turning"
        refuse(fields.path, gguf_fields.GGUF_ROPE_FACTORS, reason)
    return {"rope_type": PROPORTIONAL, "partial_rotary_factor": 2 * turned / dim} if turned < dim // 2 else None


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """llama.cpp has no layers of this architecture without their factor, nor scalings beside the turned part."""
    windows = layer_kinds.window_of_each(config)
    scaling = config["rope_scaling"] or {}
    gguf_fields.refuse_unsaid(
        config, {"a factor of rope": scaling.get("factor", 1.0) != 1.0, "no window": not any(windows)}
    )
    dims = (config["global_head_dim"], config["head_dim"])
    kv_heads = (config["global_kv_heads"], config["kv_heads"])
    ffns = [config["ffn"]] * config["layers"]
    for layer in range(config["layers"] - config.get("sharing_layers", 0), config["layers"]):
        ffns[layer] *= 2 if config.get("wide_sharing") else 1
    keys: Config = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), dims[0])
    keys |= dict.fromkeys(_SWA, dims[1])
    keys |= {
        "attention.head_count_kv": [kv_heads[window > 0] for window in windows]
        if len(set(kv_heads)) > 1
        else kv_heads[0]
    }
    keys |= {
        "feed_forward_length": ffns if len(set(ffns)) > 1 else ffns[0],
        "rope.freq_base_swa": config["local_theta"],
    }
    keys |= {_SHARING: config.get("sharing_layers", 0), _LAYER_WIDTH: config.get("layer_width", 0)}
    keys |= gguf_fields.window_keys(windows) | {_CAP: float(config.get("logit_cap", 0.0))}
    if config.get("experts"):
        keys |= experts_to_gguf(config) | {_EXPERT_FFN: config["expert_ffn"]}
    gguf_fields.refuse_unsaid(config, {"rope that is scaled": scaling and scaling["rope_type"] != PROPORTIONAL})
    turned = int(scaling.get("partial_rotary_factor", 1.0) * dims[0] // 2)
    factors = np.array([1.0] * turned + [_FAR] * (dims[0] // 2 - turned), np.float32)  # llama.cpp asks for them
    return gguf_fields.GgufForm("gemma4", "half", keys, rope_factors=factors)
