"""What a model is, without its weights: from a bundle, a file or folder of weights, a config.json or a named shape."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.bundle.reader import is_bundle, open_bundle
from roofline.bundle.text_side import load_text
from roofline.common import extensions
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping
from roofline.common.names import unknown
from roofline.models.presets import presets
from roofline.weights import names, sources
from roofline.weights.checkpoint import open_checkpoint, read_config
from roofline.weights.random_weights import PRESET

if TYPE_CHECKING:
    import numpy as np

    from roofline.program.trace import DescribesTensor
    from roofline.text.tokenizers.tokenizer import Tokenizer

FORM = "BF16"  # of the tensors of a shape without weights, as they are mostly published


@dataclass(frozen=True)
class AbsentTensor:
    """A tensor of a shape that there are no weights of."""

    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """kind: "bundle", "gguf", "safetensors", "configuration" or "preset"; config: canonical; tensors: those of the
    file, or, without one, all in BF16; source: where a preset's configuration is from."""

    name: str
    kind: str
    config: JsonMapping
    tensors: "Mapping[str, DescribesTensor]"
    source: str = ""

    def read(self, name: str) -> "np.ndarray":
        """For those who want a checkpoint: a shape has no bytes. Raises ConfigError."""
        raise ConfigError(f"{self.name}: the weights of a shape cannot be read")

    @property
    def has_weights(self) -> bool:
        """Whether the tensors are those of a file."""
        return self.kind not in ("configuration", "preset")


def open_shape(model: str) -> ModelShape:
    """The shape of a model: a bundle, a path of weights, a config.json or a folder that holds one, a name of
    `roofline list`, ``preset:NAME`` or the name of a preset alone, where no model of this name is here.

    Weights are mapped at most, never read. Raises ConfigError and UnsupportedError for what cannot be opened.
    """
    extensions.load()
    path = Path(model)
    if is_bundle(path):
        manifest = open_bundle(path).manifest
        return ModelShape(model, "bundle", manifest.config, manifest.tensor_infos)
    name = model.removeprefix(PRESET)
    if name != model or (name in presets() and not path.exists() and sources.stored_path(name) is None):
        if name not in presets():
            raise ConfigError(unknown("model preset", name, presets()))
        preset = presets()[name]
        return ModelShape(name, "preset", preset.config, _absent(preset.config), preset.source)
    path = _resolve(model)
    if path.suffix == ".json" or (path.is_dir() and not _has_weights(path)):
        config = read_config(path)
        return ModelShape(model, "configuration", config, _absent(config))
    checkpoint = open_checkpoint(path)
    return ModelShape(model, checkpoint.kind, checkpoint.config, checkpoint.tensors)


def tokenizer_of(model: str) -> "Tokenizer":
    """The tokenizer of a model with weights, as `open_shape` takes it; nothing is compiled for it.

    Raises ConfigError and UnsupportedError where there is none.
    """
    if is_bundle(Path(model)):
        return open_bundle(Path(model)).text()[0]
    return load_text(open_checkpoint(_resolve(model)))[0]


def shape_in(model: str, dtype: str) -> ModelShape:
    """The shape of a model with its matrices in the format `dtype` ("fp8", "q4_k_m"), as they are where that is "".

    Raises ConfigError for an unknown format and for rows that are no whole blocks of it, and as `open_shape`.
    """
    from roofline.program.restate import format_named, restate

    shape = open_shape(model)
    return replace(shape, tensors=restate(shape.tensors, format_named(dtype))) if dtype else shape


def _resolve(model: str) -> Path:
    """The path of a model that is here. Raises ConfigError, which for an unknown name has those of presets too."""
    catalogue = {*sources.catalog(), *sources.hub_names(), *(stored.name for stored in sources.list_models())}
    is_name = "/" not in model and Path(model).suffix not in (".gguf", ".safetensors", ".json")
    if model and is_name and model not in catalogue and not Path(model).exists():
        sources.full_name(model)  # raises for a model that is known not to run
        raise ConfigError(unknown("model or shape", model, {*catalogue, *presets()}))
    return sources.resolve(model)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))


def _absent(config: JsonMapping) -> dict[str, AbsentTensor]:
    return {name: AbsentTensor(FORM, shape) for name, shape in names.parameter_shapes(dict(config)).items()}
