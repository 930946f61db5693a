"""Files of DeepSeek-V2 and V3, and of Kimi K2, GLM-4.7-Flash and Mistral 4, which are the latter but for defaults, the
router and what queries are multiplied by.

A layer that guesses further tokens may stand behind the last of the model.
"""

from dataclasses import dataclass, field, replace

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.weights.families import youtu
from roofline.weights.families.shared import gguf_fields, hf_fields, latent_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import EACH_EXPERT, EXPERTS, TAKEN_FOR_EXPERTS
from roofline.weights.families.shared.joined_experts import stacked_experts_apart, stacked_experts_placed
from roofline.weights.families.shared.routed_fields import CHOICE_BIAS, FURTHER, SHARED_EXPERTS, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import GUESSING, MLP, NORMS, TensorNames, TensorPlace
from roofline.weights.files.mapped import JsonObject


def _is_mistral4(config: JsonObject) -> bool:
    """Whether a configuration is written as Mistral 4's, which alone of those with softmax scores has either."""
    return config.get("score", "softmax") != "sigmoid" and bool(config.get("query_beta") or config.get("renormalise"))


def _placed(config: JsonObject, name: str) -> TensorPlace | None:
    """Return the place of a parameter. Transformers reads Mistral 4's experts in the tensors of all of a layer alone,
    those of the other types one by one."""
    return stacked_experts_placed(name) if _is_mistral4(config) else None


NAMES = TensorNames(
    NORMS
    | MLP
    | EXPERTS
    | EACH_EXPERT
    | SHARED_EXPERTS
    | latent_fields.ATTENTION
    | GUESSING
    | {"mlp.router": ("ffn_gate_inp", "mlp.gate")},
    bare=CHOICE_BIAS,
    hf_apart=stacked_experts_apart,
    hf_placed=_placed,
    hf_further=FURTHER,
    hf_guessing_key="num_nextn_predict_layers",
    as_parameters=TAKEN_FOR_EXPERTS,
)


@dataclass(frozen=True)
class _MixtureType:
    """A model_type. name: of transformers' classes; defaults: what these have where a file says nothing; score: of the
    router; norms: whether weights are made to add up to 1 where the file does not say, None: they never are; kinds:
    whether mlp_layer_types says which layers have no experts, instead of first_k_dense_replace."""

    name: str
    defaults: Config
    score: str = "sigmoid"
    norms: bool | None = True
    kinds: bool = False
    neutral: Config = field(default_factory=dict)


