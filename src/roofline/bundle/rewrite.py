"""A checkpoint written anew: as a GGUF file, with its tokenizer, in any kind of file that `mixes` has, or as a folder
of safetensors."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roofline.bundle.recommended import gguf_sampling, hf_sampling, recommended_sampling
from roofline.bundle.text_side import load_text
from roofline.common.errors import ConfigError
from roofline.models.mixes import MIXES, formats_of, stays_float
from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.config.to_gguf import form_of, read_otherwise, to_gguf
from roofline.weights.families.shared.gguf_fields import GGUF_LONGROPE, GGUF_ROPE_FACTORS
from roofline.weights.families.table import files_of
from roofline.weights.files.gguf_parts import GGUFModel
from roofline.weights.files.gguf_writer import file_bytes, header, write_tensors
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.files.output import check_new, new_file, new_folder
from roofline.weights.gguf_form import with_heads
from roofline.weights.gguf_tensors import gguf_tensors
from roofline.weights.hf_tensors import HfTensor, hf_tensors, stored_together
from roofline.weights.hf_values import is_lacking_in
from roofline.weights.latent_form import latent_form
from roofline.weights.quantise.calibration import WeightCalibration
from roofline.weights.quantise.coverage import uncalibrated
from roofline.weights.quantise.file_form import calibrated_form
from roofline.weights.quantise.tensors import QuantiseTarget, is_quantised, pieces

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate

_QUANTIZATION_VERSION = 2  # of ggml's block layouts
_DROPPED = ("general.alignment", "split.")  # of a file that is written anew
Progress = Callable[[int, int], None]  # values that are done, and all


class OfTensor(Protocol):
    """The pieces of a tensor, or of rows of it, by its canonical name."""

    def __call__(self, name: str, rows: range | None = None) -> Iterator[np.ndarray]: ...


@dataclass(frozen=True)
class Rewritten:
    """What was written. nbytes: of the file or folder; values: weights in it; tensors: format -> how many have it;
    notes: what other programs do with it, and what of the model it has not."""

    path: Path
    nbytes: int
    values: int
    tensors: Mapping[str, int]
    notes: Sequence[str] = ()

    @property
    def bits(self) -> float:
        """Bits a weight takes."""
        return 8 * self.nbytes / self.values


@dataclass(frozen=True)
class RewriteWork:
    """How it is written. threads: that round; progress: told how far; calibration: what a text said of its matrices."""

    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    progress: Progress = lambda done, total: None
    calibration: WeightCalibration = field(default_factory=WeightCalibration)


def quantised_tensors(checkpoint: Checkpoint) -> list[str]:
    """The tensors of a checkpoint that have lost bits already."""
    return [name for name, info in checkpoint.tensors.items() if is_quantised(info.format)]


def without_place(checkpoint: Checkpoint, kind: str) -> list[str]:
    """The tensors whose format a kind of file, "GGUF" or "safetensors", does not have."""
    names = quantised_tensors(checkpoint)
    if kind == "GGUF":
        names = [name for name in names if formats.get(checkpoint.tensors[name].format).gguf_type < 0]
    return names


def with_guessing(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors of its layer that guesses further tokens among the others, as a file has them."""
    return replace(checkpoint, tensors={**checkpoint.tensors, **checkpoint.guessing})


def own_formats(checkpoint: Checkpoint) -> dict[str, str]:
    """The formats that a GGUF file has of a checkpoint that is not rounded: vectors and scores of routers in F32."""
    return {
        name: "F32" if len(info.shape) < 2 or stays_float(name) else info.format
        for name, info in checkpoint.tensors.items()
    }


