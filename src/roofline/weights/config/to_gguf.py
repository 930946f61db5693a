"""The canonical configuration -> GGUF metadata: the inverse of `config.gguf.from_gguf`, and checked against it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.models.registry import configure
from roofline.ops.rope_tables import RopeTable, frequencies
from roofline.weights.config.gguf import from_gguf
from roofline.weights.files.mapped import JsonObject

# (family, bias on q, k, v, norms of q and k) -> architecture, and whether its files hold the rows of q and k in pairs.
_ARCHITECTURES = {
    ("llama", False, False): ("llama", True),
    ("llama", True, False): ("llama", True),
    ("qwen", True, False): ("qwen2", False),
    ("qwen", False, True): ("qwen3", False),
}
_KEYS = {
    "block_count": "layers",
    "context_length": "max_position",
    "embedding_length": "width",
    "feed_forward_length": "ffn",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab",
}
_ROPE_KEYS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_SAME = 1e-6  # relative difference of frequencies that float32 numbers in the file bring


def architecture(config: JsonObject) -> tuple[str, bool]:
    """What GGUF files call the architecture of a configuration, and whether they hold the rows of its q and k in pairs
    (rope_style "interleaved"). Raises UnsupportedError where they have no name for it."""
    known = _ARCHITECTURES.get((config["family"], bool(config["attention_bias"]), bool(config["qk_norm"])))
    if known is None:
        reason = "there is no architecture of that kind in the files that we write"
        raise UnsupportedError(f"a GGUF file of a {config['family']} model", reason, ("safetensors",))
    return known


def to_gguf(config: JsonObject, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, object], np.ndarray | None]:
    """The metadata of the architecture, and the tensor rope_freqs.weight (float32 [head_dim / 2]) where there is one.

    shapes: canonical name -> shape of the parameters.

    Raises UnsupportedError where a file with this metadata would be read as another configuration.
    """
    arch, interleaved = architecture(config)
    values: dict[str, object] = {key: config[ours] for key, ours in _KEYS.items()}
    values["attention.layer_norm_rms_epsilon"] = _float32(config["norm_eps"])
    values["rope.freq_base"] = _float32(config["rope_theta"])
    if config["sliding_window"] is not None:
        values["attention.sliding_window"] = config["sliding_window"]
    scaling = dict(config["rope_scaling"] or {})
    kind = scaling.pop("rope_type", None)
    factors = None
    if kind == "llama3":
        factors = _llama3_factors(config)
    elif kind is not None:
        values["rope.scaling.type"] = kind
        values |= {_ROPE_KEYS[key]: _rope_value(key, value) for key, value in scaling.items() if key in _ROPE_KEYS}
    metadata: dict[str, object] = {"general.architecture": arch, "general.type": "model"}
    metadata |= {f"{arch}.{key}": value for key, value in values.items()}
    _check(config, from_gguf(Path("the GGUF file"), metadata, shapes, factors), interleaved)
    return metadata, factors


def _float32(value: float) -> float:
    return float(np.float32(value))


def _rope_value(key: str, value: float) -> int | float:
    return int(value) if key == "original_max_position_embeddings" and value == int(value) else _float32(value)


def _llama3_factors(config: JsonObject) -> np.ndarray:
    """What each frequency is divided by."""
    scaled, _ = frequencies(RopeTable.of(config["head_dim"], config["rope_theta"], "half", config["rope_scaling"]))
    plain, _ = frequencies(RopeTable.of(config["head_dim"], config["rope_theta"], "half", None))
    return (plain / scaled).astype(np.float32)


def _check(config: JsonObject, read: JsonObject, interleaved: bool) -> None:
    """Raise UnsupportedError unless a configuration that was read back computes the same."""
    (_, before), (_, after) = configure(config), configure(read)
    rope = before.rope, after.rope
    (ours, our_factor), (theirs, their_factor) = frequencies(rope[0]), frequencies(rope[1])
    same_rope = ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=_SAME, atol=0)
    same_rope = same_rope and bool(np.isclose(our_factor, their_factor, rtol=_SAME))
    alike = {
        "norm_eps": _float32(before.norm_eps),
        "rope_theta": _float32(before.rope_theta),
        "rope_style": "interleaved" if interleaved else "half",
        "rope_scaling": after.rope_scaling if same_rope else before.rope_scaling,
    }
    expected = replace(before, **alike)  # type: ignore[arg-type]  # mypy joins the types of the values
    for name, value in vars(expected).items():
        if getattr(after, name) != value or not same_rope:
            field = name if same_rope else "rope_scaling"
            what = f"{field} = {getattr(before, field)!r} in a GGUF file"
            raise UnsupportedError(what, "it would be read back as another value", ("safetensors",))
