"""Files of MiMo-V2-Flash.

Published ones say of layers with a window what transformers takes for granted, in keys of their own: read where they
agree. Modules that guess further tokens (`model.mtp.`) are not read.
"""

from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.routed_fields import CHOICE_BIAS, LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import TensorNames, TensorPlace
from roofline.weights.files.mapped import JsonObject
from roofline.weights.quantised.method import TensorSource

_SINKS, _SINKS_IN_FILES = ".self_attn.sinks.weight", ".self_attn.attention_sink_bias"


def _apart(path: Path, source: TensorSource) -> TensorSource:
    return stacked_experts_apart(path, renamed(source, lambda name: name.replace("attention_sink_bias", "sinks")))


def _placed(config: JsonObject, name: str) -> TensorPlace | None:
    return TensorPlace(name.removesuffix(_SINKS) + _SINKS_IN_FILES) if name.endswith(_SINKS) else None


NAMES = TensorNames(
    LAYER | {"attn.sinks": ("attn_sinks", "self_attn.sinks")},
    bare=CHOICE_BIAS,
    hf_apart=_apart,
    hf_placed=_placed,
    hf_unread=r"model\.mtp\..+",
)
_DEFAULTS = {
    **{"vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 48},
    **{"num_attention_heads": 64, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "head_dim": 192},
    **{"v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707, "moe_intermediate_size": 2048},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8},
}
_THETAS, _TURNED, _PATTERN = (5e6, 1e4), 0.334, 6  # of so many layers the last one sees everything, and the first
_KEYS = RouterKeys(shared="")
_ROUTER = GgufRouter(reads_score=False, norm=True, reads_norm=False, dense=False, shared="", further=True)
_SCALE = "attention.value_scale"
_OURS: Config = {"score": "sigmoid", "choice_bias": True}
_HONOURED = ("attention_bias", "n_routed_experts", "num_local_experts", "attention_chunk_size", "partial_rotary_factor")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; layers with a window have twice the kv heads."""
    fields = routed_fields.with_names(fields, {"num_local_experts": "n_routed_experts"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    hf_fields.refuse_features(fields, _HONOURED)
    ours = hf_fields.sizes(fields, "mimo2")
    ours |= {"kv_heads": hf_fields.kv_heads(fields), "head_dim": hf_fields.head_dim(fields, 192), "qk_norm": False}
    ours |= {"norm_eps": fields.get("rms_norm_eps", float, 1e-5), "value_dim": fields.need("v_head_dim", int)}
    ours["window_kv_heads"] = 2 * ours["kv_heads"]
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours["attention_bias"] = fields.get("attention_bias", bool, False)
    scale = fields.get("attention_value_scale", float)
    ours["value_scale"] = 1.0 if scale is None else scale
    windows = _windows(fields, ours["layers"])
    hf_fields.windows(ours, windows)
    ours |= _ropes(fields, ours["head_dim"])
    dense = routed_fields.layers_of_kind(fields, ours["layers"], range(1))
    ours = routed_fields.hf_routed(fields, ours, _KEYS, dense) | _OURS
    ours["renormalise"] = fields.get("norm_topk_prob", bool, True)
    refuse_unless_neutral(fields, _as_published(ours, windows, dense))
    return checked(fields, routed_fields.hf_groups(fields, ours), routed_fields.MIXED)


def _windows(fields: Fields, layers: int) -> list[int]:
    """The window of each layer; sliding_window_size does not count a token itself."""
    size = fields.get("sliding_window_size", int)
    window = fields.need("sliding_window", int) if size is None else size + 1
    types = hf_fields.layer_types(fields)
    slides = [layer > 0 and (layer + 1) % _PATTERN != 0 for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and window < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    return [window if slide else 0 for slide in slides]


def _ropes(fields: Fields, dim: int) -> Config:
    """The two tables, as transformers takes them: from rope_parameters alone, by kind of layer."""
    by_kind, context = fields.inside("rope_parameters"), fields.need("max_position_embeddings", int)
    tables = []
    for kind, default in zip(layer_kinds.KINDS, _THETAS, strict=True):
        table = by_kind.inside(kind).values if by_kind.values else {"rope_type": "default", "rope_theta": default}
        inner = Fields(fields.path, {"max_position_embeddings": context, "rope_parameters": table})
        inner.inside("rope_parameters").need("rope_theta", float)
        tables.append((*hf_fields.rope(inner, partial=True), hf_fields.turned_part(inner, dim, _TURNED)))
    (theta, scaling, turned), (local_theta, local_scaling, local_turned) = tables
    if local_scaling is not None or turned != local_turned:
        what = f"{fields.path}: rope_parameters.sliding_attention with a scaling, or a part of heads of its own"
        raise UnsupportedError(what, "layers with a window differ in rope_theta alone")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_theta": local_theta} | turned


def _as_published(ours: Config, windows: list[int], dense: list[int]) -> dict[str, tuple[object, ...]]:
    """Keys that transformers does not read, at the values that say what it computes."""
    sizes = {"num_attention_heads": "heads", "num_key_value_heads": "window_kv_heads", "head_dim": "head_dim"}
    keys: dict[str, tuple[object, ...]] = {f"swa_{theirs}": (ours[name],) for theirs, name in sizes.items()}
    keys |= {"swa_v_head_dim": (ours["value_dim"],), "swa_rope_theta": (ours["local_theta"],)}
    keys |= {"rope_theta": (ours["rope_theta"],), "rope_scaling": (), "layernorm_epsilon": (ours["norm_eps"],)}
    turned = ours.get("rotary_dim", ours["head_dim"])
    keys["partial_rotary_factor"] = (_TURNED, turned / ours["head_dim"])
    keys["hybrid_layer_pattern"] = ([int(bool(window)) for window in windows],)
    keys["moe_layer_freq"] = ([int(layer not in dense) for layer in range(ours["layers"])],)
    keys |= {"add_swa_attention_sink_bias": (True,), "add_full_attention_sink_bias": (False,)}
    keys |= {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_shared_experts": (0,)}
    largest = max(windows)
    return keys | {"attention_projection_layout": ("split",), "attention_chunk_size": (largest, largest - 1)}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = routed_fields.routed_to_hf(config, "mimo_v2_flash", "MiMoV2Flash", _KEYS)
    fields = layer_kinds.nested_ropes(fields, config) | routed_fields.groups_to_hf(config)
    factor = (config.get("rotary_dim") or config["head_dim"]) / config["head_dim"]
    for table in fields["rope_parameters"].values():
        table["partial_rotary_factor"] = factor
    fields.pop("partial_rotary_factor", None)
    windows = layer_kinds.window_of_each(config)
    fields |= {"v_head_dim": config["value_dim"], "attention_value_scale": config.get("value_scale", 1.0)}
    fields |= {"sliding_window": max(windows) or 129, "layer_types": layer_kinds.kinds_of_layers(windows)}
    fields |= {"attention_bias": config["attention_bias"], "norm_topk_prob": config.get("renormalise", True)}
    return fields | {"mlp_layer_types": routed_fields.kinds_of_mlps(config)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; kv heads by layer, and layers without experts by their tensors."""
    fields, count = model.fields, "attention.head_count_kv"
    layers = fields.need("block_count", int) - fields.get("nextn_predict_layers", int, 0)
    slides = (fields.elements(gguf_fields.WINDOW_KEYS[0], bool) or [])[:layers]
    heads = (fields.elements(count, int) or [])[:layers]
    if len(slides) != layers or len(heads) != layers:
        fields.refuse(count, f"and {gguf_fields.WINDOW_KEYS[0]} do not have a value for each of {layers} layers")
    by_kind = {kind: {n for n, slide in zip(heads, slides, strict=True) if slide == kind} for kind in (False, True)}
    if any(len(counts) > 1 for counts in by_kind.values()):
        raise UnsupportedError(f"{fields.path}: {fields.within}{count}", "layers with a window have as many, or all do")
    kv_heads, window_heads = (min(by_kind[kind] or by_kind[not kind]) for kind in (False, True))
    changed = fields.changed({count: kv_heads, gguf_fields.WINDOW_KEYS[0]: slides})
    refuse_unless_neutral(fields, {"expert_weights_scale": (0.0, 1.0)})  # which llama.cpp does not read here
    honoured = (*gguf_fields.WINDOW_KEYS, _SCALE, "attention.value_length", "rope.dimension_count")
    uniform = gguf_fields.GgufModel(changed, model.shapes, model.rope_factors, model.longrope)
    config = routed_fields.gguf_routed(uniform, "mimo2", _ROUTER, "half", honoured) | _OURS
    dense = [layer for layer in range(layers) if f"layers.{layer}.mlp.router.weight" not in model.shapes]
    config |= {"dense": dense, "dense_ffn": fields.need("feed_forward_length", int)} if dense else {}
    config |= {"window_kv_heads": window_heads, "value_dim": fields.need("attention.value_length", int)}
    config |= {"value_scale": fields.get(_SCALE, float, 0.0) or 1.0, "attention_bias": biased(model, *_qkv())}
    config["local_theta"] = fields.get("rope.freq_base_swa", float, config["rope_theta"])
    window = fields.need("attention.sliding_window", int)
    hf_fields.windows(config, [window if slide else 0 for slide in slides])
    return config


def _qkv() -> tuple[str, ...]:
    return "attn.q", "attn.k", "attn.v"


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    form = routed_fields.routed_to_gguf({**config, "dense": []}, "mimo2", _ROUTER, "half")
    windows = layer_kinds.window_of_each(config)
    gguf_fields.refuse_unsaid(
        config,
        {"no window": not any(windows), "weights of experts that are scaled": config.get("routed_scale", 1.0) != 1.0},
    )
    heads = [config["window_kv_heads"] if window else config["kv_heads"] for window in windows]
    keys = {**form.keys, **gguf_fields.window_keys(windows), **gguf_fields.turned_part(config)}
    keys |= {"attention.head_count_kv": heads, "attention.value_length": config["value_dim"]}
    keys |= {"rope.freq_base_swa": config["local_theta"], _SCALE: config.get("value_scale", 1.0)}
    keys["feed_forward_length"] = config.get("dense_ffn") or config["ffn"]
    return gguf_fields.GgufForm(form.architecture, "half", keys)
