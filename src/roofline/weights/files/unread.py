"""Weights that lie beside those that are read: named in a line, so that nobody takes them for what was loaded."""

import re
from collections.abc import Collection
from pathlib import Path

from roofline.common import log
from roofline.common.fields import shorten

_WEIGHTS = re.compile(
    r".+\.(safetensors|gguf|pth|h5|msgpack)|.+\.(safetensors|bin)\.index\.json|adapter_config\.json|"
    r"(pytorch_model|adapter_model|model|consolidated)\b.*\.(bin|pt)"
)
_NAMED = 8
_ADAPTER = "; an adapter is applied where it is named (--adapter)"


def tell_unread(folder: Path, read: Collection[Path]) -> None:
    """Log which files of weights a folder has beside those that are read, where it has any."""
    used = {path.name for path in read}
    unread = sorted(path.name for path in folder.iterdir() if path.name not in used and _WEIGHTS.fullmatch(path.name))
    if not unread:
        return
    first = sorted(used)[0]
    model = shorten(first) + (f" and {len(used) - 1} more" if len(used) > 1 else "")
    more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
    names = ", ".join(map(shorten, unread[:_NAMED])) + more
    adapter = _ADAPTER if any(name.startswith("adapter_") for name in unread) else ""
    log.get("weights").warning("%s: the model is read from %s; not used: %s%s", folder, model, names, adapter)
