"""Block layouts of weight files, one file a family."""

import numpy as np

from roofline.common import extensions
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops.formats import blocks32, blocks256, blocks256_low, codebooks, float8, nf4, plain, scaled, tables
from roofline.ops.formats.base import CHUNK_VALUES, Format

__all__ = ["FORMATS", "Format", "get", "packed", "packed_bytes", "readable", "register"]

_FAMILIES = (plain, float8, nf4, blocks32, blocks256, blocks256_low, scaled, tables, codebooks)
FORMATS: dict[str, Format] = {form.name: form for family in _FAMILIES for form in family.FORMATS}


def get(name: str) -> Format:
    """The format of that name, e.g. ``get("Q4_1")``. Raises UnsupportedError listing the known ones."""
    if name not in FORMATS:
        extensions.load()
    if name not in FORMATS:
        raise UnsupportedError(f"weight format {name!r}", "it is not one of the formats we read", readable())
    return FORMATS[name]


def readable() -> tuple[str, ...]:
    """The names of the formats that files have."""
    return tuple(form.name for form in FORMATS.values() if form.stored)


def register(form: Format) -> None:
    """Add a format from outside the tree. Raises ConfigError where it cannot be used or its name or number is taken."""
    if not form.name.isidentifier():
        raise ConfigError(f"a weight format cannot be named {form.name!r}: use letters, digits and _")
    for other in FORMATS.values():
        if form.name == other.name or form.gguf_type == other.gguf_type >= 0:
            what = (
                f"named {form.name!r}" if form.name == other.name else f"of GGUF type {form.gguf_type} ({other.name})"
            )
            raise ConfigError(f"a weight format {what} is already registered")
    ours = get(form.packed_as)
    if ours.packed_as:
        raise ConfigError(f"{form.name}: packed_as must be a format of ours, {ours.name} is itself {ours.packed_as}")
    if ours.block > 1 and form.convert is None:
        raise ConfigError(
            f"{form.name}: packed_as={ours.name} needs `convert`: blocks are moved, nothing is quantised again"
        )
    FORMATS[form.name] = form


def packed(name: str) -> Format:
    """The format of ours that stands in for `name` where it is packed and multiplied: itself, for one of ours."""
    form = get(name)
    return get(form.packed_as) if form.packed_as else form


def packed_bytes(name: str, raw: np.ndarray) -> np.ndarray:
    """A tensor's bytes in the format `packed(name)`: uint8, the very same where that is `name`.

    Raises ConfigError when the values do not survive.
    """
    form, ours = get(name), packed(name)
    if ours is form:
        return raw
    blocks = raw.reshape(-1, form.block_bytes)
    if form.convert is not None:
        step = max(1, CHUNK_VALUES // form.block)
        parts = [np.empty(0, np.uint8)]
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is no number stays none
            for start in range(0, len(blocks), step):
                part = form.convert(blocks[start : start + step])
                parts.append(np.ascontiguousarray(part, np.uint8).reshape(-1))
        return np.concatenate(parts)
    values = form.dequantize(raw, (blocks.shape[0] * form.block,))
    out = ours.quantize(values)
    if not np.array_equal(ours.dequantize(out, values.shape), values, equal_nan=True):
        raise ConfigError(f"{name} is declared packed_as {ours.name}, which cannot hold all of its values exactly")
    return out
