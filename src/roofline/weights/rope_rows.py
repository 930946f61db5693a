"""The order of the rows of q and k: in halves, as Hugging Face has them, or in pairs, as GGUF files of Llama do.

Head by head, row i of the first half and row i of the second are neighbours in the other order. Rows are moved as
bytes, so nothing is rounded, whatever the format.
"""

import re

import numpy as np

from roofline.weights.files.mapped import JsonObject

_TURNED = re.compile(r"layers\.\d+\.attn\.([qk])\.(weight|bias)")


def heads_of(name: str, config: JsonObject) -> int | None:
    """How many heads the rows of a parameter belong to where rope turns what they give; None for all others."""
    match = _TURNED.fullmatch(name)
    return None if match is None else config["heads" if match[1] == "q" else "kv_heads"]


def reorder(raw: np.ndarray, rows: int, heads: int, style: str) -> np.ndarray:
    """uint8 [nbytes] of a matrix (or of a vector, its rows one value each) with its rows in the order of `style`
    ("interleaved" or "half"), which they are not in yet."""
    half = rows // heads // 2
    shape = (heads, 2, half, -1) if style == "interleaved" else (heads, half, 2, -1)
    return np.ascontiguousarray(raw.reshape(shape).swapaxes(1, 2)).reshape(-1)
