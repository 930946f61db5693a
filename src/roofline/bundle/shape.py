"""What a model is, without its weights: from a bundle, a file or folder of weights, a config.json or a named shape."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.backends.compressed_rows import holds_compressed_rows
from roofline.backends.options import LoadOptions
from roofline.bundle.reader import is_bundle, open_bundle
from roofline.bundle.text_side import load_text
from roofline.common import extensions
from roofline.common.errors import ConfigError
from roofline.common.fields import shorten
from roofline.common.json_files import read_config_json
from roofline.common.json_types import JsonMapping
from roofline.common.names import unknown
from roofline.common.units import human_bytes
from roofline.models.presets import presets
from roofline.weights import names, sources
from roofline.weights.checkpoint import open_checkpoint, read_config
from roofline.weights.config.unread_keys import unread_keys
from roofline.weights.config.wrapped import text_fields, wrapper_of
from roofline.weights.latent_form import latent_config, latent_format
from roofline.weights.parts_beside import PartsBeside
from roofline.weights.quantised.methods import KEYS
from roofline.weights.quantised.stated import stated_formats
from roofline.weights.random_weights import PRESET

if TYPE_CHECKING:
    import numpy as np

    from roofline.program.trace import DescribesTensor
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint

FORM = "BF16"  # of the tensors of a shape without weights, as they are mostly published
_NAMED = 8  # keys of a config.json that a note names


@dataclass(frozen=True)
class AbsentTensor:
    """A tensor of a shape that there are no weights of."""

    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """kind: "bundle", "gguf", "safetensors", "configuration" or "preset"; config: canonical; tensors: those of the
    file, or, without one, all in BF16 unless config.json or the preset says otherwise; source: where a preset's
    configuration is from; notes: what is said of the tensors, or not read of the configuration, in words."""

    name: str
    kind: str
    config: JsonMapping
    tensors: "Mapping[str, DescribesTensor]"
    source: str = ""
    notes: tuple[str, ...] = ()

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
        values = manifest.generation.get("other_parts")
        notes = _parts_note(None if values is None else PartsBeside.of(values))
        return ModelShape(model, "bundle", manifest.config, manifest.tensor_infos, notes=notes)
    name = model.removeprefix(PRESET)
    if name != model or (name in presets() and not path.exists() and sources.stored_path(name) is None):
        if name not in presets():
            raise ConfigError(unknown("model preset", name, presets()))
        preset = presets()[name]
        tensors, note = _absent(preset.config, {"quant_method": preset.published} if preset.published else {})
        return ModelShape(name, "preset", preset.config, tensors, source=preset.source, notes=note)
    path = _resolve(model)
    if path.suffix == ".json" or (path.is_dir() and not _has_weights(path)):
        config = read_config(path)
        tensors, note = _absent(config, _quantization(path))
        return ModelShape(model, "configuration", config, tensors, notes=(*_text_part(path), *note, *_unread(path)))
    checkpoint = open_checkpoint(path)
    unread = _unread(path) if checkpoint.kind == "safetensors" else ()
    notes = (*_parts_note(checkpoint.other_parts), *_guessing_note(checkpoint), *unread)
    return ModelShape(model, checkpoint.kind, checkpoint.config, checkpoint.tensors, notes=notes)


def as_loaded(shape: ModelShape, backend: str) -> ModelShape:
    """The shape with the matrices that a backend, by its name, takes of attention over compressed rows
    (`weights.latent_form`)."""
    latent = holds_compressed_rows(LoadOptions(backend=backend), shape.config)
    config = latent_config(dict(shape.config), latent)
    if bool(shape.config.get("latent")) == latent or not config.get("kv_rank"):
        return shape
    stored = dict(shape.tensors)
    for name, sizes in names.parameter_shapes(config, stored).items():
        if name not in stored:
            stored[name] = AbsentTensor(latent_format(name, lambda other: shape.tensors[other].format), sizes)
    needed = names.parameter_shapes(config, stored)
    return replace(shape, config=config, tensors={name: stored[name] for name in needed})


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


def _absent(config: JsonMapping, quantization: Mapping[str, object]) -> tuple[dict[str, AbsentTensor], tuple[str, ...]]:
    """The tensors of a configuration, and what there is to say of their formats. quantization: as `quantization_config`
    of a config.json, empty where there is none."""
    shapes = names.parameter_shapes(dict(config))
    method, family = str(quantization.get("quant_method", "")), str(config["family"])
    forms = stated_formats(method, quantization, shapes, lambda name: _name_at_hf(family, name)) if method else {}
    tensors = {name: AbsentTensor((forms or {}).get(name, FORM), shape) for name, shape in shapes.items()}
    if not method:
        return tensors, ()
    if forms is None:
        plain = (
            f"quantization_config says {shorten(method)}: sizes here are of {FORM}, and --dtype names another format"
        )
        return tensors, (plain,)
    counts = Counter(tensor.format for tensor in tensors.values())
    in_words = ", ".join(f"{count:,} tensors in {form}" for form, count in counts.most_common())
    return tensors, (f"sizes here are as published ({method}): {in_words}",)


def _name_at_hf(family: str, name: str) -> str:
    try:
        return names.to_hf(family, name)
    except ConfigError:  # experts of a layer together, of which no module is named
        return name


def _configuration_file(path: Path) -> Path | None:
    file = path / "config.json" if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def _quantization(path: Path) -> Mapping[str, object]:
    """What a config.json says of the weights' formats, empty where it says nothing; `read_config` has checked it."""
    file = _configuration_file(path)
    if file is None:
        return {}
    config = text_fields(file, read_config_json(file)).values
    stated = next((config[key] for key in KEYS if config.get(key) is not None), {})
    return stated if isinstance(stated, Mapping) else {}


def _parts_note(parts: PartsBeside | None) -> tuple[str, ...]:
    """What of a model is not used, in a note."""
    return () if parts is None else (str(parts),)


def _guessing_note(checkpoint: "Checkpoint") -> tuple[str, ...]:
    """What a layer that guesses further tokens takes, which a load without it leaves aside, in a note."""
    if not checkpoint.guessing:
        return ()
    from roofline.backends.capacity import guess_bytes, host_token_bytes

    config, infos = checkpoint.config, checkpoint.guessing.values()
    size = human_bytes(sum(info.nbytes for info in infos))
    token = host_token_bytes("bf16", config["kv_heads"], config["head_dim"]) + guess_bytes(config)
    count = f"{sum(math.prod(info.shape) for info in infos):,} parameters"
    takes = f"with --speculate mtp it takes {size} and {human_bytes(token)} of cache a token in bf16"
    return (f"behind the layers one that guesses further tokens, {count}: {takes}",)


def _text_part(path: Path) -> tuple[str, ...]:
    """That a config.json is read as the model of its text part, in a note."""
    file = _configuration_file(path)
    config = {} if file is None else read_config_json(file)
    return _parts_note(PartsBeside(config["model_type"], (), 0, 0)) if wrapper_of(config) is not None else ()


def _unread(path: Path) -> tuple[str, ...]:
    """The keys of a config.json that nothing reads, in a note."""
    file = _configuration_file(path)
    keys = [] if file is None else unread_keys(file, read_config_json(file))
    if not keys:
        return ()
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return (f"not read of config.json: {', '.join(map(shorten, keys[:_NAMED]))}{more}; sizes may be others",)