def write_gguf(
    checkpoint: Checkpoint, out: Path, mix: str, work: RewriteWork, kinds: Mapping[str, str] | None = None
) -> Rewritten:
    """Write a checkpoint as a GGUF file of a kind.

    mix: a name of `mixes.MIXES`, or "" for the formats it has, or those of `kinds`, canonical name -> format.

    Raises:
        ConfigError, CapacityError: the place cannot be written (see `weights.files.output`); a value cannot be rounded.
        UnsupportedError: a GGUF file cannot express the model or its tokenizer.
    """
    check_new(out, 0)  # before what takes longer
    form = calibrated_form(with_guessing(checkpoint), work.calibration)
    checkpoint = form.checkpoint
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    if kinds is None:
        kinds = formats_of(mix, shapes) if mix else own_formats(checkpoint)
    kinds = own_formats(replace(checkpoint, tensors=checkpoint.guessing)) | dict(kinds)
    target = QuantiseTarget(kinds, form_of(checkpoint.config).rope_style, form.calibration)
    metadata, factors = _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_others(checkpoint, shapes)
    metadata |= guessing_layers(metadata, checkpoint)
    if mix or checkpoint.kind != "gguf":  # else the file it comes from says so
        metadata["general.file_type"] = MIXES[mix or _kind_of(kinds)].number
    if any(is_quantised(form) for form in kinds.values()):
        metadata["general.quantization_version"] = _QUANTIZATION_VERSION
    tensors = gguf_tensors(checkpoint.config, target.infos(checkpoint))
    infos, parts = [tensor.info for tensor in tensors], {tensor.info.name: tensor.parts for tensor in tensors}
    infos += [TensorInfo(name, "F32", values.shape, values.nbytes) for name, values in factors.items()]
    head = header(metadata, infos)
    size = file_bytes(head, infos)

    with _rounding(checkpoint, target, work) as of_tensor:

        def tensor_pieces(info: TensorInfo) -> Iterator[np.ndarray]:
            if info.name in factors:
                yield factors[info.name].astype("<f4").view(np.uint8)
            else:
                for name in parts[info.name]:
                    yield from of_tensor(name)

        with new_file(out, size) as stream:
            stream.write(head)
            write_tensors(stream, infos, tensor_pieces)
    notes = [*_left_out(checkpoint), *read_otherwise(checkpoint.config), *_splits_otherwise(checkpoint)]
    notes += uncalibrated(form, kinds) if work.calibration else []
    return _rewritten(out, size, infos, notes)


def write_safetensors(
    checkpoint: Checkpoint, out: Path, dtype: str, work: RewriteWork, kinds: Mapping[str, str] | None = None
) -> Rewritten:
    """Write a checkpoint as a folder that transformers and we load.

    dtype: of what is not in 16 or 32 bits yet, "F32", "F16" or "BF16"; "": nothing is expected to be; kinds: canonical
    name -> format, one of these; None: as `safetensors_formats` says.

    Raises as `write_gguf`.
    """
    from roofline.weights.files import safetensors_writer
    from roofline.weights.to_hf import checked_hf_config

    check_new(out, 0)
    checkpoint = latent_form(with_heads(with_guessing(checkpoint), tiled=False), latent=False)
    if kinds is None:
        kinds = safetensors_formats(checkpoint, dtype)
    kinds = _guessing_formats(checkpoint, kinds) | dict(kinds)
    config, rope_style = checked_hf_config(checkpoint.config, _matrix_format(kinds, checkpoint))
    target = QuantiseTarget(kinds, rope_style)
    files = tokenizer_as_files(checkpoint)
    table, layers = files_of(checkpoint.config["family"]).NAMES, checkpoint.config["layers"]
    config |= {table.hf_guessing_key: 1} if checkpoint.guessing and table.hf_guessing_key else {}
    tensors = {}
    narrower = _narrower(checkpoint, kinds)
    for tensor in hf_tensors(checkpoint.config, target.infos(checkpoint), narrower):
        name = table.by_itself(tensor.info.name, layers)
        tensors[name] = replace(tensor, info=replace(tensor.info, name=name))
    infos = [tensor.info for tensor in tensors.values()]
    size = sum(info.nbytes for info in infos) + sum(map(len, files.values()))
    with _rounding(checkpoint, target, work) as of_tensor, new_folder(out, size) as folder:
        import json

        files["config.json"] = (json.dumps(config, indent=1) + "\n").encode()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        safetensors_writer.write_tensors(folder, infos, lambda info: _made(tensors[info.name], of_tensor))
    return _rewritten(out, size, infos, _left_out(checkpoint))


def tokenizer_as_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the files by name that Hugging Face has of a model's tokenizer, template and sampling.

    Raises UnsupportedError where they would be read back as another tokenizer, ConfigError where there is none.
    """
    from roofline.text.tokenizers.to_json import to_json

    tokenizer, template = load_text(checkpoint)
    return to_json(tokenizer, _source(template), hf_sampling(recommended_sampling(checkpoint)))


def _made(tensor: HfTensor, of_tensor: OfTensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor of safetensors. In memory is a part of it at most, one expert of a joined tensor."""
    for part in tensor.parts:
        each = (of_tensor(rows.name, rows.rows) for rows in part)
        if tensor.made is None:
            yield from next(each)
        else:
            yield tensor.made([np.concatenate(list(pieces)) for pieces in each])


@contextmanager
def _rounding(checkpoint: Checkpoint, target: QuantiseTarget, work: RewriteWork) -> Iterator[OfTensor]:
    """Gives the pieces of a tensor, or of rows of it, by its canonical name; threads round them."""
    total = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        work.progress(done, total)

    with ThreadPoolExecutor(work.threads) as pool:
        yield lambda name, rows=None: pieces(checkpoint, name, target, pool, told, rows)


