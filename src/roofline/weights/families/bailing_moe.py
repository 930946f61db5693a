"""Files of Ling 2.0 (GGUF) and of Sarvam, which is the same with whole heads turned: q, k and v are one tensor, one
below the other."""

import re
from pathlib import Path

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.routed_fields import CHOICE_BIAS, LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import JoinedRows, TensorNames
from roofline.weights.quantised.method import TensorSource

# As published -> as transformers has them, and adapters name them.
_IN_MEMORY = {"attention.dense": "self_attn.o_proj", "attention.query_layernorm": "self_attn.q_norm"}
_IN_MEMORY |= {
    "attention.key_layernorm": "self_attn.k_norm",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}
_IN_MEMORY |= {"attention.query_key_value": "self_attn.query_key_value"}
_PUBLISHED = re.compile(rf"(.+\.layers\.\d+\.)({'|'.join(map(re.escape, _IN_MEMORY))})((?:\..+)?)")


def _apart(path: Path, source: TensorSource) -> TensorSource:
    return stacked_experts_apart(path, renamed(source, _as_in_memory))


def _as_in_memory(name: str) -> str:
    match = _PUBLISHED.fullmatch(name)
    if match is None:
        return name.replace("model.word_embeddings.", "model.embed_tokens.", 1)
    return match[1] + _IN_MEMORY[match[2]] + match[3]


def _joined(config: Config) -> dict[str, JoinedRows]:
    q, kv = config["heads"] * config["head_dim"], config["kv_heads"] * config["head_dim"]
    return {"attn.qkv": [("attn.q", range(q)), ("attn.k", range(kv)), ("attn.v", range(kv))]}


NAMES = TensorNames(
    LAYER | {"attn.qkv": ("attn_qkv", "self_attn.query_key_value")},
    bare=CHOICE_BIAS,
    hf_apart=_apart,
    joined=_joined,
    modules_apart=True,
    gguf_joined=("attn.qkv",),
)
_DEFAULTS = {
    **{"vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 19},
    **{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 131_072},
    **{"moe_intermediate_size": 1024, "num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 1},
    **{"routed_scaling_factor": 2.5},
}
_SECOND_NAMES = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
_SECOND_NAMES |= {"num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
_KEYS, _ROUTER = RouterKeys(), GgufRouter(further=True)
_SHARED_SIZE = "expert_shared_feed_forward_length"


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. score_function is of other programs: transformers' scores are sigmoids."""
    fields = hf_fields.with_defaults(routed_fields.with_names(fields, _SECOND_NAMES), _DEFAULTS)
    refuse_unless_neutral(fields, {"score_function": ("sigmoid",), "scoring_func": ("sigmoid",)})
    routed_fields.pass_further(fields)
    honoured = ("use_qk_norm", "n_routed_experts", "auto_map")  # the last: classes of the same mathematics
    ours = hf_fields.decoder(fields, "bailing_moe", honoured, heads_by_default=False, theta=8e6, turned=1.0)
    ours["qk_norm"] = fields.get("use_qk_norm", bool, True)
    first = routed_fields.first_layers(fields, "first_k_dense_replace", 1, ours["layers"])
    ours = routed_fields.hf_routed(fields, ours, _KEYS, first) | {"score": "sigmoid", "choice_bias": True}
    refuse_unless_neutral(fields, {"moe_shared_expert_intermediate_size": (ours["ffn"],)})
    ours["renormalise"] = fields.get("norm_topk_prob", bool, True)
    return checked(fields, routed_fields.hf_groups(fields, ours), routed_fields.MIXED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json of Sarvam."""
    fields = routed_fields.routed_to_hf(config, "sarvam_moe", "SarvamMoE", _KEYS) | routed_fields.groups_to_hf(config)
    fields |= {"use_qk_norm": config["qk_norm"], "norm_topk_prob": config.get("renormalise", True)}
    return fields | {"first_k_dense_replace": routed_fields.leading(config) or 0}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; experts that all tokens go to may have a width of their own."""
    gguf_fields.refuse_window(model.fields)
    config = routed_fields.gguf_routed(model, "bailing_moe", _ROUTER, "half", ("rope.dimension_count",))
    config["shared_ffn"] = (
        config["shared_ffn"] // config["ffn"] * (model.fields.get(_SHARED_SIZE, int, 0) or config["ffn"])
    )
    return config | {"qk_norm": True}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    form = routed_fields.routed_to_gguf(config, "bailingmoe2", _ROUTER, "half")
    unsaid = {"no norms of q and k": not config["qk_norm"], "a head that is the embedding": config["tied"]}
    unsaid["heads together of another width than the model"] = config["heads"] * config["head_dim"] != config["width"]
    gguf_fields.refuse_unsaid(config, unsaid)
    keys = {**form.keys, **gguf_fields.turned_part(config), _SHARED_SIZE: config["ffn"]}
    return gguf_fields.GgufForm(form.architecture, "half", keys)
