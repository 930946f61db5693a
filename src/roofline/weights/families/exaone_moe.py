"""Files of K-EXAONE: experts, and windows and rope by layer as EXAONE 4 has them, with the norms before.

Modules that guess further tokens (`mtp.`) are not read.
"""

from pathlib import Path

from roofline.common.fields import Fields
from roofline.weights.families import exaone4
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import TAKEN_FOR_EXPERTS
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.routed_fields import LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import TensorNames
from roofline.weights.quantised.method import TensorSource


def _apart(path: Path, source: TensorSource) -> TensorSource:
    stacked = stacked_experts_apart(path, source)
    return renamed(stacked, lambda name: name.replace(".mlp.gate.e_score_correction", ".mlp.e_score_correction"))


NAMES = TensorNames(
    LAYER,
    bare={"mlp.choice.bias": ("exp_probs_b.bias", "mlp.e_score_correction_bias")},
    hf_apart=_apart,
    as_parameters=TAKEN_FOR_EXPERTS,
)
_DEFAULTS = {
    **{"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048},
    **{"moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1},
    **{"routed_scaling_factor": 2.5},
}
_KEYS = RouterKeys("num_experts", shared="num_shared_experts")
_ROUTER = GgufRouter(shared="size", further=True)
_PATTERN = 4  # of so many layers of a GGUF file the last one sees everything


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; a window that layer_types gives to no layer still says that none turns."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    routed_fields.pass_further(fields)
    ours = hf_fields.decoder(fields, "exaone_moe", ("num_experts",), heads_by_default=False, eps=1e-5) | {
        "qk_norm": True
    }
    refuse_unless_neutral(fields, {"scoring_func": ("sigmoid",)})
    if fields.values.get("sliding_window", 1) is None:
        fields.refuse("sliding_window", "is null, which transformers does not take for this type")
    exaone4.windows_and_turning(fields, ours)
    first = routed_fields.first_layers(fields, "first_k_dense_replace", 1, ours["layers"])
    dense = routed_fields.layers_of_kind(fields, ours["layers"], first)
    sparse = fields.elements("is_moe_layer", bool)  # of the first files, as is the next
    if sparse is not None and [layer for layer, has in enumerate(sparse) if not has] != dense:
        fields.refuse("is_moe_layer", "is not what mlp_layer_types or first_k_dense_replace says, which is read")
    refuse_unless_neutral(fields, {"first_last_k_dense_replace": (len(dense),)})
    ours = routed_fields.hf_routed(fields, ours, _KEYS, dense) | {"score": "sigmoid", "choice_bias": True}
    ours["renormalise"] = fields.get("norm_topk_prob", bool, True)
    return checked(fields, routed_fields.hf_groups(fields, ours), routed_fields.MIXED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = routed_fields.routed_to_hf(config, "exaone_moe", "ExaoneMoe", _KEYS) | routed_fields.groups_to_hf(config)
    fields |= exaone4.windows_to_hf(config) | {"norm_topk_prob": config.get("renormalise", True)}
    fields["first_k_dense_replace"] = routed_fields.leading(config) or 0
    return fields | {"mlp_layer_types": routed_fields.kinds_of_mlps(config)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; layers without a window turn nothing."""
    fields = model.fields
    config = routed_fields.gguf_routed(model, "exaone_moe", _ROUTER, "half", gguf_fields.WINDOW_KEYS)
    gguf_fields.refuse_other_theta(fields, config)
    window = fields.need("attention.sliding_window", int)
    windows = gguf_fields.windows(fields, window, config["layers"], _PATTERN)
    hf_fields.windows(config, windows)
    return config | {"qk_norm": True, "turning": [bool(each) for each in windows]}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    windows = layer_kinds.window_of_each(config)
    form = routed_fields.routed_to_gguf(config, "exaone-moe", _ROUTER, "half")
    gguf_fields.refuse_unsaid(config, {"no window": not any(windows)})
    keys = {**form.keys, **gguf_fields.window_keys(windows)}
    if (config["rope_scaling"] or {}).get("rope_type", "llama3") == "llama3":  # which is a tensor
        keys["rope.scaling.type"] = "none"
    return gguf_fields.GgufForm(form.architecture, "half", keys)