def _rewritten(path: Path, size: int, infos: list[TensorInfo], notes: Sequence[str] = ()) -> Rewritten:
    values = sum(int(np.prod(info.shape)) for info in infos)
    return Rewritten(path, size, values, Counter(info.format for info in infos), notes)


def _from_gguf(checkpoint: Checkpoint) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """The metadata of a GGUF file as it is, and its divisors of the rope frequencies."""
    metadata = {key: value for key, value in checkpoint.metadata.items() if not key.startswith(_DROPPED)}
    file = GGUFModel(checkpoint.path)
    there = (file.tensors[name] for name in (GGUF_ROPE_FACTORS, *GGUF_LONGROPE) if name in file.tensors)
    return metadata, {i.name: formats.get(i.format).dequantize(file.read(i.name), i.shape) for i in there}


def _from_others(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    from roofline.text.tokenizers.to_gguf import to_gguf as tokenizer_to_gguf

    metadata, factors = to_gguf(checkpoint.config, shapes)
    metadata["general.name"] = name = checkpoint.path.name or "model"
    metadata |= gguf_sampling(recommended_sampling(checkpoint))
    tokenizer, template = load_text(checkpoint)
    metadata |= tokenizer_to_gguf(tokenizer, checkpoint.config["vocab"], _source(template), name)
    return metadata, factors


def guessing_layers(metadata: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, object]:
    """What a GGUF file says of the layers in it, where it has some that guess, or the one it was made from had."""
    architecture, further = metadata["general.architecture"], int(bool(checkpoint.guessing))
    count, key = f"{architecture}.block_count", f"{architecture}.nextn_predict_layers"
    if not further and key not in metadata:
        return {}
    kinds = f"{architecture}.attention.recurrent_layers"  # of each block, where a file says it
    listed = {kinds: [*checkpoint.config["recurrent"], *[False] * further]} if kinds in metadata else {}
    return {count: checkpoint.config["layers"] + further, key: further, **listed}


def _left_out(checkpoint: Checkpoint) -> list[str]:
    """What of the model is not in the file."""
    return [f"it is {checkpoint.other_parts}"] if checkpoint.other_parts is not None else []


def _splits_otherwise(checkpoint: Checkpoint) -> list[str]:
    """What the file's tokenizer does otherwise than that of the folder."""
    from roofline.text.tokenizers.to_gguf import splits_otherwise

    return [] if checkpoint.kind == "gguf" else splits_otherwise(load_text(checkpoint)[0])


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


def safetensors_formats(checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
    """The formats in a folder: plain ones stay; what a GGUF file widened to F32 gets the format of the matrices again,
    where it holds all of its values, and of all that one tensor is joined of."""
    kinds = {}
    for name, info in checkpoint.tensors.items():
        if is_quantised(info.format):
            if not dtype:
                raise ConfigError(f"{checkpoint.path}: tensor {name!r} is {info.format}, which safetensors do not hold")
            kinds[name] = dtype
        else:
            kinds[name] = info.format
    matrix = _matrix_format(kinds, checkpoint)
    narrow = {name for name, form in kinds.items() if form == "F32" and _holds(checkpoint, name, matrix)}
    for together in stored_together(checkpoint.config, kinds):
        if narrow >= set(together):
            kinds |= dict.fromkeys(together, matrix)
    return kinds


def _narrower(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the formats in a folder of vectors that lack something there and are F32 with it, where the format of the
    matrices has their values without it."""
    matrix, lacks = _matrix_format(kinds, checkpoint), files_of(checkpoint.config["family"]).NAMES.lacks
    widened = (name for name, form in kinds.items() if form == "F32" != matrix and lacks(name))
    config = checkpoint.config
    return {name: matrix for name in widened if is_lacking_in(config, name, checkpoint.dequantize(name), matrix)}


def _guessing_formats(checkpoint: Checkpoint, kinds: Mapping[str, str]) -> dict[str, str]:
    """The formats in a folder of the layer that guesses, where `kinds` are of the model alone: plain ones stay."""
    missing = {name: info for name, info in checkpoint.guessing.items() if name not in kinds}
    matrices = Counter(
        kinds[name] for name, info in checkpoint.tensors.items() if name in kinds and len(info.shape) > 1
    )
    form = matrices.most_common(1)[0][0]
    return {name: form if is_quantised(info.format) else info.format for name, info in missing.items()}


def _holds(checkpoint: Checkpoint, name: str, form: str) -> bool:
    """Whether a format has all values of a tensor that GGUF files widen to F32, whatever it was."""
    info = checkpoint.tensors[name]
    if form == "F32" or (len(info.shape) > 1 and not stays_float(name)):
        return False
    values, kind = checkpoint.dequantize(name), formats.get(form)
    return np.array_equal(kind.dequantize(kind.quantize(values), info.shape), values)
