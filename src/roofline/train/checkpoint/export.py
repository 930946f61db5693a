"""From a checkpoint to files that everything serves: a Hugging Face folder, or a bundle."""

from pathlib import Path

import torch

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.train.checkpoint import checkpoint
from roofline.train.checkpoint.state import WEIGHTS
from roofline.train.storage.store import Store
from roofline.weights.names import to_hf
from roofline.weights.sources import find_tokenizer_files, resolve
from roofline.weights.to_hf import write_folder

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def located(place: str) -> tuple[Store, int]:
    """The store and step of a checkpoint: of a run's folder or a folder of checkpoints the last. Raises ConfigError."""
    if (Path(place) / "checkpoints").is_dir():
        place = str(Path(place) / "checkpoints")
    store, step = checkpoint.named(place)
    if step is None:
        found = checkpoint.steps(store)
        if not found:
            raise ConfigError(f"{place} holds no complete checkpoint")
        step = found[-1]
    return store, step


def export(place: str, folder: Path, dtype: str = "BF16", tokenizer: str | None = None) -> int:
    """Writes a checkpoint's weights as a new Hugging Face folder; its step.

    tokenizer: a model or folder whose tokenizer files go with them; default: the one the run's configuration names.
    Raises ConfigError, UnsupportedError.
    """
    store, step = located(place)
    said = checkpoint.facts(store, step)
    config: JsonObject = said["model"]
    family, cfg = configure(config)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    named = tokenizer or (said["config"]["tokenizer"] or {}).get("name")
    beside = {name: path.read_bytes() for name, path in _tokenizer_files(named).items()} if named else {}
    held = {param.name: torch.empty(param.shape) for param in table}
    checkpoint.load(store, step, {f"{WEIGHTS}{to_hf(cfg.family, name)}": tensor for name, tensor in held.items()})
    kind = DTYPES[dtype]
    rows = ((n, tuple(t.shape), t.to(kind).view(torch.uint8).numpy().reshape(-1)) for n, t in held.items())
    write_folder(folder, config, rows, dtype, beside)
    return step


def _tokenizer_files(name: str) -> dict[str, Path]:
    folder = Path(name)
    path = folder if folder.is_dir() else resolve(name)
    found = find_tokenizer_files(path)
    if not found:
        raise ConfigError(f"{name} has no tokenizer.json to go with the weights: name another with --tokenizer")
    return {file.name: file for file in found.values()}
