"""Files of FlexOlmo."""

from roofline.common.fields import Fields
from roofline.weights.families import olmoe
from roofline.weights.families.shared import hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import hf_experts
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.routed_fields import LAYER
from roofline.weights.families.shared.tensor_names import POST_NORMS, TensorNames

NAMES = TensorNames(
    {name: theirs for name, theirs in LAYER.items() if not name.endswith(("attn_norm", "mlp_norm"))} | POST_NORMS,
    hf_apart=stacked_experts_apart,
)
_DEFAULTS = {
    **{"vocab_size": 100_352, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 4096, "num_experts": 7, "num_experts_per_tok": 5},
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = routed_fields.with_names(fields, {"num_local_experts": "num_experts"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, olmoe.UNREAD)
    ours = hf_fields.decoder(fields, "flex_olmo", ("attention_bias", "num_experts"), theta=5e5)
    hf_fields.biases(fields, ours)
    ours |= hf_experts(fields, "num_experts") | {"qk_norm": True, "wide_qk_norm": True}
    ours["renormalise"] = fields.get("norm_topk_prob", bool, False)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = olmoe.to_hf(config) | {"model_type": "flex_olmo", "architectures": ["FlexOlmoForCausalLM"]}
    return fields | {"pad_token_id": None}  # the type's default may be no id of a small vocabulary
