"""A model written as Hugging Face writes them: config.json and safetensors, which transformers and we load."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.weights.files.safetensors import INDEX
from roofline.weights.names import to_hf

FILE_BYTES = 5 << 30  # of weights in a file
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def hf_config(config: Mapping[str, Any], dtype: str = "F32") -> dict[str, Any]:
    """The config.json of a canonical configuration: what `config_hf.from_hf` reads back as the same."""
    kind = config["family"]
    common = {"vocab_size": config["vocab"], "tie_word_embeddings": config["tied"], "torch_dtype": _DTYPES[dtype]}
    if kind == "mpt":
        return common | _mpt(config)
    if kind == "qwen":
        kind = "qwen3" if config["qk_norm"] else "qwen2"
    elif kind == "llama" and config["sliding_window"] is not None:
        kind = "mistral"
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if kind not in names:
        raise ConfigError(f"a {config['family']} model has no config.json that others read")
    rope = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    shape = {
        "architectures": [f"{names[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": config["width"],
        "num_hidden_layers": config["layers"],
        "num_attention_heads": config["heads"],
        "num_key_value_heads": config["kv_heads"],
        "head_dim": config["head_dim"],
        "intermediate_size": config["ffn"],
        "max_position_embeddings": config["max_position"],
        "rms_norm_eps": config["norm_eps"],
        "hidden_act": "silu",
        "rope_theta": config["rope_theta"],
        "rope_parameters": rope,
    }
    if config["rope_scaling"]:
        shape["rope_scaling"] = config["rope_scaling"]
    if kind == "llama":
        shape |= {"attention_bias": False, "mlp_bias": False}
    if kind == "mistral":
        shape["sliding_window"] = config["sliding_window"]
    return common | shape


def _mpt(config: Mapping[str, Any]) -> dict[str, Any]:
    alibi, ratio = config["positions"] == "alibi", Fraction(config["ffn"], config["width"])
    return {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "d_model": config["width"],
        "n_heads": config["heads"],
        "n_layers": config["layers"],
        "expansion_ratio": ratio.numerator if ratio.denominator == 1 else float(ratio),
        "max_seq_len": config["max_position"],
        "no_bias": not config["bias"],
        "learned_pos_emb": not alibi,
        "layer_norm_epsilon": config["norm_eps"],
        "attn_config": {"alibi": alibi, "alibi_bias_max": 8},
    }


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, tuple[int, ...], bytes | np.ndarray]],
    dtype: str,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a new folder; it is there whole or not at all.

    Args:
        tensors: canonical name, shape and little-endian bytes of `dtype` ("F32", "BF16", "F16").
        beside: other files of the folder, such as the tokenizer's.

    Raises ConfigError where the folder is there already.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in (beside or {}).items():
            write_atomically(part / name, data)
        write_atomically(part / "config.json", json.dumps(hf_config(config, dtype), indent=1) + "\n")
        _tensors(part, config["family"], tensors, dtype)
        part.chmod(0o755)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _tensors(folder: Path, family: str, tensors: Iterable[Any], dtype: str) -> None:
    groups: list[list[tuple[str, tuple[int, ...], bytes]]] = [[]]
    held = 0
    placed: list[tuple[str, int]] = []
    total = 0
    for name, shape, data in tensors:
        raw = data if isinstance(data, bytes) else data.tobytes()
        if held and held + len(raw) > FILE_BYTES:
            _file(folder / f"part-{len(groups):05d}", groups[-1], dtype)
            groups[-1] = []
            groups.append([])
            held = 0
        groups[-1].append((to_hf(family, name), shape, raw))
        placed.append((to_hf(family, name), len(groups)))
        held, total = held + len(raw), total + len(raw)
    _file(folder / f"part-{len(groups):05d}", groups[-1], dtype)
    if len(groups) == 1:
        (folder / "part-00001").rename(folder / "model.safetensors")
        return
    named = {i: f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)}
    for index, name in named.items():
        (folder / f"part-{index:05d}").rename(folder / name)
    described = {"metadata": {"total_size": total}, "weight_map": {name: named[at] for name, at in placed}}
    write_atomically(folder / INDEX, json.dumps(described, indent=1) + "\n")


def _file(path: Path, tensors: list[tuple[str, tuple[int, ...], bytes]], dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors:
            file.write(data)
