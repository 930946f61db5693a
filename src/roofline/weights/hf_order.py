"""The order in which Hugging Face's files have rows of q and k, and value heads, whatever the model's own is."""

from pathlib import Path

import numpy as np

from roofline.weights.config import hf
from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.files.mapped import JsonObject
from roofline.weights.rope_rows import heads_of, reorder
from roofline.weights.value_heads import moved_heads, rows_before


class HfOrder:
    """Of a model with that canonical configuration; its config.json has these fields."""

    def __init__(self, config: JsonObject, fields: JsonObject) -> None:
        self._config, self._style = config, str(hf.from_hf(Path("config.json"), fields)["rope_style"])
        self._heads = moved_heads(config, tiled=False) if config.get("tiled", False) else None

    def of(self, name: str, shape: tuple[int, ...], data: bytes) -> bytes:
        """The bytes of a parameter in a format without blocks, in the files' order."""
        heads, part = heads_of(name, self._config), layer_part(name)[1]
        if heads is not None and self._style != self._config["rope_style"]:
            return reorder(np.frombuffer(data, np.uint8), shape[0], heads, self._style).tobytes()
        if self._heads is None or not part.startswith("linear.") or part == "linear.norm":
            return data
        rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
        if part == "linear.o":
            return rows.reshape(shape[0], len(self._heads), -1)[:, self._heads].tobytes()
        first = rows_before(self._config, part)
        behind = rows[first:].reshape(len(self._heads), -1)[self._heads]
        return rows[:first].tobytes() + behind.tobytes()
