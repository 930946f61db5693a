"""Named shapes to train and to measure: MPT as MosaicML benchmarked it, MPT as it was released, and Llama."""

from collections.abc import Mapping
from typing import Any

from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.models.registry import configure
from roofline.models.spec import expand

# name -> width, heads, layers. Source: LLM Foundry's pretraining configurations, 2023.
_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
# name -> the columns that `_llama` names.
# Sources: Touvron et al. 2023a and b, Grattafiori et al. 2024, and the configurations published with the weights.
_LLAMA: dict[str, tuple[int, int, int, int, int, int, int, int, float, bool]] = {
    "llama-7b": (4096, 32, 32, 128, 11008, 32, 32000, 2048, 1e4, False),
    "llama-13b": (5120, 40, 40, 128, 13824, 40, 32000, 2048, 1e4, False),
    "llama-30b": (6656, 52, 52, 128, 17920, 60, 32000, 2048, 1e4, False),
    "llama-65b": (8192, 64, 64, 128, 22016, 80, 32000, 2048, 1e4, False),
    "llama-2-7b": (4096, 32, 32, 128, 11008, 32, 32000, 4096, 1e4, False),
    "llama-2-13b": (5120, 40, 40, 128, 13824, 40, 32000, 4096, 1e4, False),
    "llama-2-70b": (8192, 64, 8, 128, 28672, 80, 32000, 4096, 1e4, False),
    "llama-3-8b": (4096, 32, 8, 128, 14336, 32, 128256, 8192, 5e5, False),
    "llama-3-70b": (8192, 64, 8, 128, 28672, 80, 128256, 8192, 5e5, False),
    "llama-3.2-1b": (2048, 32, 8, 64, 8192, 16, 128256, 131072, 5e5, True),
    "llama-3.2-3b": (3072, 24, 8, 128, 8192, 28, 128256, 131072, 5e5, True),
    "tinyllama-1.1b": (2048, 32, 4, 64, 5632, 22, 32000, 2048, 1e4, False),
    "smollm2-135m": (576, 9, 3, 64, 1536, 30, 49152, 8192, 1e5, True),
    "smollm2-360m": (960, 15, 5, 64, 2560, 32, 49152, 8192, 1e5, True),
    "smollm2-1.7b": (2048, 32, 32, 64, 8192, 24, 49152, 8192, 1.3e5, True),
}
_LLAMA_3_2_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3_2_ROPE |= {"original_max_position_embeddings": 8192}
_COMMON: dict[str, object] = {"rope_scaling": None, "rope_style": "half", "attention_bias": False}
_COMMON |= {"qk_norm": False, "sliding_window": None}


def names() -> tuple[str, ...]:
    """All of them: mpt-SIZE is the benchmark form, mpt-SIZE-alibi the released one."""
    return (*(f"mpt-{size}" for size in _MPT), *(f"mpt-{size}-alibi" for size in _MPT), *_LLAMA)


def preset(name: str) -> dict[str, Any]:
    """The canonical configuration of a name, as `models.registry.configure` takes it. Raises ConfigError."""
    if name not in names():
        raise ConfigError(unknown("model preset", name, names()))
    return _llama(name) if name in _LLAMA else _mpt(*name.removeprefix("mpt-").partition("-")[::2])


def parameter_count(config: Mapping[str, object]) -> int:
    """Parameters of a configuration, tied ones once."""
    family, cfg = configure(config)
    shapes = [param.shape for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)


def _mpt(size: str, form: str) -> dict[str, object]:
    width, heads, layers = _MPT[size]
    released = form == "alibi"
    shape = {"width": width, "layers": layers, "heads": heads, "kv_heads": heads, "head_dim": width // heads}
    sizes = {"ffn": 4 * width, "vocab": 50432 if released else 50368, "max_position": 2048, "tied": True}
    constants = {"norm_eps": 1e-5, "rope_theta": 1e4}
    positions = {"positions": "alibi" if released else "learned", "bias": not released}
    return _COMMON | {"family": "mpt"} | shape | sizes | constants | positions


def _llama(name: str) -> dict[str, object]:
    columns = ("width", "heads", "kv_heads", "head_dim", "ffn", "layers", "vocab", "max_position", "rope_theta", "tied")
    row = dict(zip(columns, _LLAMA[name], strict=True))
    first_generation = name in ("llama-7b", "llama-13b", "llama-30b", "llama-65b")
    scaling = {"rope_scaling": _LLAMA_3_2_ROPE} if name.startswith("llama-3.2") else {}
    return _COMMON | {"family": "llama", "norm_eps": 1e-6 if first_generation else 1e-5} | row | scaling
