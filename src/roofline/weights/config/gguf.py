"""GGUF metadata -> the canonical configuration.

Keys of the architecture that are not listed here may change the mathematics, and are refused by name.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.models.registry import file_kind, known_like
from roofline.weights.config.canonical import Config, checked, checked_rope_scaling
from roofline.weights.files.mapped import JsonObject, refuse, shorten

# Architecture -> family, rope style (converters permute Llama's q and k rows), bias on q, k, v, norms on q and k.
_ARCHITECTURES: dict[str, tuple[str, str, bool, bool]] = {
    "llama": ("llama", "interleaved", False, False),
    "qwen2": ("qwen", "half", True, False),
    "qwen3": ("qwen", "half", False, True),
}
_REQUIRED = {
    "block_count": "layers",
    "embedding_length": "width",
    "feed_forward_length": "ffn",
    "attention.head_count": "heads",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "context_length": "max_position",
}
_READ = {
    *_REQUIRED,
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("vocab_size", "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
# Keys that change nothing at these values (the first is what a converter writes by default).
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "rope.scaling.finetuned": (True, False),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    **dict.fromkeys(("expert_count", "expert_used_count"), (0,)),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0.0,)),
    "logit_scale": (0.0, 1.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0,)),
    "tensor_data_layout": ("Meta AI original pth",),
}


def from_gguf(
    path: Path, metadata: JsonObject, shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> Config:
    """The canonical configuration of a GGUF file.

    Args:
        shapes: canonical parameter name -> shape; says the vocabulary's size and whether the head is tied.
        rope_factors: float32 [head_dim / 2] of the tensor rope_freqs.weight (Llama 3.1), if there is one.

    Raises ConfigError for missing and bad fields, UnsupportedError for architectures and features we do not have.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        refuse(path, "general.architecture", "is missing")
    registered = file_kind("gguf", arch)
    if arch not in _ARCHITECTURES and registered is None:
        what = f"{path}: architecture {shorten(arch)!r}"
        raise UnsupportedError(what, "we have no model for it", tuple(_ARCHITECTURES))
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedError(f"{path}: a GGUF in several files", "we read single files", ("gguf-split --merge",))
    _refuse_unknown(path, metadata, arch)
    family, style, bias, qk_norm = _ARCHITECTURES[known_like(registered[1], _ARCHITECTURES) if registered else arch]
    family = registered[0] if registered else family
    config: Config = {"family": family, "rope_style": style, "attention_bias": bias, "qk_norm": qk_norm}
    for key, name in _REQUIRED.items():
        if f"{arch}.{key}" not in metadata:
            refuse(path, f"{arch}.{key}", "is missing")
        config[name] = _uniform(path, f"{arch}.{key}", metadata[f"{arch}.{key}"])
    kv_heads = f"{arch}.attention.head_count_kv"
    config["kv_heads"] = _uniform(path, kv_heads, metadata.get(kv_heads, config["heads"]))
    config["head_dim"] = _head_dim(path, metadata, arch, config)
    config["vocab"] = _vocab(path, metadata, arch, shapes)
    config["tied"] = "head.weight" not in shapes
    config["sliding_window"] = metadata.get(f"{arch}.attention.sliding_window") or None
    config["rope_theta"] = metadata.get(f"{arch}.rope.freq_base", 10000.0)
    config["rope_scaling"] = _rope_scaling(path, metadata, arch)
    config = checked(path, config)
    if rope_factors is not None:
        if config["rope_scaling"] is not None:
            refuse(path, "rope_freqs.weight", f"stands beside {arch}.rope.scaling.type; one of them is too many")
        config["rope_scaling"] = _llama3_of(path, rope_factors, config)
    return config


def _refuse_unknown(path: Path, metadata: JsonObject, arch: str) -> None:
    for key in metadata:
        if not key.startswith(f"{arch}."):
            continue
        field = key[len(arch) + 1 :]
        if field in _NEUTRAL:
            if metadata[key] not in _NEUTRAL[field]:
                what = f"{path}: {shorten(key)} = {shorten(str(metadata[key]))}"
                raise UnsupportedError(what, "it changes the mathematics and we do not have it")
        elif field not in _READ:
            raise UnsupportedError(f"{path}: {shorten(key)}", "we do not know what it does to the mathematics")


