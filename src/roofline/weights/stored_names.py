"""Which tensors of Hugging Face's files are which parameters of a model, and which are no part of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from roofline.common import log
from roofline.common.errors import UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.ops import formats
from roofline.weights import names
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo

HEAD, EMBEDDING = "head.weight", "embed.weight"
_COMPARED = 1 << 24  # bytes at a time
_NAMED = 4  # names that a line has


@dataclass(frozen=True)
class StoredNames:
    """parameters: canonical name -> Hugging Face's; guessing: likewise of a layer that guesses further tokens; unused:
    tensors outside of the model's layers and modules, or of parameters that it does not read, which other programs
    leave aside too."""

    parameters: dict[str, str] = field(default_factory=dict)
    guessing: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def stored_names(path: Path, dtypes: Mapping[str, str], config: JsonObject, strict: bool = False) -> StoredNames:
    """The names of the tensors that a model of ours has; a stored head is among them where the configuration says tied.

    Args:
        path: what errors name.
        dtypes: Hugging Face's name -> format of each tensor.
        config: the canonical configuration.
        strict: a tensor that is no part of the model is an error, wherever it lies.

    Raises ConfigError for a tensor that no model of ours has where it might change what the model computes, and for two
    tensors of one parameter, UnsupportedError for a dtype we do not read.
    """
    stored = StoredNames()
    table = files_of(config["family"]).NAMES
    further = table.further_layers(dtypes, config["layers"]) if table.hf_further else ()
    for name, dtype in dtypes.items():
        is_further = name.startswith(further)
        counted = table.counted_on(name, config["layers"]) if is_further or table.hf_guessing else None
        guessing = names.from_hf(config["family"], counted) if counted is not None else None
        if guessing is not None and dtype in formats.FORMATS:
            stored.guessing[guessing] = name
            continue
        if is_further:
            stored.unused.append(name)
            continue
        if names.HF_BUFFERS.fullmatch(name) or not table.reads_hf(name):
            continue
        field_name = f"tensor {shorten(name)!r}"
        canonical = names.from_hf(config["family"], name)
        if canonical is None:
            if strict or "head" not in table.top or table.is_inside(name):
                refuse(path, field_name, "no model of ours has it")
            if ".lora_" in name:
                refuse(
                    path, field_name, "is an adapter's: merge it into the weights, or keep it in a folder of its own"
                )
            stored.unused.append(name)
            continue
        if table.spare(config, canonical):
            stored.unused.append(name)
            continue
        if dtype not in formats.FORMATS:
            what = f"{path}: tensor {shorten(name)!r}: dtype {dtype}"
            raise UnsupportedError(what, "we do not read it", ("BF16", "F16", "F32"))
        if canonical in stored.parameters:
            refuse(path, field_name, f"is the parameter that {shorten(stored.parameters[canonical])!r} is too")
        stored.parameters[canonical] = name
    return stored


def settle_head(
    path: Path,
    config: Config,
    stored: dict[str, str],
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
) -> Config:
    """The configuration, and `stored`, with head and embedding as transformers (5.24) has them where a file says tied.

    A head that equals the embedding is left out, one without an embedding beside it is both, and of two that differ
    neither is the other: the configuration says untied then.

    stored: canonical name -> Hugging Face's, changed in place; tensors, read: by the latter.
    """
    if not config["tied"] or HEAD not in stored:
        return config
    head = tensors[stored[HEAD]]
    if EMBEDDING not in stored:
        stored[EMBEDDING] = stored.pop(HEAD)
        return config
    embedding = tensors[stored[EMBEDDING]]
    if _equal(head, embedding, read):
        del stored[HEAD]
        return config
    log.get("weights").warning(
        "%s: tie_word_embeddings is true, but %s and %s differ: both are used as they are, as transformers does",
        *(path, head.name, embedding.name),
    )
    return config | {"tied": False}


def _equal(head: TensorInfo, embedding: TensorInfo, read: Callable[[str], np.ndarray]) -> bool:
    if head.shape != embedding.shape:
        return False
    ours, theirs = read(head.name), read(embedding.name)
    if head.format != embedding.format:
        ours, theirs = (
            formats.get(info.format).dequantize(raw, info.shape).reshape(-1)
            for info, raw in ((head, ours), (embedding, theirs))
        )
    parts = range(0, len(ours), _COMPARED)
    return all(np.array_equal(ours[at : at + _COMPARED], theirs[at : at + _COMPARED]) for at in parts)


def some_of(unused: list[str]) -> str:
    """A few of them, and how many more there are, for a line."""
    more = f" and {len(unused) - _NAMED:,} more" if len(unused) > _NAMED else ""
    return ", ".join(shorten(name) for name in unused[:_NAMED]) + more
