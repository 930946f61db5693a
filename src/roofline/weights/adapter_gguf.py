"""GGUF files of LoRA adapters, as llama.cpp's convert_lora_to_gguf.py writes them and its programs read them: matrices
NAME.lora_a [r, inputs] and NAME.lora_b [outputs, r] beside the name of the model's tensor, those of all experts of a
layer stacked in one; the scale is adapter.lora.alpha / r, or 1 where that is 0."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import Fields, describe, refuse, shorten
from roofline.ops.adapters import AdapterMatrix
from roofline.weights import names
from roofline.weights.adapter_config import MAX_RANK
from roofline.weights.adapter_matrices import each_alone, finite_values, rows_together, with_rows, with_value_heads
from roofline.weights.config.gguf import architecture
from roofline.weights.config.to_gguf import form_of
from roofline.weights.families.shared.tensor_names import EXPERT, without_expert
from roofline.weights.families.table import files_of
from roofline.weights.files.gguf import GGUFFile
from roofline.weights.files.gguf_writer import file_bytes, header, write_tensors
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.files.output import new_file

# Architectures whose rows of q and k converters permute.
PAIRED: tuple[str, ...] = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
PAIRED += ("smollm3", "mistral3", "arcee")
TILED = ("qwen35", "qwen35moe")  # architectures whose value heads converters move
_TENSOR = re.compile(r"(?P<matrix>[\w.]{1,200})\.lora_(?P<part>[ab])")
_FORMATS = ("F32", "F16", "BF16", "Q8_0")
_OF_VALUE_HEADS = re.compile(r"layers\.\d+\.linear\.\w+\.weight")
_QK = re.compile(r"layers\.\d+\.attn\.[qk]\.weight")
_ALPHA = "adapter.lora.alpha"
# Names of a task, and what llama-server tells of it: nothing that is computed.
_SAYS_NOTHING = ("adapter.lora.task_name", "adapter.lora.prompt_prefix")
_EXPERTS = ".mlp.experts."


class GgufAdapter:
    """An adapter's GGUF file, opened and checked. nbytes: of its matrices as float32.

    Raises ConfigError naming file and field for what is malformed, UnsupportedError for what such files may have and
    adapters of ours not.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        fields = Fields(path, self._file.metadata)
        if (kind := fields.need("general.type", str)) != "adapter":
            refuse(path, "general.type", f"is {describe(kind)}, not 'adapter': this is no adapter")
        self._architecture = architecture(path, self._file.metadata)
        if (kind := fields.need("adapter.type", str)) != "lora":
            raise UnsupportedError(f"{path}: adapter.type {describe(kind)}", "only LoRA adapters are served", ("lora",))
        for key, value in self._file.metadata.items():
            if key.startswith("adapter.") and key not in ("adapter.type", _ALPHA, *_SAYS_NOTHING):
                reason = f"{describe(value)} would change what the adapter computes, and it is not computed here"
                raise UnsupportedError(f"{path}: {shorten(key)}", reason)
        self._alpha = fields.get(_ALPHA, float, 0.0)
        if not abs(self._alpha) < 1e6:
            refuse(path, _ALPHA, f"is {describe(self._alpha)}, not a number below a million")
        self._pairs = self._named_pairs()
        used = [self._file.tensors[name] for pair in self._pairs.values() for name in pair.values()]
        self.nbytes = 4 * sum(math.prod(info.shape) for info in used)

    def matrices(self) -> Iterator[AdapterMatrix]:
        """By the names of our tensors, with the rows that the architecture's files have."""
        for tensor, pair in sorted(self._pairs.items()):
            a, b = (finite_values(self._file, pair[part]) for part in "ab")  # [(experts,) r, inputs], [.., outputs, r]
            scale = float(np.float32(self._alpha / a.shape[-2])) if self._alpha else 1.0
            paired = self._architecture in PAIRED and _QK.fullmatch(tensor) is not None
            tiled = self._architecture in TILED and _OF_VALUE_HEADS.fullmatch(tensor) is not None
            for name, down, up in zip(_each(tensor, a), _stacked(a), _stacked(b), strict=True):
                yield AdapterMatrix(
                    tensor=name,
                    a=np.ascontiguousarray(down),
                    b=np.ascontiguousarray(up.T),
                    scale=scale,
                    magnitude=None,
                    paired=paired,
                    tiled=tiled,
                )

    def _named_pairs(self) -> dict[str, dict[str, str]]:
        """Our tensor -> {"a": name in the file, "b": ...}, in shapes that fit each other."""
        pairs: dict[str, dict[str, str]] = {}
        path = self._file.path
        for name, info in self._file.tensors.items():
            match = _TENSOR.fullmatch(name)
            tensor = names.matrix_from_gguf(self._architecture, match["matrix"]) if match else None
            if match is None or tensor is None or not tensor.startswith("layers.") or not tensor.endswith(".weight"):
                reason = "is no LoRA matrix of a linear layer in the model's blocks; nothing else is adapted here"
                raise UnsupportedError(f"{path}: tensor {shorten(name)!r}", reason)
            if info.format not in _FORMATS:
                refuse(path, f"tensor {shorten(name)!r}", f"is {info.format}, not one of {', '.join(_FORMATS)}")
            pairs.setdefault(tensor, {})[match["part"]] = name
        if not pairs:
            refuse(path, "tensors", "there are none")
        for tensor, pair in pairs.items():
            if len(pair) != 2:
                refuse(path, tensor, f"lora_{'a' if 'b' in pair else 'b'} is missing")
            a, b = (self._file.tensors[pair[part]].shape for part in "ab")
            dims = 3 if _EXPERTS in tensor else 2
            if len(a) != dims or len(b) != dims or a[:-2] != b[:-2] or a[-2] != b[-1] or a[-2] > MAX_RANK:
                reason = f"lora_a is {list(a)} and lora_b {list(b)}: not [r, inputs] and [outputs, r] with r up to"
                refuse(path, tensor, f"{reason} {MAX_RANK}{', each behind the experts' if dims == 3 else ''}")
        return pairs


