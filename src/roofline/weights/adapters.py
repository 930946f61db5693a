"""LoRA adapters in the files of PEFT (0.21.2): adapter_config.json and adapter_model.safetensors."""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.fields import describe, refuse, shorten
from roofline.common.files import read_regular
from roofline.common.json_files import parse_object
from roofline.common.json_types import JsonObject
from roofline.ops import formats
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.files.safetensors import SafetensorsFile
from roofline.weights.names import matrix_from_hf

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 512
_NAME = re.compile(r"base_model\.model\.([\w.]{1,200})\.lora_([AB])\.weight")
_FLOATS = ("F32", "F16", "BF16")
# Said of the training, or of where the files come from; what is adapted, the tensors themselves say.
_SAYS_NOTHING = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("eva_config", "qalora_group_size", "runtime_config", "task_type", "ensure_weight_tying"),
    )
)
_HONOURED = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights")
# Beginnings that leave the model's own weights as they are; others are differences from a model that was changed.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_TASKS = (None, "CAUSAL_LM")


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its files say: matrices by the names of our tensors, with rows in Hugging Face's order.

    digest: SHA-256 (hex) of what it computes: equal digests, equal results; rank: the largest of its matrices; nbytes:
    of its matrices in memory, as float32.
    """

    path: Path
    digest: str
    rank: int
    matrices: tuple[AdapterMatrix, ...]
    nbytes: int


def read_adapter(folder: str | Path, max_bytes: int | None = None) -> Adapter:
    """Read a folder with PEFT's two files.

    max_bytes: that its matrices may take in memory. Raises ConfigError naming file and field for what is malformed,
    UnsupportedError for what adapters may have and ours not, CapacityError for one that is too large.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    config_path = folder / CONFIG
    config = parse_object(config_path, read_regular(config_path, MAX_CONFIG_BYTES))
    rank, scale = _rank_and_scale(config_path, config)
    file = SafetensorsFile(folder / WEIGHTS)
    pairs = _pairs(file, rank)
    elements = sum(math.prod(file.tensors[name].shape) for pair in pairs.values() for name in pair.values())
    if max_bytes is not None and 4 * elements > max_bytes:
        raise too_large(folder, 4 * elements, max_bytes)
    matrices = tuple(_matrix(file, tensor, pair, scale) for tensor, pair in sorted(pairs.items()))
    return Adapter(folder, _digest(matrices), rank, matrices, 4 * elements)


def too_large(folder: str | Path, nbytes: int, left: int) -> CapacityError:
    """For an adapter with more bytes in memory than are left for it."""
    remedy = "Unload another adapter, or raise the limit adapter_bytes (--adapter-bytes)."
    return CapacityError(f"the adapter {folder}", nbytes, left, "bytes", remedy)


def _rank_and_scale(path: Path, config: JsonObject) -> tuple[int, float]:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type {describe(kind)}", "only LoRA adapters are served", ("LORA",))
    for field, value in config.items():
        if field not in _HONOURED and field not in _SAYS_NOTHING and value not in (None, False, "", [], {}):
            reason = f"{describe(value)} would change what the adapter computes, and it is not computed here"
            raise UnsupportedError(f"{path}: {shorten(field)}", reason)
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: bias {describe(config['bias'])}", "biases are not adapted", ("none",))
    if (init := config.get("init_lora_weights", True)) not in _INITS:
        reason = "its matrices are differences from a model whose weights it changed"
        raise UnsupportedError(f"{path}: init_lora_weights {describe(init)}", reason, ("convert it with PEFT",))
    if (task := config.get("task_type")) not in _TASKS:
        raise UnsupportedError(f"{path}: task_type {describe(task)}", "models here generate text", ("CAUSAL_LM",))
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        refuse(path, "r", f"is {describe(rank)}, not a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < abs(alpha) < 1e6:
        refuse(path, "lora_alpha", f"is {describe(alpha)}, not a number other than 0 below a million")
    if not isinstance(rslora, bool):
        refuse(path, "use_rslora", f"is {describe(rslora)}, not true or false")
    return rank, float(alpha) / (math.sqrt(rank) if rslora else rank)


def _pairs(file: SafetensorsFile, rank: int) -> dict[str, dict[str, str]]:
    """Our tensor -> {"A": name in the file, "B": ...}, with shapes that fit the rank."""
    pairs: dict[str, dict[str, str]] = {}
    for name, info in file.tensors.items():
        match = _NAME.fullmatch(name)
        tensor = matrix_from_hf(f"{match[1]}.weight") if match else None
        if match is None or tensor is None or not tensor.startswith("layers."):
            reason = "is no LoRA matrix of a linear layer in the model's blocks; nothing else is adapted here"
            raise UnsupportedError(f"{file.path}: tensor {shorten(name)!r}", reason)
        pairs.setdefault(tensor, {})[match[2]] = name
        if info.format not in _FLOATS:
            refuse(file.path, f"tensor {shorten(name)!r}", f"is {info.format}, not one of {', '.join(_FLOATS)}")
        if len(info.shape) != 2 or 0 in info.shape or info.shape["AB".index(match[2])] != rank:
            shape = "[r, inputs]" if match[2] == "A" else "[outputs, r]"
            refuse(file.path, f"tensor {shorten(name)!r}", f"has shape {list(info.shape)}, not {shape} with r = {rank}")
    for tensor, pair in pairs.items():
        if len(pair) != 2:
            refuse(file.path, tensor, f"lora_{'A' if 'B' in pair else 'B'} is missing")
    if not pairs:
        refuse(file.path, "tensors", "there are none")
    return pairs


def _matrix(file: SafetensorsFile, tensor: str, pair: dict[str, str], scale: float) -> AdapterMatrix:
    a, b = (_floats(file, pair[part]) for part in "AB")
    return AdapterMatrix(tensor, np.ascontiguousarray(a), np.ascontiguousarray(b.T), float(np.float32(scale)))


def _floats(file: SafetensorsFile, name: str) -> np.ndarray:
    """float32 [rows, columns]. Raises ConfigError for NaN and infinity."""
    info = file.tensors[name]
    values = formats.get(info.format).dequantize(file.read(name), info.shape)
    if not np.isfinite(values).all():
        refuse(file.path, f"tensor {shorten(name)!r}", "holds NaN or infinity")
    return values


def _digest(matrices: tuple[AdapterMatrix, ...]) -> str:
    digest = hashlib.sha256()
    for matrix in matrices:
        facts = f"{matrix.tensor} {matrix.a.shape} {matrix.b.shape} {matrix.scale.hex()}\n"
        digest.update(facts.encode() + matrix.a.tobytes() + matrix.b.tobytes())
    return digest.hexdigest()
