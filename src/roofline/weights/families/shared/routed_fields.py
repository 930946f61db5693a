"""What readers of the families of `models/routed.py` share: tables of names, and what their keys say of the router."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.experts import (
    EACH_EXPERT,
    EXPERTS,
    HONOURED_GGUF,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, QK_NORMS

SHARED_EXPERTS = {
    f"mlp.shared.{name}": (f"ffn_{name}_shexp", f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")
}
# Layers as most of these types have them, and the bias that chooses experts, whose name ends with neither kind.
LAYER = NORMS | ATTENTION | QK_NORMS | MLP | EXPERTS | EACH_EXPERT | SHARED_EXPERTS
LAYER |= {"mlp.router": ("ffn_gate_inp", "mlp.gate")}
CHOICE_BIAS = {"mlp.choice.bias": ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")}
# The module by which layers behind the last of the model are known to guess further tokens.
FURTHER = "eh_proj"
MIXED = hf_fields.SPELLED | {"ffn": "moe_intermediate_size"}
# What types whose models have it no otherwise do not read, at the values that say so.
UNREAD: dict[str, tuple[object, ...]] = {
    **{"norm_topk_prob": (True,), "n_group": (1,), "topk_group": (1,), "routed_scaling_factor": (1, 1.0)},
    "scoring_func": ("sigmoid",),
}
_SIZE, _SHARED_SIZE = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_SHARED_COUNT, _DENSE_COUNT = "expert_shared_count", "leading_dense_block_count"
_SCALE, _NORM, _SCORE = "expert_weights_scale", "expert_weights_norm", "expert_gating_func"
_GROUPS, _KEPT = "expert_group_count", "expert_group_used_count"
_FURTHER = "nextn_predict_layers"
_SCORES = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers
_LARGEST = 1 << 14


@dataclass(frozen=True)
class RouterKeys:
    """What a config.json calls the number of experts, of those that a token goes to and that all go to, and the factor
    of what the former give; "": it has no such key."""

    experts: str = "n_routed_experts"
    chosen: str = "num_experts_per_tok"
    shared: str = "n_shared_experts"
    scale: str = "routed_scaling_factor"


def pass_further(fields: Fields) -> None:
    """Read the keys of layers that guess further tokens, which say nothing of the others."""
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_transformer_layers"):
        fields.get(key, int)
    fields.get("use_mtp", bool)


def with_names(fields: Fields, names: Mapping[str, str]) -> Fields:
    """The fields under transformers' first names for them. names: second -> first. Raises ConfigError where both are
    there and differ."""
    changes: Config = {}
    for second, first in names.items():
        value = fields.values.get(second)
        if value is None:
            continue
        if fields.values.get(first, value) != value:
            fields.refuse(second, f"{describe(value)} is not {first}, for which it is another name")
        changes |= {first: value, second: None}
    return fields.changed(changes)


def hf_routed(fields: Fields, ours: Config, keys: RouterKeys, dense: Sequence[int]) -> Config:
    """The canonical configuration with experts in all layers but `dense`, whose MLP has the ffn that is there."""
    ours |= hf_experts(fields, keys.experts, keys.chosen)
    ours |= {"dense": list(dense), "dense_ffn": ours["ffn"]} if dense else {}
    ours["ffn"] = expert_size(fields, "moe_intermediate_size")
    if keys.shared:
        ours["shared_ffn"] = ours["ffn"] * _count(fields, keys.shared)
    if keys.scale:
        ours["routed_scale"] = fields.positive(keys.scale) or 1.0
    return ours


def hf_groups(fields: Fields, ours: Config) -> Config:
    """The groups that n_group and topk_group say."""
    return ours | _groups(fields, ours["experts"], "n_group", "topk_group")


def _groups(fields: Fields, experts: int, count: str, used: str) -> Config:
    groups, kept = fields.get(count, int, 1), fields.get(used, int, 1)
    if not 1 <= groups <= max(1, experts // 2) or experts % groups:
        fields.refuse(count, f"{describe(groups)} does not divide {experts} experts into groups of two or more")
    if not 1 <= kept <= groups:
        fields.refuse(used, f"{describe(kept)} is not from 1 to {groups}")
    return {"groups": groups, "kept_groups": kept} if kept < groups else {}  # else all experts are among the best


def first_layers(fields: Fields, name: str, default: int, layers: int) -> list[int]:
    """The layers without experts, where a key says how many of the first these are."""
    count = fields.get(name, int, default)
    if not 0 <= count <= layers:
        fields.refuse(name, f"{describe(count)} is not from 0 to the {layers} layers")
    return list(range(count))


def layers_of_kind(fields: Fields, layers: int, default: Sequence[int]) -> list[int]:
    """The layers without experts, as mlp_layer_types says, or the default."""
    kinds = fields.elements("mlp_layer_types", str)
    if kinds is None:
        return list(default)
    if len(kinds) != layers:
        fields.refuse("mlp_layer_types", f"has {len(kinds)} values for {layers} layers")
    new = next((kind for kind in kinds if kind not in ("dense", "sparse")), None)
    if new is not None:
        what = f"{fields.path}: mlp_layer_types {shorten(new)!r}"
        raise UnsupportedError(what, "we do not have such layers", ("dense", "sparse"))
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"]


def kinds_of_mlps(config: Config) -> list[str]:
    """The inverse of `layers_of_kind`."""
    return ["dense" if layer in config.get("dense", ()) else "sparse" for layer in range(config["layers"])]


def leading(config: Config) -> int | None:
    """How many layers before all others have no experts; None where there is one between these."""
    dense = list(config.get("dense", ()))
    return len(dense) if dense == list(range(len(dense))) else None


def routed_to_hf(config: Config, kind: str, name: str, keys: RouterKeys) -> Config:
    """The fields of a config.json that these types share."""
    fields = hf_fields.to_hf(config | {"ffn": config.get("dense_ffn") or config["ffn"]}, kind, name)
    fields |= {keys.experts: config["experts"], keys.chosen: config["experts_per_token"]}
    fields["moe_intermediate_size"] = config["ffn"]
    if keys.shared:
        fields[keys.shared] = config.get("shared_ffn", 0) // config["ffn"]
    return fields | ({keys.scale: config.get("routed_scale", 1.0)} if keys.scale else {})


def groups_to_hf(config: Config) -> Config:
    """The inverse of `hf_groups`."""
    return {"n_group": config.get("groups", 1), "topk_group": config.get("kept_groups", 1)}


def _count(fields: Fields, name: str) -> int:
    count = fields.need(name, int)
    if not 0 <= count <= _LARGEST:
        fields.refuse(name, f"{describe(count)} is not from 0 to {_LARGEST}")
    return count


# --- GGUF ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufRouter:
    """What an architecture of llama.cpp computes. score: where files say none, and norm: whether weights are made to
    add up to 1 likewise; own_size: experts have a width of their own; dense: the first layers may have none; shared:
    what says the width of the experts that all tokens go to: "count", "size", "" for neither; groups, further: whether
    files say how many groups there are, and layers that guess further tokens, where there is one and none."""

    score: str = "sigmoid"
    reads_score: bool = True
    norm: bool = False
    reads_norm: bool = True
    own_size: bool = True
    dense: bool = True
    shared: str = "count"
    groups: bool = True
    further: bool = False


_KEYS: tuple[str, ...] = (
    *HONOURED_GGUF,
    _SIZE,
    _SHARED_SIZE,
    _SHARED_COUNT,
    _DENSE_COUNT,
    _SCALE,
    _NORM,
    _SCORE,
    _GROUPS,
    _KEPT,
)
_KEYS += (_FURTHER,)


def gguf_routed(
    model: gguf_fields.GgufModel, family: str, router: GgufRouter, rope_style: str, honoured: Collection[str] = ()
) -> Config:
    """The canonical configuration of an architecture; whether a bias chooses experts is a matter of tensors."""
    fields = model.fields
    layers = fields.need("block_count", int) - fields.get(_FURTHER, int, 0)
    model = replace(model, fields=fields.changed({"block_count": layers}))
    config = gguf_fields.read(model, family, rope_style, (*_KEYS, *honoured)) | gguf_experts(fields)
    dense = first_layers(fields, _DENSE_COUNT, 0, layers)
    config |= {"dense": dense, "dense_ffn": config["ffn"]} if dense else {}
    if router.own_size:
        config["ffn"] = expert_size(fields, _SIZE)
    config["score"] = _score(fields, router)
    config["renormalise"] = fields.get(_NORM, bool, router.norm) if router.reads_norm else router.norm
    config["routed_scale"] = fields.get(_SCALE, float, 0.0) or 1.0
    config["choice_bias"] = any(name.endswith(".mlp.choice.bias") for name in model.shapes)
    config["shared_ffn"] = _shared(fields, router, config["ffn"])
    grouped = fields.get(_GROUPS, int, 0) > 1  # else llama.cpp reads the other key no further
    return config | (_groups(fields, config["experts"], _GROUPS, _KEPT) if grouped else {})


def _score(fields: Fields, router: GgufRouter) -> str:
    number = fields.get(_SCORE, int, 0) if router.reads_score else 0
    scores = {0: router.score} | {number: name for name, number in _SCORES.items()}
    if number not in scores:
        what = f"{fields.path}: {fields.within}{_SCORE} = {number}"
        raise UnsupportedError(what, "we do not have such scores of experts", tuple(_SCORES))
    return scores[number]


def _shared(fields: Fields, router: GgufRouter, ffn: int) -> int:
    if router.shared == "count":
        return ffn * (_count(fields, _SHARED_COUNT) if _SHARED_COUNT in fields.values else 0)
    size = fields.get(_SHARED_SIZE, int, 0) if router.shared else 0
    return expert_size(fields, _SHARED_SIZE) if size else 0


def routed_to_gguf(config: Config, architecture: str, router: GgufRouter, rope_style: str) -> gguf_fields.GgufForm:
    """The inverse of `gguf_routed`. Raises UnsupportedError for what such files cannot say."""
    shared, dense = config.get("shared_ffn", 0), leading(config)
    score, norm = config.get("score", "softmax"), config.get("renormalise", True)
    unsaid: dict[str, object] = {f"scores of experts by {score}": not router.reads_score and score != router.score}
    unsaid["weights of experts that " + ("add up to 1" if norm else "do not add up to 1")] = (
        not router.reads_norm and norm != router.norm
    )
    unsaid["a dense layer between those of experts"] = dense is None
    unsaid |= {"shared experts": shared and not router.shared, "dense layers": dense and not router.dense}
    unsaid["shared experts that are no multiple of the others"] = router.shared == "count" and shared % config["ffn"]
    gguf_fields.refuse_unsaid(config, unsaid)
    keys = experts_to_gguf(config) | {"feed_forward_length": config.get("dense_ffn") or config["ffn"]}
    keys |= {_SIZE: config["ffn"]} if router.own_size else {}
    keys |= {_DENSE_COUNT: dense} if router.dense else {}
    keys |= {_SCORE: _SCORES[score]} if router.reads_score else {}
    keys |= {_NORM: norm} if router.reads_norm else {}
    scale, groups = config.get("routed_scale", 1.0), config.get("groups", 1)
    keys |= {_SCALE: scale} if router.reads_norm or scale != 1.0 else {}
    keys |= {_GROUPS: groups, _KEPT: config.get("kept_groups", 1)} if router.groups or groups > 1 else {}
    keys |= {_FURTHER: 0} if router.further else {}
    keys |= {_SHARED_COUNT: shared // config["ffn"]} if router.shared and shared % config["ffn"] == 0 else {}
    keys |= {_SHARED_SIZE: shared} if router.shared == "size" else {}
    return gguf_fields.GgufForm(architecture, rope_style, keys)
