"""`Checkpoint`: a model's tensors under our models' names, and its configuration, from whatever kind of file."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from roofline.common import extensions, log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import naming, refuse, shorten
from roofline.common.files import check_readable, readable
from roofline.common.json_files import read_config_json
from roofline.common.mistaken_files import mistaken_for, unreadable
from roofline.models.spec import Param
from roofline.ops import formats
from roofline.weights import gguf_values, names
from roofline.weights.config.gguf import family_of, from_gguf, gguf_fields
from roofline.weights.config.hf import from_hf
from roofline.weights.config.wrapped import TextTensors, text_fields, wrapper_of
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.gguf_fields import GGUF_LONGROPE, GGUF_ROPE_FACTORS
from roofline.weights.families.table import files_of
from roofline.weights.files.gguf_parts import GGUFModel, part_names
from roofline.weights.files.mapped import JsonObject, TensorInfo, map_file
from roofline.weights.files.safetensors import SafetensorsModel
from roofline.weights.files.torch_pickle import PickledModel
from roofline.weights.files.unread import tell_unread
from roofline.weights.hf_values import as_ours
from roofline.weights.parts_beside import PartsBeside
from roofline.weights.quantised.method import QuantisedTensors, TensorFiles, TensorSource
from roofline.weights.quantised.methods import method_of
from roofline.weights.stored_names import HEAD, settle_head, some_of, stored_names

_PROJECTOR = "mmproj"  # what files are called that turn pictures into rows for the model beside them
_ADAPTER = "this is a LoRA adapter: name the model that it belongs to, and the adapter beside it"


@dataclass(eq=False)
class Checkpoint:
    """Named tensors, a configuration, and what else the files say.

    Attributes:
        path: the file or folder.
        kind: "gguf", "safetensors", "torch", "random" or "memory".
        tensors: canonical name -> TensorInfo.
        metadata: the GGUF key-value pairs, or config.json.
        config: the canonical configuration with its family (see `weights.config`).
        bytes_of: what `read` gives of a tensor that is there.
        unused: tensors of the files that are no part of the model, under the files' names.
        other_parts: what a model that reads more than text has beside its text part, which is the model here.
    """

    path: Path
    kind: str
    tensors: Mapping[str, TensorInfo]
    metadata: JsonObject
    config: JsonObject
    bytes_of: Callable[[str], np.ndarray]
    unused: list[str] = field(default_factory=list)
    other_parts: PartsBeside | None = None

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes] of a tensor, without a copy where a file is mapped. Raises ConfigError for an unknown name."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: there is no tensor {name!r}")
        return self.bytes_of(name)

    def dequantize(self, name: str) -> np.ndarray:
        """float32 [shape] of a tensor. Raises ConfigError for an unknown name."""
        raw = self.read(name)
        return formats.get(self.tensors[name].format).dequantize(raw, self.tensors[name].shape)

    def parameter(self, param: Param) -> np.ndarray:
        """float32 [shape] of a parameter; of experts, whether the files have them as one tensor or as one each."""
        if not param.experts or param.name in self.tensors:
            return self.dequantize(param.name)
        return np.concatenate([self.dequantize(param.expert(number)) for number in range(param.experts)])

    def check_names(self, expected: Mapping[str, tuple[int, ...]] | Iterable[str]) -> None:
        """Raise ConfigError unless the tensors are exactly `expected`; with a mapping, shapes are compared too."""
        names = dict.fromkeys(expected)
        missing = [name for name in names if name not in self.tensors]
        if missing:
            count = f"{len(missing):,} of {len(names):,}"
            hint = f"; the files have, and no model of ours has: {some_of(self.unused)}" if self.unused else ""
            reason = f"is missing; tensors of the model that are not there: {count}{hint}"
            refuse(self.path, f"tensor {missing[0]!r}", reason)
        surplus = [name for name in self.tensors if name not in names]
        if surplus:
            count = f"{len(surplus):,} of {len(self.tensors):,}"
            key = "" if self.kind in ("gguf", "memory") else _key_of(surplus[0], self.config["layers"])
            says = f" as config.json describes it ({key})" if key else ""
            reason = f"is not part of this model{says}; tensors that are there and not part of it: {count}"
            refuse(self.path, f"tensor {surplus[0]!r}", reason)
        if isinstance(expected, Mapping):
            for name, shape in expected.items():
                if self.tensors[name].shape != tuple(shape):
                    refuse(self.path, f"tensor {name!r}", f"has shape {self.tensors[name].shape}, not {tuple(shape)}")


def _key_of(name: str, layers: int) -> str:
    """What most configurations call that which decides whether a tensor of ours is there, "" where no key does."""
    layer, _, part = name.removeprefix("layers.").partition(".")
    if name.startswith("layers.") and layer.isdigit() and int(layer) >= layers:
        return "num_hidden_layers"
    if not name.endswith(".bias"):
        return ""
    return {"attn": "attention_bias", "mlp": "mlp_bias"}.get(part.partition(".")[0], "")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or any part of a split one, a .safetensors file beside its config.json, or a folder of either or
    of pytorch_model.bin.

    Tensors and configuration are checked against each other: every tensor the configuration implies is there with its
    shape, and within the model no other. What lies beside it, files of weights and tensors, is named in the log.

    Raises ConfigError naming file and field, UnsupportedError for what we do not read.
    """
    extensions.load()  # whose families and formats files may have
    path = Path(path)
    if not os.path.lexists(path):
        raise ConfigError(f"{path}: there is no such file or folder")
    check_readable(path)
    with readable(path):
        file = _file_of_folder(path) if path.is_dir() else path
        checkpoint = _open(file)
        if file != path:
            tell_unread(path, part_names(file))
    with naming(path):
        checkpoint.check_names(names.parameter_shapes(checkpoint.config, checkpoint.tensors))
    if checkpoint.unused:
        line = "%s: tensors that are no part of the model are not used (%s): %s"
        log.get("weights").warning(line, path, f"{len(checkpoint.unused):,}", some_of(checkpoint.unused))
    return checkpoint


