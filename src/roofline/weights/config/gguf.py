"""GGUF metadata -> the canonical configuration."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, refuse, shorten
from roofline.models.registry import file_kind, known_like
from roofline.weights.config.unfamiliar import CLIP, how_to_add
from roofline.weights.families import table
from roofline.weights.families.shared.canonical import Config, with_checked_windows
from roofline.weights.families.shared.gguf_fields import GgufModel, new_keys
from roofline.weights.files.mapped import JsonObject

_PROJECTOR = (
    "is clip: this file (an mmproj) turns pictures or sound into rows for a model that lies in a file of its own; name "
    "that one, and it answers to text"
)


def from_gguf(
    path: Path,
    metadata: JsonObject,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
    longrope: Mapping[str, np.ndarray] | None = None,
) -> Config:
    """The canonical configuration of a GGUF file.

    Args:
        shapes: canonical parameter name -> shape; says the vocabulary's size and whether the head is tied.
        rope_factors: float32 [head_dim / 2] of the tensor rope_freqs.weight (Llama 3.1), if there is one.
        longrope: short_factor and long_factor of Phi-3, as far as they are there.

    Raises ConfigError for missing and bad fields, UnsupportedError for architectures and features we do not have.
    """
    arch = architecture(path, metadata)
    fields = _fields(path, metadata, arch)
    model = GgufModel(fields, shapes, rope_factors, longrope or {})
    registered = file_kind("gguf", arch)
    if registered is not None:
        family, like = registered
        config = table.module(table.ARCHITECTURES[like]).from_gguf(model, like) | {"family": family}
    else:
        config = table.module(family_of(path, metadata)).from_gguf(model, arch)
    return with_checked_windows(fields, ("attention.sliding_window",), config)


def architecture(path: Path, metadata: JsonObject) -> str:
    """general.architecture, of which we have the model. Raises ConfigError, UnsupportedError."""
    arch = Fields(path, metadata).need("general.architecture", str)
    registered = file_kind("gguf", arch)
    if arch == CLIP and registered is None:
        refuse(path, "general.architecture", _PROJECTOR)
    if registered is not None:
        known_like(registered[1], table.ARCHITECTURES)
    elif arch not in table.ARCHITECTURES:
        fields = _fields(path, metadata, arch)
        what = f"{path}: architecture {shorten(arch)!r}"
        reason = f"we have no model for it{new_keys(fields)}{how_to_add(fields.values, is_gguf=True)}"
        raise UnsupportedError(what, reason, tuple(table.ARCHITECTURES))
    return arch


def family_of(path: Path, metadata: JsonObject) -> str:
    """The family whose names the tensors of a GGUF file have. Raises ConfigError, UnsupportedError."""
    arch = architecture(path, metadata)
    registered = file_kind("gguf", arch)
    if arch == "llama" and registered is None and metadata.get("llama.expert_count", 0) != 0:
        return "mixtral"
    return table.ARCHITECTURES[arch if registered is None else registered[1]]


def gguf_fields(path: Path, metadata: JsonObject) -> Fields:
    """The metadata of the architecture. Raises ConfigError, UnsupportedError where we have it not."""
    return _fields(path, metadata, architecture(path, metadata))


def _fields(path: Path, metadata: JsonObject, arch: str) -> Fields:
    within = f"{arch}."
    return Fields(path, {k.removeprefix(within): metadata[k] for k in metadata if k.startswith(within)}, within)
