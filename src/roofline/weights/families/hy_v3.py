"""Files of HY 3, whose router and shared expert have other names in published files than in transformers.

Layers that guess further tokens stand behind the last of the model, and are not read.
"""

import re
from pathlib import Path

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.routed_fields import FURTHER, LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import TensorNames
from roofline.weights.quantised.method import TensorSource

# As published -> as transformers has them, and adapters name them.
_IN_MEMORY = {"router.gate.weight": "gate.weight", "expert_bias": "e_score_correction_bias"}
_IN_MEMORY |= {
    f"shared_mlp.{name}_proj.weight": f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")
}
_PUBLISHED = re.compile(rf"(.+\.mlp\.)({'|'.join(map(re.escape, _IN_MEMORY))})")


def _apart(path: Path, source: TensorSource) -> TensorSource:
    return stacked_experts_apart(path, renamed(source, _as_in_memory))


def _as_in_memory(name: str) -> str:
    match = _PUBLISHED.fullmatch(name)
    return name if match is None else match[1] + _IN_MEMORY[match[2]]


NAMES = TensorNames(
    LAYER,
    bare={"mlp.choice.bias": ("exp_probs_b", "mlp.e_score_correction_bias")},
    hf_apart=_apart,
    hf_further=FURTHER,
)
_DEFAULTS = {
    **{"vocab_size": 120_832, "hidden_size": 4096, "intermediate_size": 13_312, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072},
    **{"moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1},
    **{"router_scaling_factor": 2.826},
}
_KEYS = RouterKeys("num_experts", shared="num_shared_experts", scale="router_scaling_factor")
_ROUTER = GgufRouter(shared="size", dense=False, groups=False)
_OURS: Config = {"qk_norm": True, "score": "sigmoid", "choice_bias": True, "renormalise": True}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. route_norm is of other programs: transformers' weights always add up to 1."""
    fields = routed_fields.with_names(fields, {"num_local_experts": "num_experts"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, {**routed_fields.UNREAD, "route_norm": (True,)})
    routed_fields.pass_further(fields)
    fields.get("enable_moe_fp32_combine", bool)  # in which dtype two sums are added
    honoured = ("attention_bias", "num_experts")
    ours = hf_fields.decoder(fields, "hy_v3", honoured, heads_by_default=False, eps=1e-5, theta=11_158_840.0)
    hf_fields.biases(fields, ours)
    dense = routed_fields.layers_of_kind(fields, ours["layers"], range(1))
    ours = routed_fields.hf_routed(fields, ours, _KEYS, dense)
    return checked(fields, ours | _OURS, routed_fields.MIXED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = routed_fields.routed_to_hf(config, "hy_v3", "HYV3", _KEYS)
    fields |= {"attention_bias": config["attention_bias"], "mlp_bias": False}
    return fields | {"mlp_layer_types": routed_fields.kinds_of_mlps(config)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; layers without experts are those that have an MLP."""
    gguf_fields.refuse_window(model.fields)
    config = routed_fields.gguf_routed(model, "hy_v3", _ROUTER, "half") | {"qk_norm": True}
    dense = [layer for layer in range(config["layers"]) if f"layers.{layer}.mlp.gate.weight" in model.shapes]
    ffn = model.fields.need("feed_forward_length", int)
    return config | ({"dense": dense, "dense_ffn": ffn} if dense else {})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    form = routed_fields.routed_to_gguf({**config, "dense": []}, "hy_v3", _ROUTER, "half")
    gguf_fields.refuse_unsaid(config, {"biases of attention": config["attention_bias"]})
    return gguf_fields.GgufForm("hy_v3", "half", {**form.keys, "expert_shared_count": None})
