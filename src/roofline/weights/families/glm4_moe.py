"""Files of GLM-4.5 to 4.7, of the text part of GLM-4.5V and 4.6V, which is the same (see `qwen`), and of Solar Open,
which has neither norms of q and k nor dense layers.

A layer that guesses further tokens may stand behind the last of the model.
"""

from roofline.common.fields import Fields
from roofline.weights.families.llama import biased
from roofline.weights.families.qwen import MROPE
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import TAKEN_FOR_EXPERTS
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.routed_fields import CHOICE_BIAS, FURTHER, LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import GUESSING, TensorNames

NAMES = TensorNames(
    LAYER | GUESSING | {"mlp_norm": ("post_attention_norm", "post_attention_layernorm")},
    bare=CHOICE_BIAS,
    hf_apart=stacked_experts_apart,
    hf_further=FURTHER,
    hf_guessing_key="num_nextn_predict_layers",
    as_parameters=TAKEN_FOR_EXPERTS,
)
_GLM, _VISION, _SOLAR = "glm4_moe", "glm4v_moe_text", "solar_open"
_DEFAULTS: dict[str, Config] = {
    _GLM: {
        **{"vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
        **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5},
    },
    _VISION: {
        **{"vocab_size": 151_424, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 65_536},
        **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5},
        "attention_bias": True,
    },
    _SOLAR: {
        **{"vocab_size": 196_608, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072},
        **{"moe_intermediate_size": 1280, "num_experts_per_tok": 8},
    },
}
_KEYS = RouterKeys()
_ROUTER = GgufRouter(further=True)
_HONOURED = ("attention_bias", "use_qk_norm", "n_routed_experts")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; attention_bias is of q, k and v alone."""
    fields = routed_fields.with_names(fields, {"num_local_experts": "n_routed_experts"})
    defaults = _DEFAULTS[model_type] | {"n_routed_experts": 128, "n_shared_experts": 1}
    fields = hf_fields.with_defaults(fields, defaults)
    without: dict[str, tuple[object, ...]] = {} if model_type == _GLM else {"use_qk_norm": (False,)}
    without |= {"first_k_dense_replace": (0,)} if model_type == _SOLAR else {}
    refuse_unless_neutral(fields, {"scoring_func": ("sigmoid",), **without})
    if fields.values.get("partial_rotary_factor") is None:  # null is no factor
        fields = fields.changed({"partial_rotary_factor": 1.0})
    heads = fields.need("num_attention_heads", int)
    if "head_dim" not in fields.values and heads > 0:  # rounded down, as transformers does
        fields = fields.changed({"head_dim": fields.need("hidden_size", int) // heads})
    if model_type == _SOLAR:  # whose layers all have experts
        fields = fields.changed({"intermediate_size": fields.need("moe_intermediate_size", int)})
    for table in ("rope_parameters", "rope_scaling") if model_type == _VISION else ():
        plain = {key: value for key, value in fields.inside(table).values.items() if key not in MROPE}
        fields = fields.changed({table: plain or None})
    theta = 1e6 if model_type == _SOLAR else 1e4
    routed_fields.pass_further(fields)
    ours = hf_fields.decoder(fields, _GLM, _HONOURED, heads_by_default=False, eps=1e-5, theta=theta, turned=1.0)
    ours["attention_bias"] = fields.get("attention_bias", bool, False)
    ours["qk_norm"] = model_type == _GLM and fields.get("use_qk_norm", bool, False)
    first = routed_fields.first_layers(
        fields, "first_k_dense_replace", 0 if model_type == _SOLAR else 1, ours["layers"]
    )
    ours = routed_fields.hf_routed(fields, ours, _KEYS, first) | {"score": "sigmoid", "choice_bias": True}
    ours["renormalise"] = fields.get("norm_topk_prob", bool, True)
    return checked(fields, routed_fields.hf_groups(fields, ours), routed_fields.MIXED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json of GLM, which say what those of Solar Open do."""
    fields = routed_fields.routed_to_hf(config, _GLM, "Glm4Moe", _KEYS) | routed_fields.groups_to_hf(config)
    fields.setdefault("partial_rotary_factor", 1.0)
    fields["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    fields |= {"attention_bias": config["attention_bias"], "use_qk_norm": config["qk_norm"]}
    fields |= {"norm_topk_prob": config.get("renormalise", True), "num_nextn_predict_layers": 0}
    return fields | {"first_k_dense_replace": routed_fields.leading(config) or 0}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    honoured = ("rope.dimension_count", "rope.dimension_sections")  # the second is of pictures
    config = routed_fields.gguf_routed(model, _GLM, _ROUTER, "half", honoured)
    qk_norm = "layers.0.attn.q_norm.weight" in model.shapes
    return config | {"attention_bias": biased(model, "attn.q", "attn.k", "attn.v"), "qk_norm": qk_norm}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """A part of each head may be turned."""
    form = routed_fields.routed_to_gguf(config, "glm4moe", _ROUTER, "half")
    return form and gguf_fields.GgufForm(form.architecture, "half", {**form.keys, **gguf_fields.turned_part(config)})
