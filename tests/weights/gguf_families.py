"""GGUF files of small random models of transformers, named and laid out as converters do."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roofline.weights.families.falcon_h1 import gguf_factors
from tests.models.parity_cases import (
    BASE,
    CASES,
    ENCODERS,
    FALCON,
    GEMMA2,
    GEMMA3,
    HYBRID,
    JAMBA,
    LEARNED,
    LFM2,
    NEMOTRON_MOE,
    NEOX,
    PARTS,
    PLAIN,
    SHARP,
    YARN_ALIKE,
)

GgufValue = int | float | bool | str | list[bool] | list[int]
Pairs = list[tuple[str, np.ndarray]]
Values = Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray | Pairs]


@dataclass(frozen=True)
class GgufCase:
    """architecture: of the file; keys: beside those that all have; values: what converters change of a tensor, or the
    several, with names, that they make of it."""

    architecture: str
    config: Mapping[str, Any]
    keys: Mapping[str, GgufValue]
    values: Values


def as_it_is(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """No change."""
    return values


def plus_one(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Norms with the 1 that Gemma's lack."""
    return values + 1 if name.endswith("norm.weight") else values


def in_pairs(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """The rows of q and k with those beside each other that rope turns together, before those that it does not."""
    part = name.split(".")[-2]
    if part not in ("q_proj", "k_proj"):
        return values
    heads = config["heads" if part == "q_proj" else "kv_heads"]
    rows = values.reshape(heads, len(values) // heads, -1)
    turned = config.get("rotary_dim") or rows.shape[1]
    pairs = rows[:, :turned].reshape(heads, 2, turned // 2, -1).swapaxes(1, 2).reshape(heads, turned, -1)
    return np.concatenate([pairs, rows[:, turned:]], axis=1).reshape(values.shape)


def by_columns(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """GPT-2's matrices, which transformers multiplies from the other side."""
    return np.ascontiguousarray(values.T) if ".c_" in name and values.ndim == 2 else values


def one_below_the_other(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """GPT-NeoX's q, k and v of all heads."""
    if "query_key_value" not in name:
        return values
    parts = values.reshape(config["heads"], 3, config["head_dim"], -1)
    return np.concatenate([parts[:, i].reshape(-1, parts.shape[-1]) for i in range(3)]).reshape(values.shape)


def without_padding(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """RoBERTa's positions without the rows before the first."""
    return values[config["first_position"] :] if "position_embeddings" in name else values


def delta_net(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Qwen3-Next's and Qwen3.5's: norms with the 1 that they lack, decays, the convolution without its middle; experts
    and, of the former, what comes head by head, apart."""
    stem, _, part = name.rpartition(".")
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        return [(f"{stem}.gate_proj.weight", gate), (f"{stem}.up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{stem}.down_proj.weight", values)]
    if name.endswith("shared_expert_gate.weight"):
        return values[0]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    keys, dim, group = config["key_heads"], config["key_dim"], config["value_heads"] // config["key_heads"]
    if "in_proj_qkvz" in name:
        heads = values.reshape(keys, -1, values.shape[-1])
        parts = np.split(heads, np.cumsum([dim, dim, group * config["value_dim"]]), axis=1)
        q, k, v, z = (each.reshape(-1, values.shape[-1]) for each in parts)
        before = stem.removesuffix(".in_proj_qkvz")
        return [(f"{before}.in_proj_qkv.weight", np.concatenate([q, k, v])), (f"{before}.in_proj_z.weight", z)]
    if "linear_attn" not in name or config["family"] == "qwen3_next":
        heads_first = values
    else:
        heads_first = tiled(name, values, keys, 2 * keys * dim)
    if part == "A_log":
        return -np.exp(heads_first.astype(np.float64)).astype(np.float32)  # to rounding, as torch gives it
    if part == "dt_bias":
        return [(f"{stem}.dt_proj.bias", heads_first)]
    return heads_first.squeeze(1) if "conv1d" in name else heads_first


def experts_apart(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Gates and ups of experts apart, and the bias that chooses them, which is a vector."""
    stem, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        return [(f"{stem}.gate_proj.weight", gate), (f"{stem}.up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{stem}.down_proj.weight", values)]
    if part == "e_score_correction_bias":
        return [(f"{stem.replace('gate.moe_statics', 'moe_statics')}.e_score_correction.bias", values.reshape(-1))]
    return values


def named_sinks(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Experts apart, and sinks under a name like that of a matrix."""
    return [(f"{name}.weight", values)] if name.endswith(".sinks") else experts_apart(name, values, config)


def latent_apart(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Matrices of keys and values of each head apart, those of keys the other way round; experts as `experts_apart`."""
    if "kv_b_proj" not in name:
        return experts_apart(name, values, config)
    plain = config["head_dim"] - config["rotary_dim"]
    heads = values.reshape(config["heads"], plain + config["value_dim"], -1)
    keys = np.ascontiguousarray(heads[:, :plain].swapaxes(1, 2))
    return [(name.replace("kv_b", "k_b"), keys), (name.replace("kv_b", "v_b"), np.ascontiguousarray(heads[:, plain:]))]


class TogetherQkv:
    """q, k and v of a layer, one below the other, beside experts apart."""

    def __init__(self) -> None:
        self._waiting: list[np.ndarray] = []

    def __call__(self, name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
        before, _, part = name.removesuffix(".weight").rpartition(".self_attn.")
        if part not in ("q_proj", "k_proj", "v_proj"):
            return experts_apart(name, values, config)
        self._waiting.append(values)
        if part != "v_proj":
            return []
        together = np.concatenate(self._waiting)
        self._waiting.clear()
        return [(f"{before}.attention.query_key_value.weight", together)]


def of_gemma4(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Gemma 4's: what has no ".weight" has it, or is a scale; and the divisors of rope of layers without a window."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    for theirs, ours in GEMMA4_NAMES.items():
        if name.endswith(theirs):
            return [(f"{layer}.{ours}", values)]
    if name == "model.norm.weight" and config["rope_scaling"]:
        half = config["global_head_dim"] // 2
        return [(name, values), ("rope_freqs.weight", np.where(np.arange(half) < half // 4, 1, 1e30).astype("f4"))]
    return values


class StackedStreams:
    """Gemma 3n's: the matrices between streams in one tensor, once all of them have come."""

    def __init__(self) -> None:
        self.came: dict[str, np.ndarray] = {}

    def __call__(self, name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
        stem, _, number = name.removesuffix(".weight").rpartition(".")
        theirs = {"model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj"}
        if stem not in theirs:
            layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
            return [(f"{layer}.altup_correct_scale.weight", values)] if name.endswith("output_scale") else values
        self.came[name] = values
        parts = [self.came.pop(f"{stem}.{n}.weight") for n in range(3)] if number == "2" else []
        return [(f"{theirs[stem]}.weight", np.stack(parts))] if parts else []


GEMMA4_NAMES = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale"}
GEMMA4_NAMES |= {"router.per_expert_scale": "ffn_down_exps.scale", "router.proj.weight": "ffn_gate_inp.weight"}
GEMMA4_NAMES |= {"experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight"}


def tiled(name: str, values: np.ndarray, keys: int, before: int) -> np.ndarray:
    """Value heads, the first of all key heads before the second of all. before: rows of q and k, where any are."""
    if "out_proj" in name:
        return tiled("", values.T, keys, 0).T
    if "linear_attn.norm" in name:
        return values
    first = before if "in_proj_qkv" in name or "conv1d" in name else 0
    width = {"in_proj_b": 1, "in_proj_a": 1, "A_log": 1, "dt_bias": 1}
    dim = next((n for part, n in width.items() if part in name), TILED_DIM)
    behind = values[first:].reshape(keys, -1, dim, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate([values[:first], behind.reshape(-1, *values.shape[1:])])


def paired_experts(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Granite's experts, and the shared one, with gates and ups apart; the rows of q and k as `in_pairs` has them."""
    before, _, part = name.rpartition(".block_sparse_moe.experts.")
    if part == "gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        return [(f"blk.{layer_of(name)}.ffn_gate_exps.weight", gate), (f"blk.{layer_of(name)}.ffn_up_exps.weight", up)]
    if part == "down_proj":
        return [(f"{before}.block_sparse_moe.output_linear.weight", values)]
    if name.endswith("block_sparse_moe.router.weight"):
        return [(name.replace("router.weight", "router.layer.weight"), values)]
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        return [
            (f"blk.{layer_of(name)}.ffn_gate_shexp.weight", gate),
            (f"blk.{layer_of(name)}.ffn_up_shexp.weight", up),
        ]
    return in_pairs(name, values, config)


def of_scans(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Mamba-2's: decays, vectors as columns, norms by groups, the convolution without its middle."""
    stem, _, part = name.rpartition(".")
    if part == "A_log":
        return (-np.exp(values.astype(np.float64))).astype(np.float32)[:, None]
    if part == "dt_bias":
        return [(f"{stem}.dt_proj.bias", values)]
    if part == "D":
        return values[:, None]
    if stem.endswith("conv1d"):
        return values.squeeze(1) if part == "weight" else values
    return values.reshape(config["groups"], -1) if stem.endswith((".mamba.norm", ".mixer.norm")) else values


def granite_scans(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Granite 4's: those, and what Granite's have; without experts the shared one is the MLP."""
    if ".mamba." in name:
        return of_scans(name, values, config)
    made = paired_experts(name, values, config)
    if "shared_mlp" not in name or config.get("experts"):
        return made
    if isinstance(made, np.ndarray):
        return [(f"blk.{layer_of(name)}.ffn_down.weight", made)]
    return [(theirs.replace("_shexp", ""), each) for theirs, each in made]


def nemotron(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Nemotron-H's: names as published, all experts of a layer in one."""
    name = name.replace("model.", "backbone.", 1)
    if name.endswith((".experts.up_proj", ".experts.down_proj")):
        part = name.rpartition(".")[2].removesuffix("_proj")
        return [(f"blk.{layer_of(name)}.ffn_{part}_exps.weight", values)]
    if name.endswith("e_score_correction_bias"):
        return [(f"blk.{layer_of(name)}.exp_probs_b.bias", values)]
    made = of_scans(name, in_pairs(name, values, config), config)
    return [(name, made)] if isinstance(made, np.ndarray) else made


def bamba(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Bamba's: those of scans, and the rows of q and k as `in_pairs` has them."""
    return (of_scans if ".mamba." in name else in_pairs)(name, values, config)


def jamba(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Jamba's: those of Mamba, and experts apart."""
    if ".experts." in name:
        return experts_apart(name.replace(".feed_forward.", ".mlp."), values, config)
    return scans(name, values, config)


def with_products(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Falcon-H1's: matrices that hold the products with multipliers."""
    factors, stem = gguf_factors(dict(config)), name.rpartition(".")[0]
    ours = {"embed_tokens": "embed", "lm_head": "head", "q_proj": "attn.q", "k_proj": "attn.k", "v_proj": "attn.v"}
    ours |= {"o_proj": "attn.o", "gate_proj": "mlp.gate", "down_proj": "mlp.down", "out_proj": "ssm.o"}
    stretches = [*factors.get(ours.get(stem.rpartition(".")[2], ""), ())]
    if stem.endswith("in_proj"):
        stretches = [*factors["ssm.z"], *factors["ssm.xbc"], *factors["ssm.dt"]]
    if not stretches:
        return of_scans(name, values, config)
    rows = np.concatenate([np.full(count, factor, np.float32) for count, factor in stretches])
    return values * rows[:, None]


def layer_of(name: str) -> int:
    """The number in model.layers.N.NAME."""
    return int(name.split(".")[2])


def short_convolutions(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """LFM2's: the convolution without its middle, experts apart, and the bias that chooses them with its ending."""
    stem, _, part = name.rpartition(".")
    if part == "expert_bias":
        return [(f"{name}.bias", values)]
    if part in ("gate_up_proj", "down_proj"):  # of experts: the converter's names are those of files without a prefix
        parts = (
            dict(zip(("w1", "w3"), np.split(values, 2, axis=1), strict=True)) if part != "down_proj" else {"w2": values}
        )
        return [(f"{stem.removeprefix('model.')}.{name}.weight", each) for name, each in parts.items()]
    return values.squeeze(1) if name.endswith("conv.conv.weight") else values


TILED_DIM = 16  # of a value head in the cases below
MPT = PLAIN | {"family": "mpt", "ffn": 256, "positions": "alibi", "bias": False}
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
HEADS = {"attention.key_length": 32, "attention.value_length": 32}
HYBRID_KEYS: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, RMS: 1e-4}
HYBRID_KEYS |= {"ssm.time_step_rank": 4, "ssm.inner_size": 64, "rope.dimension_count": 4}
GEMMA4_KEYS: dict[str, Any] = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
GEMMA4_KEYS |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), 8)
GEMMA4_KEYS |= {"attention.sliding_window": 9, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, RMS: 1e-6}
GEMMA4_KEYS |= {"attention.sliding_window_pattern": [True, True, True, False], "final_logit_softcapping": 3.0}
GEMMA4_KEYS |= {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
EXPERT_KEYS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
EXPERT_KEYS |= {"expert_shared_feed_forward_length": 48}
ROUTED_KEYS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32, "feed_forward_length": 96}
SIGMOID_KEYS = ROUTED_KEYS | {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}
SIGMOID_KEYS |= {"leading_dense_block_count": 1}


def scans(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray | Pairs:
    """Mamba's and Mamba-2's: decays, the convolution without its middle; of the latter vectors as columns, and the norm
    a row a group."""
    part, by_head = name.rpartition(".")[2], "scan_heads" in config
    if part == "A_log":
        values = -np.exp(values.astype(np.float64)).astype(np.float32)  # to rounding, as torch gives it
    if by_head and part in ("A_log", "D"):
        return values[:, None]
    if by_head and name.endswith("mixer.norm.weight"):
        return values.reshape(config["groups"], -1)
    if part == "dt_bias":
        return [(name.replace("dt_bias", "dt_proj.bias"), values)]
    return values.squeeze(1) if name.endswith("conv1d.weight") else values


SCAN_KEYS: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
GRANITE_KEYS: dict[str, Any] = {"rope.dimension_count": 16, "embedding_scale": 6.0, "residual_scale": 0.3}
GRANITE_KEYS |= {"attention.scale": 0.11, "logit_scale": 1.7, "expert_count": 6, "expert_used_count": 3}
LATENT_KEYS: dict[str, Any] = {"attention.kv_lora_rank": 32, "attention.q_lora_rank": 48, "rope.dimension_count": 16}
LATENT_KEYS |= {"attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 32}
LATENT_KEYS |= {"attention.key_length_mla": 32, "attention.value_length_mla": 24, "vocab_size": 96}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 64}
YARN_KEYS |= {"rope.scaling.yarn_log_multiplier": 0.12}
LATENT_EXPERTS = {
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "feed_forward_length": 96,
}
LATENT_EXPERTS |= {"leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_shared_count": 1}
MIXER_KEYS: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, RMS: 1e-4}
MIXER_KEYS |= {"ssm.time_step_rank": 8, "ssm.inner_size": 128}
GRANITE_SCANS = GRANITE_KEYS | MIXER_KEYS | {"attention.head_count_kv": [0, 0, 2, 0], "rope.scaling.finetuned": False}
JAMBA_KEYS: dict[str, Any] = SCAN_KEYS | {"ssm.time_step_rank": 4, RMS: 1e-3}
NEMOTRON_KEYS = {key: value for key, value in MIXER_KEYS.items() if key != RMS} | {LAYER: 1e-4}
NEMOTRON_KEYS |= {"attention.key_length": 16, "attention.value_length": 16}
GGUF_CASES = {
    "deepseek_v3": GgufCase(
        "deepseek2",
        CASES["deepseek_v3"].config,
        LATENT_KEYS
        | YARN_KEYS
        | LATENT_EXPERTS
        | {"expert_gating_func": 2, "expert_weights_norm": True, "expert_group_count": 3, "expert_group_used_count": 2}
        | {"expert_used_count": 4},
        latent_apart,
    ),
    "deepseek_v2": GgufCase(
        "deepseek2",
        CASES["deepseek_v2_lite"].config | {"rope_scaling": YARN_ALIKE, "experts": 6, "experts_per_token": 3},
        LATENT_KEYS
        | YARN_KEYS
        | LATENT_EXPERTS
        | {"attention.q_lora_rank": 0, "expert_shared_count": 2, "expert_gating_func": 1, "expert_weights_norm": False},
        latent_apart,
    ),
    "mistral4": GgufCase(
        "mistral4",
        CASES["mistral4"].config,
        LATENT_KEYS
        | LATENT_EXPERTS
        | {"rope.dimension_count": 8, "attention.key_length": 40, "attention.key_length_mla": 24}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 32}
        | {"rope.scaling.yarn_log_multiplier": 0.1, "expert_gating_func": 1, "expert_weights_norm": True}
        | {"expert_group_count": 3, "expert_group_used_count": 2, "leading_dense_block_count": 0}
        | {"attention.temperature_scale": 0.4, "attention.temperature_length": 32}
        | {"expert_weights_scale": 1.0, "feed_forward_length": 32},
        latent_apart,
    ),
    "minicpm3": GgufCase(
        "minicpm3",
        CASES["minicpm3"].config | {"embedding_multiplier": 12.0, "head_divisor": 64 / 256},
        {"attention.kv_lora_rank": 32, "attention.q_lora_rank": 48, "attention.key_length": 24, "vocab_size": 96}
        | {"rope.dimension_count": 8},
        as_it_is,
    ),
    "youtu": GgufCase(
        "deepseek2",
        CASES["youtu"].config,
        LATENT_KEYS
        | {"rope.dimension_count": 8, "attention.key_length": 40, "attention.key_length_mla": 24}
        | {"attention.value_length_mla": 16, "expert_feed_forward_length": 128, "expert_shared_count": 0}
        | {"leading_dense_block_count": 2},
        latent_apart,
    ),
    "gemma2": GgufCase(
        "gemma2",
        GEMMA2 | {"query_scalar": 32.0},
        HEADS
        | {"attention.sliding_window": 9, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, RMS: 1e-6},
        plus_one,
    ),
    "gemma3": GgufCase(
        "gemma3",
        GEMMA3 | {"query_scalar": 32.0, "layers": 6, "layer_windows": [9, 9, 9, 9, 9, 0]},
        HEADS | {"attention.sliding_window": 9, "rope.freq_base": 1e6, RMS: 1e-6},
        plus_one,
    ),
    "gemma4": GgufCase(
        "gemma4",
        CASES["gemma4"].config,
        GEMMA4_KEYS
        | {"attention.sliding_window_pattern": [True, False, True, True, False], "attention.shared_kv_layers": 3}
        | {"embedding_length_per_layer_input": 32, "feed_forward_length": [128, 128, 256, 256, 256]},
        of_gemma4,
    ),
    "gemma4_dense": GgufCase(
        "gemma4",
        CASES["gemma4_dense"].config | {"logit_cap": 3.0},
        GEMMA4_KEYS | {"attention.head_count_kv": [2, 2, 2, 1]},
        of_gemma4,
    ),
    "gemma4_moe": GgufCase(
        "gemma4",
        CASES["gemma4_moe"].config,
        GEMMA4_KEYS
        | {"attention.head_count_kv": [2, 2, 2, 4], "expert_count": 4, "expert_used_count": 3, RMS: 1e-4}
        | {"expert_feed_forward_length": 32},
        of_gemma4,
    ),
    "gemma3n": GgufCase(
        "gemma3n",
        CASES["gemma3n"].config,
        {"attention.key_length": 8, "attention.value_length": 8, "attention.sliding_window": 9, RMS: 1e-6}
        | {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 3.0, "altup.num_inputs": 4}
        | {"altup.active_idx": 0, "embedding_length_per_layer_input": 32, "attention.shared_kv_layers": 2}
        | {
            "activation_sparsity_scale": [1.2815515995025635, -math.inf, 0.0, -math.inf],
            "feed_forward_length": [128] * 4,
        }
        | {"attention.sliding_window_pattern": [True, False, True, False]},
        StackedStreams(),
    ),
    "phi3": GgufCase(
        "phi3",
        CASES["phi3"].config,
        {"rope.dimension_count": 16, "attention.sliding_window": 9, "rope.scaling.original_context_length": 1024},
        as_it_is,
    ),
    "phi4_mini": GgufCase(
        "phi3",
        CASES["phi4_mini"].config,
        {"rope.dimension_count": 12, "attention.sliding_window": 0, "rope.scaling.original_context_length": 1024},
        as_it_is,
    ),
    "phi3_long": GgufCase(
        "phi3",
        CASES["phi3_long"].config,
        {"rope.dimension_count": 16, "attention.sliding_window": 0}
        | {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
        as_it_is,
    ),
    "smollm3": GgufCase(
        "smollm3",
        CASES["smollm3"].config | {"turning": [True, True, True, False]},
        {"rope.dimension_count": 16, "vocab_size": 96},
        in_pairs,
    ),
    "granite": GgufCase(
        "granite",
        CASES["granite"].config,
        {"rope.dimension_count": 16, "embedding_scale": 6.0, "residual_scale": 0.3}
        | {"attention.scale": 0.11, "logit_scale": 1.7},
        in_pairs,
    ),
    "granitemoe": GgufCase("granitemoe", CASES["granitemoe"].config, GRANITE_KEYS, paired_experts),
    "granitemoeshared": GgufCase(
        "granitemoe",
        CASES["granitemoeshared"].config,
        GRANITE_KEYS | {"expert_shared_feed_forward_length": 48},
        paired_experts,
    ),
    "granitemoehybrid": GgufCase(
        "granitehybrid",
        CASES["granitemoehybrid"].config,
        GRANITE_SCANS | {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 128},
        granite_scans,
    ),
    "granitemoehybrid_experts": GgufCase(
        "granitehybrid",
        CASES["granitemoehybrid_experts"].config,
        GRANITE_SCANS | {"expert_shared_feed_forward_length": 48},
        granite_scans,
    ),
    "nemotron_h": GgufCase(
        "nemotron_h",
        CASES["nemotron_h"].config,
        NEMOTRON_KEYS | {"feed_forward_length": [0, 96, 0, 0, 0], "attention.head_count_kv": [0, 0, 2, 0, 2]},
        nemotron,
    ),
    "nemotron_h_moe": GgufCase(
        "nemotron_h_moe",
        NEMOTRON_MOE | {"latent": 32, "dense": [], "dense_ffn": 0, "sparse": [1, 2]},
        NEMOTRON_KEYS
        | {"feed_forward_length": [0, 32, 32, 0, 0], "attention.head_count_kv": [0, 0, 0, 0, 2]}
        | {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 32, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 48, "expert_weights_norm": True, "expert_weights_scale": 1.7}
        | {"expert_group_count": 1, "moe_latent_size": 32},
        nemotron,
    ),
    "glm": GgufCase("chatglm", CASES["glm"].config, {"rope.dimension_count": 8}, as_it_is),
    "exaone": GgufCase("exaone", CASES["exaone"].config, {"rope.dimension_count": 16}, as_it_is),
    "bamba": GgufCase(
        "granitehybrid",
        CASES["bamba"].config,
        MIXER_KEYS
        | {"attention.head_count_kv": [0, 0, 2, 0], "rope.scaling.finetuned": True, "rope.dimension_count": 8},
        bamba,
    ),
    "jamba": GgufCase(
        "jamba",
        CASES["jamba"].config,
        JAMBA_KEYS | {"attention.head_count_kv": [0, 0, 2, 0], "expert_count": 6, "expert_used_count": 2},
        jamba,
    ),
    "jamba_dense": GgufCase(
        "jamba",
        JAMBA,
        JAMBA_KEYS | {"attention.head_count_kv": [0, 0, 2, 0], "expert_count": 1, "expert_used_count": 1},
        jamba,
    ),
    "falcon_h1": GgufCase("falcon-h1", FALCON | PARTS, MIXER_KEYS | {"vocab_size": 96}, with_products),
    "ministral3": GgufCase(
        "mistral3",
        CASES["ministral3"].config | {"rope_scaling": SHARP | {"mscale_all_dim": 0.5}},
        {"rope.dimension_count": 16, "attention.temperature_scale": 0.4, "rope.scaling.yarn_log_multiplier": 0.5}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 32},
        in_pairs,
    ),
    "arcee": GgufCase("arcee", CASES["arcee"].config, {"rope.dimension_count": 16}, in_pairs),
    "glm4": GgufCase("glm4", CASES["glm4"].config, {"rope.dimension_count": 8}, as_it_is),
    "olmo2": GgufCase("olmo2", CASES["olmo2"].config, {}, as_it_is),
    "olmo3": GgufCase(
        "olmo2",
        CASES["olmo3"].config,
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, True, True, False]}
        | {"rope.freq_base_swa": 1e4, "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}
        | {"rope.scaling.original_context_length": 64, "rope.scaling.yarn_attn_factor": 1 + 0.1 * math.log(16)},
        as_it_is,
    ),
    "exaone4": GgufCase("exaone4", CASES["exaone4"].config, {"rope.dimension_count": 16, "vocab_size": 96}, as_it_is),
    "exaone4_windows": GgufCase(
        "exaone4",
        CASES["exaone4_windows"].config | {"rope_scaling": None, "head_dim": 16},
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, True, True, False]},
        as_it_is,
    ),
    "hunyuan": GgufCase(
        "hunyuan-dense",
        CASES["hunyuan"].config,
        HEADS
        | {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.dimension_count": 32}
        | {"rope.scaling.original_context_length": 262144},
        as_it_is,
    ),
    "gemma": GgufCase("gemma", CASES["gemma"].config, HEADS, plus_one),
    "seed_oss": GgufCase("seed_oss", CASES["seed_oss"].config, {"rope.dimension_count": 16}, as_it_is),
    "ernie4_5": GgufCase("ernie4_5", CASES["ernie4_5"].config, {"rope.dimension_count": 16}, as_it_is),
    "gpt_neox": GgufCase(
        "gptneox",
        NEOX | {"activation": "gelu"},
        {"rope.dimension_count": 4, "use_parallel_residual": True, LAYER: 1e-5},
        one_below_the_other,
    ),
    "gpt_neox_serial": GgufCase(
        "gptneox",
        NEOX | {"parallel": False, "rotary_dim": 8},
        {"rope.dimension_count": 8, "use_parallel_residual": False, LAYER: 1e-5},
        one_below_the_other,
    ),
    "qwen3_vl": GgufCase(
        "qwen3vl",
        CASES["qwen3"].config,
        HEADS | {"n_deepstack_layers": 3, "rope.dimension_sections": [6, 5, 5, 0]},
        as_it_is,
    ),
    "llama_heads_of_20": GgufCase(
        "llama",
        CASES["llama_heads_of_20"].config,
        {"attention.key_length": 20, "attention.value_length": 20, "rope.dimension_count": 20, "vocab_size": 96},
        in_pairs,
    ),
    "qwen3_5": GgufCase("qwen35", HYBRID | {"value_heads": 4}, HYBRID_KEYS | {"full_attention_interval": 4}, delta_net),
    "qwen3_5_alike": GgufCase(
        "qwen35",
        HYBRID | {"recurrent": [False, True, True, False], "tied": True},
        HYBRID_KEYS
        | {"ssm.time_step_rank": 2, "ssm.inner_size": 32}
        | {"attention.recurrent_layers": [False, True, True, False]},
        delta_net,
    ),
    "qwen3_5_moe": GgufCase(
        "qwen35moe",
        CASES["qwen3_5_moe"].config,
        HYBRID_KEYS | EXPERT_KEYS | {"rope.dimension_sections": [11, 11, 10, 0]},
        delta_net,
    ),
    "qwen3_next": GgufCase("qwen3next", CASES["qwen3_next"].config, HYBRID_KEYS | EXPERT_KEYS | {RMS: 1e-3}, delta_net),
    "glm4_moe": GgufCase(
        "glm4moe",
        CASES["glm4_moe"].config,
        SIGMOID_KEYS | {"expert_shared_count": 2, "rope.dimension_count": 8, "expert_feed_forward_length": 24},
        experts_apart,
    ),
    "glm4_moe_groups": GgufCase(
        "glm4moe",
        CASES["glm4_moe_groups"].config,
        SIGMOID_KEYS
        | {
            "expert_shared_count": 2,
            "expert_group_count": 3,
            "expert_group_used_count": 2,
            "expert_weights_norm": False,
        }
        | {"expert_feed_forward_length": 48, "feed_forward_length": 48, "leading_dense_block_count": 0},
        experts_apart,
    ),
    "dots1": GgufCase("dots1", CASES["dots1"].config, SIGMOID_KEYS | {"expert_shared_count": 1}, experts_apart),
    "olmoe": GgufCase(
        "olmoe",
        CASES["olmoe"].config,
        {"expert_count": 6, "expert_used_count": 2, "vocab_size": 96},
        experts_apart,
    ),
    "minimax_m2": GgufCase(
        "minimax-m2",
        CASES["minimax_m2"].config,
        HEADS
        | {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40, "expert_gating_func": 2}
        | {"rope.dimension_count": 8},
        experts_apart,
    ),
    "ernie4_5_moe": GgufCase(
        "ernie4_5-moe",
        CASES["ernie4_5_moe"].config,
        ROUTED_KEYS
        | {"expert_shared_count": 2, "expert_shared_feed_forward_length": 64, "leading_dense_block_count": 1}
        | {"interleave_moe_layer_step": 1, "feed_forward_length": 128, "rope.dimension_count": 16},
        experts_apart,
    ),
    "exaone_moe": GgufCase(
        "exaone-moe",
        CASES["exaone_moe"].config,
        SIGMOID_KEYS
        | {"expert_shared_count": 2, "expert_shared_feed_forward_length": 64, "leading_dense_block_count": 2}
        | {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, True, True, False]}
        | {"nextn_predict_layers": 0, "rope.scaling.type": "none"},
        experts_apart,
    ),
    "lfm2": GgufCase(
        "lfm2", LFM2, {"attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3}, short_convolutions
    ),
    "lfm2_moe": GgufCase(
        "lfm2moe",
        CASES["lfm2_moe"].config,
        {"attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3, "feed_forward_length": 96}
        | {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 32}
        | {"leading_dense_block_count": 1, "expert_gating_func": 2},
        short_convolutions,
    ),
    "mimo_v2_flash": GgufCase(
        "mimo2",
        CASES["mimo_v2_flash"].config,
        ROUTED_KEYS
        | {"attention.head_count_kv": [1, 2, 2], "attention.key_length": 24, "attention.value_length": 16}
        | {"attention.sliding_window": 9, "attention.sliding_window_pattern": [False, True, True]}
        | {"rope.dimension_count": 8, "rope.freq_base_swa": 1e3, "attention.value_scale": 0.707},
        named_sinks,
    ),
    "hunyuan_moe": GgufCase(
        "hunyuan-moe",
        CASES["hunyuan_moe"].config,
        {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 48, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 48},
        experts_apart,
    ),
    "sarvam_moe": GgufCase(
        "bailingmoe2",
        CASES["sarvam_moe"].config | {"rotary_dim": 8},
        SIGMOID_KEYS | {"expert_shared_count": 1, "expert_shared_feed_forward_length": 32, "rope.dimension_count": 8},
        TogetherQkv(),
    ),
    "mamba": GgufCase("mamba", CASES["mamba"].config, SCAN_KEYS | {"ssm.time_step_rank": 4}, scans),
    "falcon_mamba": GgufCase(
        "mamba",
        CASES["falcon_mamba"].config | {"scan_eps": 1e-5},
        SCAN_KEYS | {"ssm.time_step_rank": 4, "ssm.dt_b_c_rms": True},
        scans,
    ),
    "mamba2": GgufCase(
        "mamba2",
        CASES["mamba2"].config | {"groups": 4, "tied": True},
        SCAN_KEYS | {"ssm.time_step_rank": 8, "ssm.group_count": 4},
        scans,
    ),
    "gpt2": GgufCase("gpt2", LEARNED | {"family": "gpt2", "activation": "gelu_tanh"}, {LAYER: 1e-5}, by_columns),
    "mpt": GgufCase("mpt", MPT, {LAYER: 1e-5, "attention.max_alibi_bias": 8.0}, as_it_is),
}
NEITHER = {LAYER: 1e-5, "attention.causal": False}
GGUF_ENCODERS = {
    "bert": GgufCase("bert", ENCODERS["bert"].config, NEITHER | {"pooling_type": 2}, as_it_is),
    "roberta": GgufCase("bert", ENCODERS["roberta"].config, NEITHER | {"pooling_type": 1}, without_padding),
}
_COMMON = {"context_length": "max_position", "embedding_length": "width", "block_count": "layers"}
_COMMON |= {"feed_forward_length": "ffn", "attention.head_count": "heads"}


def write(path: Path, model: Any, case: GgufCase, form: Any = None) -> Path:
    """The weights of a model of transformers in float32. form: the GGMLQuantizationType of matrices, if another."""
    import gguf

    writer = gguf.GGUFWriter(str(path), case.architecture)
    keys: dict[str, GgufValue] = {key: case.config[ours] for key, ours in _COMMON.items()}
    if LAYER not in case.keys:
        keys |= {"attention.head_count_kv": case.config["kv_heads"], RMS: BASE["norm_eps"], "rope.freq_base": 1e4}
    for key, value in (keys | case.keys).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds |= {str: writer.add_string, list: writer.add_array}
        kinds[type(value)](f"{case.architecture}.{key}", value)
    scaling = case.config["rope_scaling"] or {}
    for key in {"short_factor", "long_factor"} & scaling.keys():
        writer.add_tensor(f"rope_factors_{key.removesuffix('_factor')}.weight", np.array(scaling[key], np.float32))
    for name, values in tensors(model, case):
        if form is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: Any, case: GgufCase) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 values) of each tensor, by the gguf package's own table of names."""
    import gguf

    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(number, case.config["layers"])
    for key, tensor in model.state_dict().items():
        if (key == "lm_head.weight" and case.config["tied"]) or key.startswith("pooler."):
            continue
        made = case.values(key, tensor.numpy().astype(np.float32), case.config)
        for each, values in [(key, made)] if isinstance(made, np.ndarray) else made:
            name = (
                each
                if each.startswith(("blk.", "rope_freqs.", "altup_"))
                else names.get_name(each, try_suffixes=(".weight", ".bias"))
            )
            assert name is not None, each
            yield name, np.ascontiguousarray(values)