def is_gguf_adapter(path: Path) -> bool:
    """Whether a file is a GGUF file that says so."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            return False
    return GGUFFile(path).metadata.get("general.type") == "adapter"


def _stacked(values: np.ndarray) -> np.ndarray:
    return values if values.ndim == 3 else values[None]


def _each(tensor: str, a: np.ndarray) -> list[str]:
    if a.ndim == 2:
        return [tensor]
    before, _, after = tensor.rpartition(_EXPERTS)
    return [f"{before}{_EXPERTS}{number}.{after}" for number in range(len(a))]


@dataclass(frozen=True)
class _Written:
    """A tensor of the file, and its values as float32."""

    info: TensorInfo
    values: np.ndarray


def write_gguf_adapter(path: Path, config: JsonObject, matrices: Sequence[AdapterMatrix]) -> int:
    """Write an adapter of a model of that configuration for llama.cpp, in float32: how many bytes it has.

    Such files have one alpha. Where the scales of matrices are not that by their ranks, B carries the rest, rounded
    once.

    Raises ConfigError where the place cannot be written, UnsupportedError for DoRA and for what GGUF files have no
    names for.
    """
    if any(matrix.magnitude is not None for matrix in matrices):
        what = "a DoRA adapter as a GGUF file"
        raise UnsupportedError(what, "llama.cpp has no magnitudes", ("roofline merge, which writes a whole model",))
    form = form_of(config)
    paired = form.architecture in PAIRED
    files = files_of(config["family"]).NAMES
    in_order = (with_value_heads(matrix, config, files.gguf_tiles) for matrix in each_alone(matrices, config))
    matrices = list(rows_together(in_order, config, files.gguf_joined))
    alpha = _common_alpha(matrices)
    tensors: list[_Written] = []
    for name, group in _grouped(matrices).items():
        group = [with_rows(matrix, config, paired) for matrix in group]
        theirs = names.to_gguf(config["family"], name)
        a = np.stack([matrix.a for matrix in group])
        rests = [np.float32(matrix.scale * matrix.rank / alpha) for matrix in group]
        b = np.stack([matrix.b.T * rest for matrix, rest in zip(group, rests, strict=True)])
        if _EXPERTS not in name:
            a, b = a[0], b[0]
        tensors += [_written(f"{theirs}.lora_a", a), _written(f"{theirs}.lora_b", b)]
    metadata: dict[str, object] = {"general.architecture": form.architecture, "general.type": "adapter"}
    metadata |= {"adapter.type": "lora", _ALPHA: alpha, "general.file_type": 0}
    infos = [tensor.info for tensor in tensors]
    head = header(metadata, infos)
    values = {tensor.info.name: tensor.values for tensor in tensors}
    size = file_bytes(head, infos)
    with new_file(path, size) as stream:
        stream.write(head)
        write_tensors(stream, infos, lambda info: [values[info.name].reshape(-1).view(np.uint8)])
    return size


def _written(name: str, values: np.ndarray) -> _Written:
    values = np.ascontiguousarray(values, "<f4")
    return _Written(TensorInfo(name, "F32", values.shape, values.nbytes), values)


def _common_alpha(matrices: Sequence[AdapterMatrix]) -> float:
    """The alpha that most matrices have, as a float32 number."""
    counts: Mapping[float, int] = defaultdict(int)
    for matrix in matrices:
        counts[float(np.float32(matrix.scale * matrix.rank))] += 1  # type: ignore[index]
    return max(counts, key=lambda alpha: counts[alpha])


def _grouped(matrices: Sequence[AdapterMatrix]) -> dict[str, list[AdapterMatrix]]:
    """The matrices by the tensor of a GGUF file that they belong to; those of a layer's experts in their order."""
    groups: dict[str, dict[int, AdapterMatrix]] = {}
    for matrix in matrices:
        name, number = without_expert(matrix.tensor)
        groups.setdefault(name.replace(f"{EXPERT}.", ""), {})[int(number or 0)] = matrix
    for name, group in groups.items():
        ranks = {matrix.rank for matrix in group.values()}
        if sorted(group) != list(range(len(group))) or len(ranks) > 1:
            what = f"{name}: experts of ranks {sorted(ranks)}, numbers {sorted(group)}"
            raise ConfigError(f"{what}: a GGUF file has all experts of a layer in one tensor")
    return {name: [group[number] for number in sorted(group)] for name, group in groups.items()}
