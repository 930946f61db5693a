"""Names of parameters: from those of GGUF and Hugging Face to those of our models, and back.

The tables are the families' (`weights/families`).
"""

import re
from collections.abc import Container

from roofline.common.errors import ConfigError
from roofline.models.mtp import guessing_layer
from roofline.models.registry import configure, file_kind
from roofline.models.spec import expand, file_shapes
from roofline.weights.config.wrapped import text_name
from roofline.weights.families.table import ARCHITECTURES, MODEL_TYPES, files_of, module
from roofline.weights.files.mapped import JsonObject

# Buffers that old files of Hugging Face carry and that follow from the configuration: frequencies, causal masks and
# what is put where these are false.
HF_BUFFERS = re.compile(
    r"((model|gpt_neox)\.)?(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|"
    r"(gpt_neox\.layers\.\d+\.attention|(transformer\.)?h\.\d+\.attn)\.(masked_)?bias"
)


def from_gguf(family: str, name: str) -> str | None:
    """``"blk.3.attn_q.weight"`` -> ``"layers.3.attn.q.weight"``; None for a name that the family does not have."""
    return files_of(family).NAMES.from_gguf(name)


def from_hf(family: str, name: str) -> str | None:
    """``"model.layers.3.self_attn.q_proj.weight"`` -> ``"layers.3.attn.q.weight"``; None for a name that the family
    does not have."""
    return files_of(family).NAMES.from_hf(name)


def matrix_from_hf(name: str) -> str | None:
    """The same for a matrix of a layer of any family of ours, as an adapter names it, of the text part of a model that
    reads more too; None for an unknown name, and for a matrix whose rows Hugging Face has in another order, in which an
    adapter's would lie too."""
    name = text_name(name)
    tables = (module(fromkey).NAMES for fromkey in dict.fromkeys(MODEL_TYPES.values()))
    matches = ((table, ours) for table in tables if (ours := table.from_hf(name)) is not None)
    table, ours = next(matches, (None, None))
    if table is not None and ours is not None and any(f".{part}." in ours for part in table.by_head):
        return None
    return ours


def matrix_from_gguf(architecture: str, name: str) -> str | None:
    """The same of GGUF files, for an architecture that `config.gguf.architecture` has checked; experts of all layers
    have one name. None for an unknown name."""
    registered = file_kind("gguf", architecture)
    family = ARCHITECTURES[architecture if registered is None else registered[1]]
    families = (family, "mixtral") if family == "llama" else (family,)  # which calls itself llama too
    return next((ours for family in families if (ours := from_gguf(family, name)) is not None), None)


def to_hf(family: str, name: str) -> str:
    """What Hugging Face calls a parameter of one of our families: the inverse of `from_hf`. Raises ConfigError."""
    theirs = files_of(family).NAMES.to_hf(name)
    if theirs is None:
        raise ConfigError(f"{name} of a {family} model has no name in Hugging Face's files")
    return theirs


def to_gguf(family: str, name: str) -> str:
    """What GGUF files call a parameter of one of our families: the inverse of `from_gguf`. Raises ConfigError."""
    theirs = files_of(family).NAMES.to_gguf(name)
    if theirs is None:
        raise ConfigError(f"{name} of a {family} model has no name in GGUF files")
    return theirs


def parameter_shapes(config: JsonObject, stored: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor a file must hold for a configuration: the rows of its family's table.

    stored: the names of the file's tensors, which say whether each expert of a layer has one of its own.

    Raises ConfigError, UnsupportedError for configurations the family does not have.
    """
    family, cfg = configure(config)
    return file_shapes(expand(family.spec(cfg), cfg.layers), stored)


def guessing_shapes(config: JsonObject, stored: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """The same of the tensors of the layer that guesses further tokens, which a file may hold besides; empty for a
    family that has none."""
    pair = guessing_layer(*configure(config))
    return file_shapes(pair[0].own_params(pair[1]), stored) if pair is not None else {}
