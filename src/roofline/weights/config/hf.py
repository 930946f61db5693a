"""A Hugging Face config.json -> the canonical configuration, for the fields transformers itself would use."""

from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import shorten
from roofline.models.registry import file_kind, known_like
from roofline.weights.config.unfamiliar import how_to_add
from roofline.weights.config.wrapped import text_fields
from roofline.weights.families import table
from roofline.weights.families.shared.canonical import Config, with_checked_windows
from roofline.weights.families.shared.hf_fields import new_fields
from roofline.weights.files.mapped import JsonObject

_WINDOW_KEYS = ("sliding_window_size", "sliding_window")


def from_hf(path: Path, config: JsonObject) -> Config:
    """The canonical configuration of a parsed config.json, of a model that reads more than text that of its text part.

    Raises ConfigError for missing and bad fields, UnsupportedError for model types and features we do not have.
    """
    fields = text_fields(path, config)
    kind = fields.need("model_type", str)
    registered = file_kind("hf", kind)
    if registered is not None:
        family, like = registered
        ours = table.module(table.MODEL_TYPES[known_like(like, table.MODEL_TYPES)]).from_hf(fields, like)
        return with_checked_windows(fields, _WINDOW_KEYS, ours | {"family": family})
    if kind not in table.MODEL_TYPES:
        what = f"{path}: model_type {shorten(kind)!r}"
        reason = f"we have no model for it{new_fields(fields)}{how_to_add(config)}"
        raise UnsupportedError(what, reason, tuple(table.MODEL_TYPES))
    return with_checked_windows(fields, _WINDOW_KEYS, table.module(table.MODEL_TYPES[kind]).from_hf(fields, kind))
