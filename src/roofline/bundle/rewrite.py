"""A checkpoint written anew: as a GGUF file, with its tokenizer, in any kind of file that `mixes` has, or as a folder
of safetensors."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roofline.bundle.recommended import gguf_sampling, hf_sampling, recommended_sampling
from roofline.bundle.text_side import load_text
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.mixes import MIXES, formats_of, stays_float
from roofline.ops import formats
from roofline.weights import names
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.config.to_gguf import form_of, to_gguf
from roofline.weights.families.shared.tensor_names import without_expert
from roofline.weights.families.table import files_of
from roofline.weights.files.gguf_parts import GGUFModel
from roofline.weights.files.gguf_writer import file_bytes, header, write_tensors
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.files.output import check_new, new_file, new_folder
from roofline.weights.gguf_tensors import gguf_tensors
from roofline.weights.hf_values import as_theirs, differs, hf_shape
from roofline.weights.quantise.calibration import Calibration
from roofline.weights.quantise.tensors import Target, is_quantised, pieces

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate

Progress = Callable[[int, int], None]  # values that are done, and all
_QUANTIZATION_VERSION = 2  # of ggml's block layouts
_DROPPED = ("general.alignment", "split.")  # of a file that is written anew


@dataclass(frozen=True)
class Rewritten:
    """What was written. nbytes: of the file or folder; values: weights in it; tensors: format -> how many have it."""

    path: Path
    nbytes: int
    values: int
    tensors: Mapping[str, int]

    @property
    def bits(self) -> float:
        """Bits a weight takes."""
        return 8 * self.nbytes / self.values


@dataclass(frozen=True)
class Work:
    """How it is written. threads: that round; progress: told how far; calibration: what a text said of its matrices."""

    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    progress: Progress = lambda done, total: None
    calibration: Calibration = field(default_factory=Calibration)


def quantised_tensors(checkpoint: Checkpoint) -> list[str]:
    """The tensors of a checkpoint that have lost bits already."""
    return [name for name, info in checkpoint.tensors.items() if is_quantised(info.format)]


def own_formats(checkpoint: Checkpoint) -> dict[str, str]:
    """The formats that a GGUF file has of a checkpoint that is not rounded: vectors and scores of routers in F32."""
    return {
        name: "F32" if len(info.shape) < 2 or stays_float(name) else info.format
        for name, info in checkpoint.tensors.items()
    }


def write_gguf(checkpoint: Checkpoint, out: Path, mix: str, work: Work) -> Rewritten:
    """Write a checkpoint as a GGUF file of a kind. mix: a name of `mixes.MIXES`, or "" for the formats it has.

    Raises:
        ConfigError, CapacityError: the place cannot be written (see `weights.files.output`); a value cannot be rounded.
        UnsupportedError: a GGUF file cannot express the model or its tokenizer.
    """
    check_new(out, 0)  # before what takes longer
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    kinds = formats_of(mix, shapes) if mix else own_formats(checkpoint)
    target = Target(kinds, form_of(checkpoint.config).rope_style, work.calibration)
    metadata, factors = _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_others(checkpoint, shapes)
    metadata["general.file_type"] = MIXES[mix or _kind_of(kinds)].number
    if any(is_quantised(form) for form in kinds.values()):
        metadata["general.quantization_version"] = _QUANTIZATION_VERSION
    tensors = gguf_tensors(checkpoint.config, target.infos(checkpoint))
    infos, parts = [tensor.info for tensor in tensors], {tensor.info.name: tensor.parts for tensor in tensors}
    if factors is not None:
        infos.append(TensorInfo(names.GGUF_ROPE_FACTORS, "F32", factors.shape, factors.nbytes))
    head = header(metadata, infos)
    size = file_bytes(head, infos)

    with _rounding(checkpoint, target, work) as of_tensor:

        def tensor_pieces(info: TensorInfo) -> Iterator[np.ndarray]:
            if info.name == names.GGUF_ROPE_FACTORS:
                assert factors is not None, "it is in the list with them"
                yield factors.astype("<f4").view(np.uint8)
            else:
                for name in parts[info.name]:
                    yield from of_tensor(name)

        with new_file(out, size) as stream:
            stream.write(head)
            write_tensors(stream, infos, tensor_pieces)
    return _rewritten(out, size, infos)


def write_safetensors(checkpoint: Checkpoint, out: Path, dtype: str, work: Work) -> Rewritten:
    """Write a checkpoint as a folder that transformers and we load.

    dtype: of what is not in 16 or 32 bits yet, "F32", "F16" or "BF16"; "": nothing is expected to be.

    Raises as `write_gguf`.
    """
    from roofline.text.tokenizers.to_json import to_json
    from roofline.weights.files import safetensors_writer
    from roofline.weights.to_hf import checked_hf_config

    check_new(out, 0)
    family = checkpoint.config["family"]
    if files_of(family).NAMES.hf_joined is not None:
        reason = "its files hold the experts of a layer in one tensor, and this writes tensor by tensor"
        raise UnsupportedError(f"safetensors of a {family} model", reason)
    if any(".experts." in name and not without_expert(name)[1] for name in checkpoint.tensors):
        reason = "it holds the experts of a layer in one tensor, safetensors have a tensor each, and this splits none"
        raise UnsupportedError(f"safetensors of {checkpoint.path.name}", reason)
    kinds = _hf_formats(checkpoint, dtype)
    target = Target(kinds, "half")
    config = checked_hf_config(checkpoint.config, _matrix_format(kinds, checkpoint))
    tokenizer, template = load_text(checkpoint)
    files = to_json(tokenizer, _source(template), hf_sampling(recommended_sampling(checkpoint)))
    ours = {names.to_hf(family, name): name for name in checkpoint.tensors}
    written = {info.name: info for info in target.infos(checkpoint)}
    infos = [
        replace(info, name=names.to_hf(family, name), shape=hf_shape(checkpoint.config, name, info.shape))
        for name, info in written.items()
    ]
    size = sum(info.nbytes for info in infos) + sum(map(len, files.values()))
    with _rounding(checkpoint, target, work) as of_tensor, new_folder(out, size) as folder:
        import json

        files["config.json"] = (json.dumps(config, indent=1) + "\n").encode()
        for name, data in files.items():
            (folder / name).write_bytes(data)

        def theirs(info: TensorInfo) -> Iterator[np.ndarray]:
            name = ours[info.name]
            return _as_theirs(checkpoint.config, written[name], of_tensor(name))

        safetensors_writer.write_tensors(folder, infos, theirs)
    return _rewritten(out, size, infos)


@contextmanager
def _rounding(checkpoint: Checkpoint, target: Target, work: Work) -> Iterator[Callable[[str], Iterator[np.ndarray]]]:
    """Gives the pieces of a tensor by its canonical name; threads round them."""
    total = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        work.progress(done, total)

    with ThreadPoolExecutor(work.threads) as pool:
        yield lambda name: pieces(checkpoint, name, target, pool, told)


def _as_theirs(config: JsonObject, info: TensorInfo, parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes of a parameter as Hugging Face's files have them; as a whole where they differ from ours."""
    if not differs(config, info.name):
        yield from parts
        return
    data = b"".join(part.tobytes() for part in parts)
    yield np.frombuffer(as_theirs(config, info.name, info.shape, data, info.format), np.uint8)


