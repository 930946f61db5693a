"""Files of ERNIE 4.5 with experts, which turns neighbouring dimensions in both kinds of files.

Modules that guess further tokens (`model.mtp_`) are not read.
"""

from pathlib import Path

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields, routed_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import TAKEN_FOR_EXPERTS
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.routed_fields import LAYER, GgufRouter, RouterKeys
from roofline.weights.families.shared.tensor_names import TensorNames
from roofline.weights.quantised.method import TensorSource


def _apart(path: Path, source: TensorSource) -> TensorSource:
    stacked = stacked_experts_apart(path, source)
    return renamed(stacked, lambda name: name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics."))


NAMES = TensorNames(
    LAYER,
    bare={"mlp.choice.bias": ("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias")},
    one_row=("mlp.choice",),
    hf_apart=_apart,
    as_parameters=TAKEN_FOR_EXPERTS,
    neighbours=True,
)
_DEFAULTS = {
    **{"vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28},
    **{"num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
    **{"moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2},
}
# The floor of the sum that weights are divided by: no sum that a router gives is as small.
_NEUTRAL = routed_fields.UNREAD | {"use_bias": (False,), "moe_norm_min": (1e-12,), "scoring_func": ("softmax",)}
_KEYS = RouterKeys("moe_num_experts", "moe_k", "moe_num_shared_experts", scale="")
_ROUTER = GgufRouter("softmax", reads_score=False, norm=True, reads_norm=False, shared="size", groups=False)
_STEP = "interleave_moe_layer_step"


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. The first files name classes of their own in auto_map, whose mathematics this is."""
    fields = routed_fields.with_names(fields, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    refuse_unless_neutral(fields, _NEUTRAL)
    routed_fields.pass_further(fields)
    ours = hf_fields.decoder(
        fields, "ernie4_5_moe", ("auto_map",), heads_by_default=False, eps=1e-5, tied=True, theta=5e5
    )
    ours["rope_style"] = "interleaved"
    ours = routed_fields.hf_routed(fields, ours, _KEYS, _dense(fields, ours["layers"]))
    return checked(fields, ours | {"choice_bias": True, "renormalise": True}, routed_fields.MIXED)


def _dense(fields: Fields, layers: int) -> list[int]:
    """The layers without experts: those before the first, behind the last, and between those of each interval."""
    first, last = fields.get("moe_layer_start_index", int, 1), fields.get("moe_layer_end_index", int, -1)
    interval = fields.get("moe_layer_interval", int, 1)
    if interval < 1:
        fields.refuse("moe_layer_interval", f"{describe(interval)} is not at least 1")
    last = layers - 1 if last == -1 else last
    return [layer for layer in range(layers) if (layer + 1) % interval or not first <= layer <= last]


def to_hf(config: Config) -> Config:
    """The fields of a config.json; the smallest interval that says which layers have experts."""
    fields = routed_fields.routed_to_hf(config, "ernie4_5_moe", "Ernie4_5_Moe", _KEYS)
    sparse = [layer for layer in range(config["layers"]) if layer not in config.get("dense", ())]
    first, last = (sparse[0], sparse[-1]) if sparse else (config["layers"], 0)
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    fields |= {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": interval}
    return fields | {"use_bias": False}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    refuse_unless_neutral(model.fields, {_STEP: (1,)})
    return routed_fields.gguf_routed(model, "ernie4_5_moe", _ROUTER, "interleaved", (_STEP,))


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Layers without experts stand before all others."""
    form = routed_fields.routed_to_gguf(config, "ernie4_5-moe", _ROUTER, "interleaved")
    return form and gguf_fields.GgufForm(form.architecture, "interleaved", {**form.keys, _STEP: 1})
