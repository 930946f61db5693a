"""The order of the rows of q and k: in halves, as Hugging Face has them, or in pairs, as GGUF files of Llama do.

Head by head, row i of the first half of those that rope turns and row i of the second are neighbours in the other
order; rows that it does not turn stay behind them. Rows are moved as bytes, so nothing is rounded, whatever the format.
"""

import re
from typing import NamedTuple

import numpy as np

from roofline.weights.files.mapped import JsonObject

_TURNED = re.compile(r"layers\.\d+\.attn\.([qk])\.(weight|bias)")


class TurnedHeads(NamedTuple):
    """How many heads the rows of a parameter belong to. rows: the first of each head, which rope turns; 0: all."""

    heads: int
    rows: int = 0


def heads_of(name: str, config: JsonObject) -> TurnedHeads | None:
    """The heads of a parameter where rope turns what its rows give; None for all others."""
    match = _TURNED.fullmatch(name)
    if match is None:
        return None
    return TurnedHeads(config["heads" if match[1] == "q" else "kv_heads"], config.get("rotary_dim") or 0)


def reorder(raw: np.ndarray, rows: int, heads: TurnedHeads, style: str) -> np.ndarray:
    """uint8 [nbytes] of a matrix (or of a vector, its rows one value each) with its rows in the order of `style`
    ("interleaved" or "half"), which they are not in yet."""
    by_head = raw.reshape(heads.heads, rows // heads.heads, -1)
    turned = heads.rows or by_head.shape[1]
    shape = (2, turned // 2) if style == "interleaved" else (turned // 2, 2)
    moved = by_head[:, :turned].reshape(heads.heads, *shape, -1).swapaxes(1, 2)
    parts = moved.reshape(heads.heads, turned, -1), by_head[:, turned:]
    return np.concatenate(parts, axis=1).reshape(-1)
