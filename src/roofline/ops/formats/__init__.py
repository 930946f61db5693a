"""Block layouts of weight files, one file a family."""

from roofline.common.errors import UnsupportedError
from roofline.ops.formats import blocks32, blocks256, plain
from roofline.ops.formats.base import Format

__all__ = ["FORMATS", "Format", "get"]

FORMATS: dict[str, Format] = {f.name: f for f in (*plain.FORMATS, *blocks32.FORMATS, *blocks256.FORMATS)}


def get(name: str) -> Format:
    """The format of that name, e.g. ``get("Q4_1")``. Raises UnsupportedError listing the known ones."""
    if name not in FORMATS:
        raise UnsupportedError(f"weight format {name!r}", "it is not one of the formats we read", tuple(FORMATS))
    return FORMATS[name]
