"""Files of Qwen3-Next: as those of Qwen3.5 (see `qwen3_5`), but Hugging Face's have the rows of q, k, v and z of one
key head after the other in one tensor, and those of b and a likewise."""

from dataclasses import replace

from roofline.common.fields import Fields
from roofline.weights.families import qwen3_5
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import TAKEN_FOR_EXPERTS
from roofline.weights.families.shared.tensor_names import JoinedRows

_TYPE = "qwen3_next"
_DEFAULTS = {
    **{"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32_768},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10},
    **{"num_experts": 512},
}


def joined(config: Config) -> dict[str, JoinedRows]:
    """The rows of our parameters in the tensors of a layer."""
    if not config.get("key_heads"):
        return {}
    keys, dim = config["key_heads"], config["key_dim"]
    group = config["value_heads"] // keys
    values = group * config["value_dim"]  # rows of the value heads of a key head
    qkvz: list[tuple[str, range]] = []
    ba: list[tuple[str, range]] = []
    for head in range(keys):
        for first in (head * dim, (keys + head) * dim):
            qkvz.append(("linear.qkv", range(first, first + dim)))
        first = 2 * keys * dim + head * values
        qkvz.append(("linear.qkv", range(first, first + values)))
        qkvz.append(("linear.z", range(head * values, (head + 1) * values)))
        ba += [(name, range(head * group, (head + 1) * group)) for name in ("linear.b", "linear.a")]
    return {"linear.qkvz": qkvz, "linear.ba": ba}


NAMES = replace(
    qwen3_5.NAMES,
    layer=qwen3_5.LAYER
    | {"linear.qkvz": ("ssm_in", "linear_attn.in_proj_qkvz"), "linear.ba": ("ssm_ba", "linear_attn.in_proj_ba")},
    joined=joined,
    hf_guessing_key="",
    gguf_joined=("linear.ba",),
    gguf_tiles=False,
    as_parameters=TAKEN_FOR_EXPERTS,
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)})
    experts = fields.values.get("num_experts") != 0
    ours = qwen3_5.hybrid(fields, _TYPE, experts)
    if experts:
        ours["renormalise"] = fields.get("norm_topk_prob", bool, True)
    return checked(fields, ours, hf_fields.SPELLED | ({"ffn": "moe_intermediate_size"} if experts else {}))


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = qwen3_5.hybrid_to_hf(config, _TYPE, "Qwen3Next") | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if not config.get("experts"):
        return fields | {"num_experts": 0}
    return fields | {"norm_topk_prob": config.get("renormalise", True)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    return qwen3_5.hybrid_from_gguf(model, _TYPE, experts=True)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """llama.cpp has the architecture with experts alone."""
    gguf_fields.refuse_unsaid(config, {"no experts": not config.get("experts")})
    return qwen3_5.hybrid_to_gguf(config, "qwen3next", {})
