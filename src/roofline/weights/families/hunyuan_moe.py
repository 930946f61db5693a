"""Files of Hunyuan with experts."""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, has_type
from roofline.weights.families import hunyuan
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import TAKEN_FOR_EXPERTS, hf_experts
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.routed_fields import LAYER, GgufRouter
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    LAYER
    | hunyuan.QK_NORMS
    | {"mlp.router": ("ffn_gate_inp", "mlp.gate.wg")}
    | {f"mlp.shared.{name}": (f"ffn_{name}_shexp", f"mlp.shared_mlp.{name}_proj") for name in ("gate", "up", "down")},
    hf_apart=stacked_experts_apart,
    as_parameters=TAKEN_FOR_EXPERTS,
)
_DEFAULTS = {
    **{"vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "num_experts": 1, "moe_topk": 1},
}
# What published files say beside these, and transformers does not read: its models have what these say.
_NEUTRAL: dict[str, tuple[object, ...]] = routed_fields.UNREAD | {
    **{"use_qk_norm": (True,), "use_cla": (False,), "use_mixed_mlp_moe": (True,), "moe_layer_num_skipped": (0,)},
    "scoring_func": ("softmax",),
}
_HONOURED = ("attention_bias", "use_qk_norm", "num_experts", "auto_map")  # the last: classes of the same mathematics
_ROUTER = GgufRouter(
    "softmax", reads_score=False, norm=True, reads_norm=False, dense=False, shared="size", groups=False
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; a number of each layer is one for all."""
    names = {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}
    fields = hf_fields.with_defaults(routed_fields.with_names(fields, names), _DEFAULTS)
    for key in ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert"):
        fields = _alike(fields, key)
    refuse_unless_neutral(fields, _NEUTRAL | {"num_shared_expert": (1,)})
    ours = hunyuan.decoder(fields, "hunyuan_moe", _HONOURED) | {"qk_norm": True, "renormalise": True}
    ours |= hf_experts(fields, "num_experts", "moe_topk") | {"shared_ffn": ours["ffn"]}
    refuse_unless_neutral(fields, {"moe_intermediate_size": (ours["ffn"],)})
    return checked(fields, ours, hf_fields.SPELLED)


def _alike(fields: Fields, key: str) -> Fields:
    if not has_type(fields.values.get(key), list):
        return fields
    values = fields.elements(key, int) or []
    if len(set(values)) != 1:
        raise UnsupportedError(f"{fields.path}: {key} that differs between layers", "our layers are all alike")
    return fields.changed({key: values[0]})


def to_hf(config: Config) -> Config:
    """The fields of a config.json, with the lists that other programs read."""
    fields = hf_fields.to_hf(config, "hunyuan_v1_moe", "HunYuanMoEV1") | {"num_experts": config["experts"]}
    each = {"moe_topk": config["experts_per_token"], "moe_intermediate_size": config["ffn"], "num_shared_expert": 1}
    fields |= {key: [value] * config["layers"] for key, value in each.items()}
    return fields | {"attention_bias": config["attention_bias"]}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    config = routed_fields.gguf_routed(model, "hunyuan_moe", _ROUTER, "half")
    return config | {"qk_norm": True, "shared_ffn": config["shared_ffn"] or config["ffn"]}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    other = config["shared_ffn"] != config["ffn"]
    unsaid = {"biases of attention": config["attention_bias"], "a shared expert of another width": other}
    gguf_fields.refuse_unsaid(config, unsaid)
    return routed_fields.routed_to_gguf(config, "hunyuan-moe", _ROUTER, "half")
