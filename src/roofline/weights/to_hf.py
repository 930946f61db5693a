"""Writes a model in Hugging Face's layout: config.json and safetensors, which transformers and we load."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.weights.config import hf, mpt
from roofline.weights.files.mapped import JsonObject
from roofline.weights.files.safetensors import INDEX
from roofline.weights.names import to_hf

FILE_BYTES = 5 << 30  # of weights in a file
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def hf_config(config: JsonObject, dtype: str = "F32") -> dict[str, object]:
    """The config.json of a canonical configuration, which `config.hf.from_hf` reads back as the same."""
    kind = config["family"]
    common = {"tie_word_embeddings": config["tied"], "torch_dtype": _DTYPES[dtype]}
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
    fields: dict[str, object] = {
        "architectures": [f"{names[kind]}ForCausalLM"],
        "model_type": kind,
        **{theirs: config[ours] for theirs, ours in hf.REQUIRED.items()},
        "num_key_value_heads": config["kv_heads"],
        "head_dim": config["head_dim"],
        "rms_norm_eps": config["norm_eps"],
        "hidden_act": "silu",
        "rope_theta": config["rope_theta"],
        "rope_parameters": rope,
    }
    if config["rope_scaling"]:
        fields["rope_scaling"] = config["rope_scaling"]
    if kind == "llama":
        fields |= {"attention_bias": False, "mlp_bias": False}
    if kind == "mistral":
        fields["sliding_window"] = config["sliding_window"]
    return common | fields


def _mpt(config: JsonObject) -> dict[str, object]:
    """LLM Foundry's names; transformers' own MPT has neither rope nor grouped queries, gated MLPs or RMS norms."""
    positions, ratio = config["positions"], Fraction(config["ffn"], config["width"])
    attention: dict[str, object] = {"alibi": positions == "alibi", "alibi_bias_max": 8}
    if config["kv_heads"] != config["heads"]:
        attention |= {"attn_type": "grouped_query_attention", "kv_n_heads": config["kv_heads"]}
    if positions == "rope":
        attention |= {"rope": True, "rope_theta": config["rope_theta"]} | _mpt_rope(config)
    fields: dict[str, object] = {"norm_type": "low_precision_rmsnorm"} if config.get("rms") else {}
    if config.get("gated") or config.get("activation", "gelu") != "gelu":
        kind, activation = "mptglu" if config.get("gated") else "mptmlp", config.get("activation", "gelu")
        ffn = {"ffn_type": kind, "ffn_hidden_size": config["ffn"], "ffn_act_fn": mpt.ACTIVATIONS[activation]}
        fields["ffn_config"] = ffn
    return fields | {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        **{theirs: config[ours] for theirs, ours in mpt.REQUIRED.items()},
        "expansion_ratio": ratio.numerator if ratio.denominator == 1 else float(ratio),
        "max_seq_len": config["max_position"],
        "no_bias": not config["bias"],
        "learned_pos_emb": positions == "learned",
        "layer_norm_epsilon": config["norm_eps"],
        "attn_config": attention,
    }


def _mpt_rope(config: JsonObject) -> dict[str, object]:
    """What LLM Foundry calls the scaling of rope. Raises ConfigError where it has none such."""
    scaling = dict(config["rope_scaling"] or {"rope_type": "no_scaling"})
    kind = scaling.pop("rope_type")
    if kind not in ("no_scaling", "linear", "llama3") or config["rope_style"] != "half":
        what = f"rope scaling {kind!r} with rope_style {config['rope_style']!r}"
        raise ConfigError(f"an mpt model with {what} has no config.json that others read")
    return {"rope_impl": "dail" if kind == "no_scaling" else "hf", "rope_hf_config": {"type": kind, **scaling}}


def write_folder(
    folder: Path,
    config: JsonObject,
    tensors: Iterable[tuple[str, tuple[int, ...], bytes | np.ndarray]],
    dtype: str,
    other_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model into a new folder, which is complete once it exists.

    Args:
        tensors: canonical name, shape and little-endian bytes of `dtype` ("F32", "BF16", "F16").
        other_files: further files of the folder, such as the tokenizer's.

    Raises ConfigError where the folder is there already.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in (other_files or {}).items():
            write_atomically(part / name, data)
        write_atomically(part / "config.json", json.dumps(hf_config(config, dtype), indent=1) + "\n")
        _write_tensors(part, config["family"], tensors, dtype)
        part.chmod(0o755)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_tensors(
    folder: Path, family: str, tensors: Iterable[tuple[str, tuple[int, ...], bytes | np.ndarray]], dtype: str
) -> None:
    """Files of up to FILE_BYTES and, where these are several, the index that says where each tensor is."""
    files: list[list[str]] = []  # Hugging Face's names of the tensors in each file
    pending: list[tuple[str, tuple[int, ...], bytes]] = []
    size = total = 0

    def write_pending() -> None:
        files.append([name for name, _, _ in pending])
        _write_file(folder / f"part-{len(files):05d}", pending, dtype)
        pending.clear()

    for name, shape, data in tensors:
        raw = data if isinstance(data, bytes) else data.tobytes()
        if size and size + len(raw) > FILE_BYTES:
            write_pending()
            size = 0
        pending.append((to_hf(family, name), shape, raw))
        size, total = size + len(raw), total + len(raw)
    write_pending()
    if len(files) == 1:
        (folder / "part-00001").rename(folder / "model.safetensors")
        return
    placed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number:05d}").rename(folder / file)
        placed |= dict.fromkeys(names, file)
    described = {"metadata": {"total_size": total}, "weight_map": placed}
    write_atomically(folder / INDEX, json.dumps(described, indent=1) + "\n")


def _write_file(path: Path, tensors: list[tuple[str, tuple[int, ...], bytes]], dtype: str) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