def _open(path: Path) -> Checkpoint:
    is_gguf = path.is_file() and (path.suffix == ".gguf" or map_file(path)[:4] == b"GGUF")
    if path.is_file() and not is_gguf and path.suffix == ".json":
        folder = path.parent if path.parent.name else path.parent.absolute()
        raise ConfigError(f"{path} lies beside a model's weights and holds none: name the model's folder, {folder}")
    if path.is_file() and not is_gguf and path.suffix != ".safetensors":
        kinds = "a GGUF file, a .safetensors file nor a folder of them"
        raise unreadable(path, f"{path} is neither {kinds}: name one of these, or a model of `roofline list`")
    if is_gguf:
        return _open_gguf(path)
    _check_config_beside(path)
    if path.is_dir() and PickledModel.is_in(path) and not _has_safetensors(path):
        return _open_hf(path, PickledModel(path), "torch")
    return _open_hf(path, SafetensorsModel(path), "safetensors")


def read_config(path: str | Path) -> Config:
    """The canonical configuration alone: of a config.json (or the folder that holds it), or of a checkpoint.

    For models without weights (`weights.random_weights`). Raises ConfigError, UnsupportedError.
    """
    extensions.load()
    path = Path(path)
    _refuse_adapter(path)
    if path.is_dir():
        _check_config_beside(path)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json":
        return from_hf(file, read_config_json(file))
    return dict(open_checkpoint(path).config)