# A bias chooses experts where scores are sigmoids. What files say of the router beside what the class reads.
_SIGMOID: Config = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
_SOFTMAX: Config = {"scoring_func": ("softmax",), "moe_layer_freq": (1,)}
_LARGE: Config = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3 = _MixtureType(
    "DeepseekV3",
    {
        **{**_LARGE, "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1},
        **{"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
        **{"n_group": 8, "topk_group": 4, "num_key_value_heads": 128},
    },
    neutral=_SIGMOID,
)
_SARVAM: Config = {"q_lora_rank": None, "n_routed_experts": 128, "n_group": 1, "topk_group": 1}
_SARVAM |= {"first_k_dense_replace": 1, "num_key_value_heads": None}
_TYPES = {
    "deepseek_v2": _MixtureType(
        "DeepseekV2",
        {
            **{**_LARGE, "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2},
            **{"moe_intermediate_size": 1407, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        },
        score="softmax",
        norms=None,
        neutral=_SOFTMAX | {"norm_topk_prob": (False,)},
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "sarvam_mla": replace(_V3, defaults=_V3.defaults | _SARVAM),
    "glm4_moe_lite": _MixtureType(
        "Glm4MoeLite",
        {
            **{**_LARGE, "qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 768, "n_routed_experts": 64},
            **{"num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536},
            **{"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
            **{"num_key_value_heads": 20},
        },
        kinds=True,
        neutral=_SIGMOID,
    ),
    "mistral4": _MixtureType(
        "Mistral4",
        {
            **{**_LARGE, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "q_lora_rank": 1024, "n_routed_experts": 128},
            **{"num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 2048},
            **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
            **{"num_key_value_heads": 32},
        },
        score="softmax",
        neutral=_SOFTMAX,
    ),
}
# auto_map: files of the first days name classes of their own, with this mathematics.
_HONOURED = ("n_routed_experts", "num_experts", "num_local_experts", "auto_map", "partial_rotary_factor")
_SECOND = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
_KEYS = RouterKeys()
_GREEDY, _LIMITED = "greedy", "group_limited_greedy"
_ROUTER = GgufRouter(score="softmax")
_FLASH_LAYERS, _FLASH_VOCAB = (47, 48), 154_880  # of files of GLM-4.7-Flash that do not say the score


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    kind = _TYPES[model_type]
    if model_type == "sarvam_mla":
        fields = _of_sarvam(fields)
    hf_fields.refuse_features(fields, _HONOURED)
    refuse_unless_neutral(fields, kind.neutral)
    fields = routed_fields.with_names(fields, _SECOND)
    fields.get("num_nextn_predict_layers", int, 0)  # their tensors say which these are
    fields = hf_fields.with_defaults(fields, kind.defaults)
    ours = hf_fields.sizes(fields, "deepseek")
    ours |= latent_fields.hf_attention(fields, ours["heads"])
    ours["rope_style"] = "interleaved"
    if model_type != "deepseek_v2":  # which reads no such key
        ours |= latent_fields.hf_style(fields)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours = routed_fields.hf_routed(fields, ours, _KEYS, _dense(fields, kind, ours["layers"]))
    ours["renormalise"] = kind.norms is not None and latent_fields.flag(fields, "norm_topk_prob", kind.norms)
    ours |= {"score": kind.score, "choice_bias": kind.score == "sigmoid"}
    ours = _v2_groups(fields, ours) if kind.norms is None else routed_fields.hf_groups(fields, ours)
    if model_type == "mistral4":
        ours |= latent_fields.hf_scaled_queries(fields, ours)
    else:
        ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields)
    return checked(fields, ours, routed_fields.MIXED | {"head_dim": "qk_nope_head_dim"})


def _of_sarvam(fields: Fields) -> Fields:
    """The fields of Sarvam's published files under DeepSeek-V3's names."""
    changes: Config = {}
    for key in ("head_dim", "q_head_dim"):  # sizes that follow from others, of which transformers takes neither
        fields.values.get(key)
        changes[key] = None
    scaling = fields.get("rope_scaling", dict) or {}
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        plain = {key: value for key, value in scaling.items() if key != "type"}
        changes |= {"rope_parameters": plain | {"rope_type": "yarn"}, "rope_scaling": None}
    return routed_fields.with_names(fields.changed(changes), {"num_shared_experts": "n_shared_experts"})


def _dense(fields: Fields, kind: _MixtureType, layers: int) -> list[int]:
    """The layers without experts."""
    if not kind.kinds:
        return routed_fields.first_layers(fields, "first_k_dense_replace", 0, layers)
    dense = routed_fields.layers_of_kind(fields, layers, [0])
    first = fields.get("first_k_dense_replace", int)
    if first is not None and (len(dense) != first or dense != list(range(len(dense)))):
        fields.refuse("first_k_dense_replace", f"{first} is not read: mlp_layer_types has {dense} without experts")
    return dense


def _v2_groups(fields: Fields, ours: Config) -> Config:
    """The groups of DeepSeek-V2, whose score is that of their best expert."""
    method = fields.get("topk_method", str, _GREEDY)
    if method not in (_GREEDY, _LIMITED):
        reason = "experts are chosen in a way that we do not have"
        raise UnsupportedError(f"{fields.path}: topk_method = {shorten(method)}", reason, (_GREEDY, _LIMITED))
    if method == _GREEDY:
        return ours
    needed = {name: fields.need(name, int) for name in ("n_group", "topk_group")}
    return routed_fields.hf_groups(fields.changed(needed), ours) | {"group_score": "best"}


def to_hf(config: Config) -> Config:
    """The fields of a config.json, of the type that says most of it."""
    if config.get("score", "softmax") == "sigmoid":
        return _sigmoid_to_hf(config)
    if _is_mistral4(config):
        fields = _routed_to_hf(config, "mistral4") | {"head_dim": config["head_dim"], "pad_token_id": None}
        return latent_fields.scaled_queries_to_hf(config, fields)
    groups = routed_fields.groups_to_hf(config) if config.get("groups", 1) > 1 else {}
    method = {"norm_topk_prob": False, "topk_method": _LIMITED if groups else _GREEDY}
    return _routed_to_hf(config, "deepseek_v2") | method | groups


def _sigmoid_to_hf(config: Config) -> Config:
    leading = routed_fields.leading(config)
    fields = _routed_to_hf(config, "deepseek_v3" if leading is not None else "glm4_moe_lite")
    if leading is None:
        del fields["first_k_dense_replace"], fields["head_dim"]
        fields["mlp_layer_types"] = routed_fields.kinds_of_mlps(config)
    return fields | {"num_nextn_predict_layers": 0}


def _routed_to_hf(config: Config, model_type: str) -> Config:
    written = {key: value for key, value in config.items() if key != "rotary_dim"}
    fields = routed_fields.routed_to_hf(written, model_type, _TYPES[model_type].name, _KEYS)
    fields |= latent_fields.attention_to_hf(config) | routed_fields.groups_to_hf(config)
    fields |= {"norm_topk_prob": config.get("renormalise", True), "rope_interleave": config["rope_style"] != "half"}
    return fields | {"first_k_dense_replace": routed_fields.leading(config) or 0}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; a file without experts is Youtu's."""
    fields = latent_fields.gguf_heads(model.fields)
    model = replace(model, fields=fields)
    if "expert_count" not in fields.values:
        return youtu.from_gguf(model, architecture)
    config = routed_fields.gguf_routed(
        model, "deepseek", _router(model, architecture), "interleaved", latent_fields.GGUF_KEYS
    )
    return config | latent_fields.gguf_attention(model, config) | latent_fields.gguf_scaled_queries(fields, config)


def _router(model: gguf_fields.GgufModel, architecture: str) -> GgufRouter:
    is_flash = model.fields.get("block_count", int, 0) in _FLASH_LAYERS
    is_flash = is_flash and model.shapes.get("embed.weight", (0,))[0] == _FLASH_VOCAB
    return replace(_ROUTER, score="sigmoid") if is_flash else _ROUTER


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Queries are multiplied in files of Mistral 4 alone; groups are scored by their best two, and neighbours turned,
    in all of them."""
    scaled = bool(config.get("query_beta"))
    form = routed_fields.routed_to_gguf(config, "mistral4" if scaled else "deepseek2", _ROUTER, "interleaved")
    by_best = config.get("groups", 1) > 1 and config.get("group_score") == "best"
    keys = latent_fields.attention_to_gguf(config)
    gguf_fields.refuse_unsaid(
        config, {"groups chosen by their best expert": by_best, "no shared experts": not config.get("shared_ffn")}
    )
    return replace(form, keys={**form.keys, **keys})