def _rewritten(path: Path, size: int, infos: list[TensorInfo]) -> Rewritten:
    values = sum(int(np.prod(info.shape)) for info in infos)
    return Rewritten(path, size, values, Counter(info.format for info in infos))


def _from_gguf(checkpoint: Checkpoint) -> tuple[dict[str, object], np.ndarray | None]:
    """The metadata of a GGUF file as it is, and its divisors of the rope frequencies."""
    metadata = {key: value for key, value in checkpoint.metadata.items() if not key.startswith(_DROPPED)}
    file = GGUFModel(checkpoint.path)
    if names.GGUF_ROPE_FACTORS not in file.tensors:
        return metadata, None
    info = file.tensors[names.GGUF_ROPE_FACTORS]
    return metadata, formats.get(info.format).dequantize(file.read(info.name), info.shape)


def _from_others(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, object], np.ndarray | None]:
    from roofline.text.tokenizers.to_gguf import to_gguf as tokenizer_to_gguf

    metadata, factors = to_gguf(checkpoint.config, shapes)
    metadata["general.name"] = checkpoint.path.name or "model"
    metadata |= gguf_sampling(recommended_sampling(checkpoint))
    tokenizer, template = load_text(checkpoint)
    metadata |= tokenizer_to_gguf(tokenizer, checkpoint.config["vocab"], _source(template))
    return metadata, factors


def _source(template: "ChatTemplate") -> str | None:
    return None if template.is_default else template.source


def _kind_of(kinds: Mapping[str, str]) -> str:
    """The kind of file whose matrices have the format that most of these have."""
    counts = Counter(form for form in kinds.values() if form in MIXES)
    matrices = [form for form, _ in counts.most_common() if form != "F32"]
    return matrices[0] if matrices else "F32"


def _matrix_format(kinds: Mapping[str, str], checkpoint: Checkpoint) -> str:
    matrices = Counter(kinds[name] for name, info in checkpoint.tensors.items() if len(info.shape) > 1)
    return matrices.most_common(1)[0][0]


def _hf_formats(checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
    """Plain formats stay; a vector that a GGUF file widened to F32 gets the format of the matrices again, where it
    holds all of its values."""
    kinds = {}
    for name, info in checkpoint.tensors.items():
        if is_quantised(info.format):
            if not dtype:
                raise ConfigError(f"{checkpoint.path}: tensor {name!r} is {info.format}, which safetensors do not hold")
            kinds[name] = dtype
        else:
            kinds[name] = info.format
    matrix = _matrix_format(kinds, checkpoint)
    for name, info in checkpoint.tensors.items():
        if len(info.shape) < 2 and info.format == "F32" and matrix != "F32":
            values = checkpoint.dequantize(name)
            form = formats.get(matrix)
            if np.array_equal(form.dequantize(form.quantize(values), info.shape), values):
                kinds[name] = matrix
    return kinds
