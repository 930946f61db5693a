"""Exports the weights of a checkpoint as a Hugging Face folder, from which a bundle can be compiled, or an adapter in
PEFT's format."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from roofline.bundle.rewrite import tokenizer_as_files
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.train.checkpoint import checkpoint, manifest
from roofline.train.checkpoint.adapter_export import export_adapter
from roofline.train.checkpoint.state import WEIGHTS
from roofline.train.storage.store import Store
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.names import to_hf
from roofline.weights.sources import find_tokenizer_files, resolve
from roofline.weights.to_hf import write_folder

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def locate(place: str) -> tuple[Store, int]:
    """The store and step of a checkpoint; of a run or a folder of checkpoints the last one. Raises ConfigError."""
    if (Path(place) / "checkpoints").is_dir():
        place = str(Path(place) / "checkpoints")
    store, step = manifest.open_place(place)
    if step is None:
        steps = manifest.steps(store)
        if not steps:
            raise ConfigError(f"{place} holds no complete checkpoint")
        step = steps[-1]
    return store, step


def export(place: str, folder: Path, dtype: str = "BF16", tokenizer: str | None = None) -> int:
    """Write a checkpoint's weights as a new Hugging Face folder, an adapter in PEFT's format; returns the step.

    tokenizer: the model or folder whose tokenizer files are copied; default: the one in the run's configuration.
    Raises ConfigError, UnsupportedError.
    """
    store, step = locate(place)
    with _previous_named(store, step):
        facts = manifest.facts(store, step)
    if adapts(facts):
        if tokenizer is not None:
            raise ConfigError("an adapter has no tokenizer: leave out --tokenizer")
        with _previous_named(store, step):
            export_adapter(store, step, facts, folder, dtype)
        return step
    config = facts["model"]
    family, cfg = configure(config)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    source = tokenizer or (facts["config"]["tokenizer"] or {}).get("name")
    files = tokenizer_files(source) if source else {}
    tensors = {param.name: torch.empty(param.shape) for param in table}
    with _previous_named(store, step):
        state = {f"{WEIGHTS}{to_hf(cfg.family, name)}": tensor for name, tensor in tensors.items()}
        checkpoint.load(store, step, state)
    kind = DTYPES[dtype]
    rows = ((n, tuple(t.shape), t.to(kind).view(torch.uint8).numpy().reshape(-1)) for n, t in tensors.items())
    write_folder(folder, config, rows, dtype, files)
    return step


def adapts(facts: JsonMapping) -> bool:
    """Whether a checkpoint holds an adapter and no model."""
    return (facts["config"].get("adapter") or {"method": "full"})["method"] != "full"


@contextmanager
def _previous_named(store: Store, step: int) -> Iterator[None]:
    """Name in the error about a damaged checkpoint the last good one before it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(checkpoint.damage(store, step, error, "export that one") or str(error)) from error


def tokenizer_files(name: str) -> dict[str, bytes]:
    """Return the files of the tokenizer of a model or folder by name; the tokenizer of a GGUF file as such files.

    Raises ConfigError where there is none, UnsupportedError where a GGUF file's has no such form.
    """
    folder = Path(name)
    path = folder if folder.is_dir() else resolve(name)
    files = find_tokenizer_files(path)
    if files:
        return {file.name: file.read_bytes() for file in files.values()}
    if path.suffix == ".gguf":
        return tokenizer_as_files(open_checkpoint(path))
    raise ConfigError(f"{name} has no tokenizer.json to go with the weights: name another with --tokenizer")
