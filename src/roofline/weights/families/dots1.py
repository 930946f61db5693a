"""Files of dots.llm1."""

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import TAKEN_FOR_EXPERTS
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.routed_fields import CHOICE_BIAS, LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(LAYER, bare=CHOICE_BIAS, hf_apart=stacked_experts_apart, as_parameters=TAKEN_FOR_EXPERTS)
_DEFAULTS = {
    **{"vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048},
    **{"moe_intermediate_size": 1408},
}
_KEYS = RouterKeys()
_ROUTER = GgufRouter()
_WINDOW, _FIRST = 4096, 62  # of transformers: the window, and the first layer that has it


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. The first files call their scores, which are sigmoids, by how they choose."""
    fields = routed_fields.with_names(fields, {"num_local_experts": "n_routed_experts"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, {"scoring_func": ("sigmoid", "noaux_tc")})
    ours = hf_fields.decoder(fields, "dots1", ("attention_bias", "n_routed_experts"))
    hf_fields.biases(fields, ours)
    ours["qk_norm"] = True
    hf_fields.windows(ours, _windows(fields, ours["layers"]))
    first = routed_fields.first_layers(fields, "first_k_dense_replace", 0, ours["layers"])
    ours = routed_fields.hf_routed(fields, ours, _KEYS, first) | {"score": "sigmoid", "choice_bias": True}
    ours["renormalise"] = fields.get("norm_topk_prob", bool, False)
    return checked(fields, routed_fields.hf_groups(fields, ours), routed_fields.MIXED)


def _windows(fields: Fields, layers: int) -> list[int]:
    """The window of each layer: of those from max_window_layers on, or as layer_types says."""
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else _WINDOW)
    first, types = fields.get("max_window_layers", int, _FIRST), hf_fields.layer_types(fields)
    slides = [window is not None and layer >= first for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and (window or 0) < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    return [window if slide and window else 0 for slide in slides]


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = routed_fields.routed_to_hf(config, "dots1", "Dots1", _KEYS) | routed_fields.groups_to_hf(config)
    windows = layer_kinds.window_of_each(config)
    fields |= {"attention_bias": config["attention_bias"], "norm_topk_prob": config.get("renormalise", True)}
    fields |= {"sliding_window": max(windows) or None, "layer_types": layer_kinds.kinds_of_layers(windows)}
    return fields | {"first_k_dense_replace": routed_fields.leading(config) or 0}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    return routed_fields.gguf_routed(model, "dots1", _ROUTER, "half") | {"qk_norm": True}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    unsaid = {"windows": any(layer_kinds.window_of_each(config)), "biases of attention": config["attention_bias"]}
    gguf_fields.refuse_unsaid(config, unsaid | {"grouped heads": config["kv_heads"] != config["heads"]})
    return routed_fields.routed_to_gguf(config, "dots1", _ROUTER, "half")
