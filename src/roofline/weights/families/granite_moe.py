"""Files of Granite with experts: all gates and ups of a layer in one tensor, those of the shared expert in another."""

import re
from pathlib import Path

from roofline.common.fields import Fields, describe
from roofline.weights.families import granite
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.experts import (
    HONOURED_GGUF,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.joined_experts import renamed, stacked_experts_apart
from roofline.weights.families.shared.tensor_names import ATTENTION, NORMS, JoinedRows, TensorNames, TensorPlace
from roofline.weights.files.mapped import JsonObject
from roofline.weights.quantised.method import TensorSource

_PARTS = ("gate", "up", "down")
_PLACED = re.compile(r"(.+\.block_sparse_moe)\.experts\.(?:\d+\.)?(gate|up|down)_proj\.weight")
# What files, and transformers in memory, call a tensor -> the name by which all experts are taken apart.
_STACKED = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "mlp.gate.weight",
    "block_sparse_moe.router.weight": "mlp.gate.weight",
}


def _stacked_name(name: str) -> str:
    ending = next((ending for ending in _STACKED if name.endswith(f".{ending}")), None)
    return name if ending is None else name.removesuffix(ending) + _STACKED[ending]


def _apart_name(name: str) -> str:
    if name.endswith(".mlp.gate.weight"):
        return name.replace(".mlp.gate.", ".block_sparse_moe.router.layer.")
    return name.replace(".mlp.experts.", ".block_sparse_moe.experts.")


def _apart(path: Path, source: TensorSource) -> TensorSource:
    return renamed(stacked_experts_apart(path, renamed(source, _stacked_name)), _apart_name)


def _placed(config: JsonObject, name: str) -> TensorPlace | None:
    match = _PLACED.fullmatch(name)
    if match is None:
        return None
    if match[2] == "down":
        return TensorPlace(f"{match[1]}.output_linear.weight", 0, 1, in_turn=False)
    return TensorPlace(f"{match[1]}.input_linear.weight", _PARTS.index(match[2]), 2, in_turn=False)


def joined(config: Config) -> dict[str, JoinedRows]:
    """The rows of our parameters in the tensors of a layer."""
    rows = range(config.get("shared_ffn", 0))
    return {"mlp.shared.gate_up": [("mlp.shared.gate", rows), ("mlp.shared.up", rows)]} if rows else {}


LAYER = (
    NORMS
    | ATTENTION
    | {"mlp.router": ("ffn_gate_inp", "block_sparse_moe.router.layer")}
    | {f"mlp.experts.{part}": (f"ffn_{part}_exps", f"block_sparse_moe.experts.{part}_proj") for part in _PARTS}
    | {f"mlp.experts.{{expert}}.{part}": ("", f"block_sparse_moe.experts.{{expert}}.{part}_proj") for part in _PARTS}
    | {
        "mlp.shared.gate": ("ffn_gate_shexp", "shared_mlp.gate_proj"),
        "mlp.shared.up": ("ffn_up_shexp", "shared_mlp.up_proj"),
        "mlp.shared.gate_up": ("", "shared_mlp.input_linear"),
        "mlp.shared.down": ("ffn_down_shexp", "shared_mlp.output_linear"),
    }
)
NAMES = TensorNames(LAYER, hf_apart=_apart, hf_placed=_placed, joined=joined, experts_module="block_sparse_moe.experts")
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}
DEFAULTS |= {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32}
DEFAULTS |= {"num_attention_heads": 32, "max_position_embeddings": 2048}
SHARED = "expert_shared_feed_forward_length"


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; only granitemoeshared has a shared expert."""
    fields = hf_fields.with_defaults(fields, DEFAULTS)
    ours = granite.decoder(fields, "granite_moe", ("num_local_experts",)) | hf_experts(fields, "num_local_experts")
    if model_type != "granitemoe":
        ours["shared_ffn"] = shared_size(fields, "shared_intermediate_size")
    return checked(fields, ours, hf_fields.SPELLED)


def shared_size(fields: Fields, key: str) -> int:
    """The inner width of the shared expert, 0: there is none."""
    size = fields.get(key, int, 0)
    if not 0 <= size <= 1 << 22:
        fields.refuse(key, f"{describe(size)} is not from 0 to {1 << 22}")
    return size


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    shared = config.get("shared_ffn", 0)
    kind, name = ("granitemoeshared", "GraniteMoeShared") if shared else ("granitemoe", "GraniteMoe")
    fields = hf_fields.to_hf(config, kind, name) | ({"shared_intermediate_size": shared} if shared else {})
    return fields | {
        **{key: config[key] for key in granite.MULTIPLIERS},
        "attention_bias": config["attention_bias"],
        "num_local_experts": config["experts"],
        "num_experts_per_tok": config["experts_per_token"],
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters permute the rows of q and k."""
    config = granite.decoder_from_gguf(model, "granite_moe", (*HONOURED_GGUF, SHARED))
    return config | gguf_experts(model.fields) | {"shared_ffn": shared_size(model.fields, SHARED)}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Its multipliers have keys of their own."""
    keys = granite.multiplier_keys(config) | experts_to_gguf(config)
    shared = config.get("shared_ffn", 0)
    return gguf_fields.GgufForm("granitemoe", "interleaved", keys | ({SHARED: shared} if shared else {}))