def _uniform(path: Path, field: str, value: object) -> object:
    """The one value of a field that may be an array with a value per layer."""
    if not isinstance(value, list):
        return value
    if not value or any(v != value[0] for v in value):
        raise UnsupportedError(f"{path}: {field} that differs between layers", "our layers are all alike")
    return value[0]


def _head_dim(path: Path, metadata: JsonObject, arch: str, config: JsonObject) -> int:
    heads, width = config["heads"], config["width"]
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        refuse(path, f"{arch}.attention.head_count", f"{heads!r} heads of a width of {width!r}")
    dim = metadata.get(f"{arch}.attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = metadata.get(f"{arch}.{key}", dim)
        if other != dim:
            raise UnsupportedError(f"{path}: {arch}.{key} = {other!r}", f"it differs from the head's dimension {dim!r}")
    return dim


def _vocab(path: Path, metadata: JsonObject, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    if "embed.weight" not in shapes:
        refuse(path, "token_embd.weight", "the tensor is missing")
    rows = shapes["embed.weight"][0]
    stated = metadata.get(f"{arch}.vocab_size", rows)
    if stated != rows:
        refuse(path, f"{arch}.vocab_size", f"{stated!r} is not the {rows} rows of token_embd.weight")
    return rows


def _rope_scaling(path: Path, metadata: JsonObject, arch: str) -> Config | None:
    rope = {key.removeprefix(f"{arch}.rope."): metadata[key] for key in metadata if key.startswith(f"{arch}.rope.")}

    legacy = rope.get("scale_linear")
    kind = rope.get("scaling.type") or ("none" if legacy in (None, 1.0) else "linear")
    if not isinstance(kind, str):
        refuse(path, f"{arch}.rope.scaling.type", f"{kind!r} is not a name")
    fields = {
        "factor": rope.get("scaling.factor") or legacy,
        "original_max_position_embeddings": rope.get("scaling.original_context_length"),
        "beta_fast": rope.get("scaling.yarn_beta_fast"),
        "beta_slow": rope.get("scaling.yarn_beta_slow"),
    }
    return checked_rope_scaling(path, kind, fields)


def _llama3_of(path: Path, factors: np.ndarray, config: JsonObject) -> Config | None:
    """The Llama 3.1 scaling whose frequency divisors a file carries.

    Converters evaluate the ramp and drop its parameters. In the ramp, 1 / divisor is linear in the frequency, so both
    ends can be solved for; scaling them and the original context together changes nothing, so 8192 (Llama 3.1's own) is
    taken for the context. The result is used only if it gives back every divisor.
    """
    half = config["head_dim"] // 2
    if factors.shape != (half,) or not np.isfinite(factors).all() or (factors <= 0).any():
        refuse(path, "rope_freqs.weight", f"is not {half} positive numbers")
    divisors = factors.astype(np.float64)
    if np.all(divisors == 1):
        return None
    original = 8192.0
    turns = original / (2 * math.pi) * config["rope_theta"] ** (-np.arange(half) / half)
    largest = float(divisors.max())
    candidates = [(1.0, 4.0)]
    inside = (divisors > 1.0001) & (divisors < largest * 0.9999)
    if largest > 1 and inside.sum() >= 2:
        smooth = (1 / divisors[inside] - 1 / largest) / (1 - 1 / largest)
        slope, offset = np.polyfit(turns[inside], smooth, 1)
        if slope > 0 > offset:
            candidates.append((-offset / slope, (1 - offset) / slope))
    for low, high in candidates:
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), divisors, rtol=1e-5, atol=0):
            ramp = {"factor": largest, "low_freq_factor": float(low), "high_freq_factor": float(high)}
            return checked_rope_scaling(path, "llama3", {**ramp, "original_max_position_embeddings": original})
    reason = "its divisors are not those of Llama 3.1's scaling"
    raise UnsupportedError(f"{path}: rope_freqs.weight", reason, ("a file with rope.scaling.* metadata",))
