"""Files of MiniMax-M2, whose tensors of experts have the names of Mixtral's."""

import re
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields
from roofline.weights.families import mixtral
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import hf_experts
from roofline.weights.families.shared.joined_experts import renamed
from roofline.weights.families.shared.routed_fields import GgufRouter
from roofline.weights.families.shared.tensor_names import QK_NORMS, TensorNames
from roofline.weights.quantised.method import TensorSource

_IN_MEMORY = re.compile(r"(.+)\.mlp\.e_score_correction_bias")


def _apart(path: Path, source: TensorSource) -> TensorSource:
    published = renamed(source, lambda name: _IN_MEMORY.sub(r"\1.block_sparse_moe.e_score_correction_bias", name))
    return mixtral.experts_as_published(path, published)


NAMES = TensorNames(
    {**mixtral.NAMES.layer, **QK_NORMS},
    bare={"mlp.choice.bias": ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias")},
    hf_apart=_apart,
)
_DEFAULTS = {
    **{"vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62},
    **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608},
    **{"num_local_experts": 256, "num_experts_per_tok": 8},
}
# Of published files, which transformers does not read: its models have what these say.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **{"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "use_routing_bias": (True,)},
    **{"shared_intermediate_size": (0,), **routed_fields.UNREAD},
}
_HONOURED = ("num_local_experts", "num_experts", "use_qk_norm", "auto_map")  # the last: classes of this mathematics
_OURS: Config = {"qk_norm": True, "wide_qk_norm": True, "score": "sigmoid", "choice_bias": True, "renormalise": True}
_ROUTER = GgufRouter(norm=True, reads_norm=False, dense=False, shared="", groups=False)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; rotary_dim is the older spelling of a part of each head that is turned."""
    fields = routed_fields.with_names(fields, {"num_experts": "num_local_experts"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, _NEUTRAL)
    if set(fields.elements("attn_type_list", int) or ()) - {1}:
        raise UnsupportedError(f"{fields.path}: attn_type_list", "all layers of this type attend to everything")
    turned, dim = fields.get("rotary_dim", int), fields.need("head_dim", int)
    if turned is not None and "partial_rotary_factor" not in fields.values:
        fields = fields.changed({"partial_rotary_factor": turned / max(1, dim)})
    routed_fields.pass_further(fields)
    ours = hf_fields.decoder(fields, "minimax_m2", _HONOURED, heads_by_default=False, theta=5e6, turned=1.0)
    return checked(fields, ours | hf_experts(fields, "num_local_experts") | _OURS, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "minimax_m2", "MiniMaxM2")
    fields |= {"num_local_experts": config["experts"], "num_experts_per_tok": config["experts_per_token"]}
    return fields | {"rotary_dim": config.get("rotary_dim") or config["head_dim"], "scoring_func": "sigmoid"}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    config = routed_fields.gguf_routed(model, "minimax_m2", _ROUTER, "half", ("rope.dimension_count",))
    return config | {"qk_norm": True, "wide_qk_norm": True}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """A part of each head may be turned."""
    form = routed_fields.routed_to_gguf(config, "minimax-m2", _ROUTER, "half")
    return form and gguf_fields.GgufForm(form.architecture, "half", {**form.keys, **gguf_fields.turned_part(config)})