def _check_config_beside(path: Path) -> None:
    """Raises ConfigError for a file of weights, or a folder, without the configuration that says what they are."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_file() and (mistake := mistaken_for(path)):
        raise ConfigError(f"{path}: {mistake}")
    if not os.path.lexists(config):
        remedy = "get it from where the weights are from, or name a GGUF file, which needs none"
        raise ConfigError(f"{config}: there is no such file beside the weights; {remedy}")


def _file_of_folder(folder: Path) -> Path:
    """The folder itself when it holds safetensors or pytorch_model.bin, else its one GGUF file, or the first part of
    its one GGUF model."""
    if _has_safetensors(folder) or PickledModel.is_in(folder):
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    ggufs = [path for path in ggufs if not path.name.startswith(_PROJECTOR)] or ggufs
    if len(ggufs) == 1 or (ggufs and set(ggufs) <= set(part_names(ggufs[0]))):
        return ggufs[0]
    if ggufs:
        refuse(
            folder, "folder", f"holds {len(ggufs)} GGUF files; name one: {', '.join(repr(p.name) for p in ggufs[:8])}"
        )
    alternatives = ("the same model as safetensors or GGUF",)
    if (folder / "ndarray-cache.json").exists() or (folder / "tensor-cache.json").exists():
        reason = "their parameters are fused and named in MLC's own way"
        raise UnsupportedError(f"{folder}: weights of MLC LLM (ndarray-cache.json)", reason, alternatives)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        reason = "pickled weights are read from pytorch_model.bin and its index alone, as transformers writes them"
        raise UnsupportedError(f"{folder}: a pickled checkpoint", reason, alternatives)
    refuse(folder, "folder", "holds neither *.safetensors nor *.gguf; name the folder or the file of a model")


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        refuse(folder, "adapter_config.json", _ADAPTER)


def _has_safetensors(folder: Path) -> bool:
    _refuse_adapter(folder)
    return SafetensorsModel.is_in(folder)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFModel(path)
    if file.metadata.get("general.type") == "adapter":
        refuse(path, "general.type", _ADAPTER)
    family = family_of(path, file.metadata)
    further = gguf_values.further_layers(gguf_fields(path, file.metadata))
    stored: dict[str, str] = {}  # canonical name -> the file's
    unused: list[str] = []
    for name in file.tensors:
        if any(name.startswith(f"blk.{layer}.") for layer in further):
            unused.append(name)
            continue
        if name == GGUF_ROPE_FACTORS or (family == "phi3" and name in GGUF_LONGROPE):
            continue
        canonical = names.from_gguf(family, name)
        if canonical is None:
            refuse(path, f"tensor {shorten(name)!r}", "no model of ours has it")
        stored[canonical] = name
    factors = {
        name: formats.get(file.tensors[name].format).dequantize(file.read(name), file.tensors[name].shape)
        for name in (GGUF_ROPE_FACTORS, *GGUF_LONGROPE)
        if name in file.tensors
    }
    tensors = {name: _as_matrix(replace(file.tensors[old], name=name)) for name, old in stored.items()}
    longrope = {key: factors[name] for name, key in GGUF_LONGROPE.items() if name in factors}
    shapes = {name: info.shape for name, info in tensors.items()}
    config = from_gguf(path, file.metadata, shapes, factors.get(GGUF_ROPE_FACTORS), longrope)
    ours, read = gguf_values.as_ours(config, tensors, lambda name: file.read(stored[name]))
    return Checkpoint(
        path=path,
        kind="gguf",
        tensors=ours,
        metadata=file.metadata,
        config=config,
        bytes_of=read,
        unused=unused,
    )


def _as_matrix(info: TensorInfo) -> TensorInfo:
    """The tensor with experts one below the other where it has them stacked, [experts, rows, cols], their biases one
    behind the other, and a linear with one output as a row. The bytes are the same."""
    part = info.name.partition(".mlp.")[2]
    if part.startswith("experts.") and len(info.shape) == 3:
        return replace(info, shape=(info.shape[0] * info.shape[1], info.shape[2]))
    if part.startswith("experts.") and part.endswith(".bias") and len(info.shape) == 2:
        return replace(info, shape=(info.shape[0] * info.shape[1],))
    if part == "shared.scale.weight" and len(info.shape) == 1:
        return replace(info, shape=(1, *info.shape))
    return info


def _open_hf(path: Path, model: SafetensorsModel | PickledModel, kind: str) -> Checkpoint:
    if path.is_dir():
        tell_unread(path, model.paths)
    config, wrapper = from_hf(model.config_path, model.config), wrapper_of(model.config)
    text = TextTensors(path, model.config, wrapper, model) if wrapper is not None else None
    tensor_source: TensorSource = model if text is None else text
    apart = files_of(config["family"]).NAMES.hf_apart
    files = TensorFiles(path, apart(path, tensor_source) if apart is not None else tensor_source)
    source = QuantisedTensors(files, method_of(model.config_path, text_fields(model.config_path, model.config).values))
    tensor_names = stored_names(path, {name: info.format for name, info in source.tensors.items()}, config)
    stored = tensor_names.parameters
    if config["tied"] and source.is_made(stored.get(HEAD, "")):
        reason = "is quantised, and tie_word_embeddings says that the embedding is the head"
        refuse(path, f"tensor {stored[HEAD]!r}", reason)
    config = settle_head(path, config, stored, source.tensors, source.read)
    tensors = {name: replace(source.tensors[old], name=name) for name, old in stored.items()}
    with naming(path):
        for name in _spare_biases(source, stored, config, tensors):
            del tensors[name]
    if source.widened:
        count = f"{len(source.widened):,} of {sum(len(info.shape) == 2 for info in tensors.values()):,}"
        reasons = ", ".join(sorted(set(source.widened.values())))
        log.get("weights").warning("%s: %s matrices are kept in float32, 4 bytes a weight: %s", path, count, reasons)
    ours, read = as_ours(config, tensors, lambda name: source.read(stored[name]))
    return Checkpoint(
        path=path,
        kind=kind,
        tensors=ours,
        metadata=model.config,
        config=config,
        bytes_of=read,
        unused=tensor_names.unused,
        other_parts=text.other_parts if text is not None else None,
    )


def _spare_biases(
    source: QuantisedTensors, stored: Mapping[str, str], config: JsonObject, tensors: Mapping[str, TensorInfo]
) -> list[str]:
    """Biases of zeros beside quantised matrices that the model has none of: AutoGPTQ writes them for every matrix."""
    biases = [name for name in stored if name.endswith(".bias")]
    biases = [name for name in biases if source.is_made(stored[name].removesuffix("bias") + "weight")]
    shapes = names.parameter_shapes(config, tensors) if biases else {}
    spare = []
    for name in biases:
        info = source.tensors[stored[name]]
        if name not in shapes and not formats.get(info.format).dequantize(source.read(info.name), info.shape).any():
            spare.append(name)
    return spare
