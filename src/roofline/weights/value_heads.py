"""The order of the value heads of gated DeltaNet: those of a key head side by side, as Hugging Face has them, or tiled,
as GGUF files of Qwen3.5 do: those of the first key heads come first, then the second of each."""

import numpy as np

from roofline.weights.files.mapped import JsonObject


def moved_heads(config: JsonObject, tiled: bool) -> np.ndarray | None:
    """Which value head stands at each place once they are moved into that order from the other; None where both are
    one order."""
    keys, values = config.get("key_heads", 0), config.get("value_heads", 0)
    if not keys or keys == values:
        return None
    group = values // keys
    order: np.ndarray = np.arange(values).reshape((keys, group) if tiled else (group, keys)).T.reshape(-1)
    return order


def rows_before(config: JsonObject, part: str) -> int:
    """How many rows of q and k stand before those of value heads."""
    return 2 * config["key_heads"] * config["key_dim"] if part in ("linear.qkv", "linear.conv") else 0
