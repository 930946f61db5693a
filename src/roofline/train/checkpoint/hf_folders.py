"""Exports the weights of a run as Hugging Face folders while it trains."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roofline.common.errors import ConfigError
from roofline.train.checkpoint import state
from roofline.train.checkpoint.export import tokenizer_files
from roofline.train.config.duration import batches
from roofline.train.config.observers import HfFoldersSection
from roofline.train.storage.local import LocalStore
from roofline.train.storage.open import open_store
from roofline.weights.to_hf import hf_config, write_folder

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

KINDS = {"float32": ("F32", torch.float32), "float16": ("F16", torch.float16), "bfloat16": ("BF16", torch.bfloat16)}


class HfFolders:
    """The exports of a run. Every rank takes part; rank 0 collects the weights, all of them, in memory and writes.

    Attributes:
        every: steps between two exports.
        with_checkpoints: whether the checkpoint of a signal has one.

    Raises ConfigError if the model or its tokenizer cannot be exported, or if a folder is there that is to stay.
    """

    def __init__(self, run: "Run", section: HfFoldersSection) -> None:
        self.run, self.section, self.with_checkpoints = run, section, False
        self.every = batches("callbacks.hf_checkpointer.save_interval", section.save_interval, run.units)
        self.dtype, self._kind = KINDS[section.precision]
        place = section.save_folder.replace("{run_name}", run.config.run_name or "")
        self.store = open_store(f"{place.rstrip('/')}/huggingface")
        self._tokenizer: dict[str, bytes] = {}
        run.world.first(self._check)

    def record(self) -> None:
        """Export the weights as they are."""
        weights = state.full_weights(self.run, self._kind)
        self.run.world.first(lambda: self._write(self._name(self.run.progress.step), weights))
        self.run.log.pause()

    def _name(self, step: int) -> str:
        return self.section.huggingface_folder_name.format(batch=step, run_name=self.run.config.run_name)

    def _check(self) -> None:
        run = self.run
        hf_config(run.shape, self.dtype)
        if run.config.tokenizer is not None:
            self._tokenizer = tokenizer_files(run.config.tokenizer.name)
        if self.section.overwrite or not self.every:
            return
        names = [self._name(step) for step in range(run.progress.step + 1, run.stop + 1) if self._is_due(step)]
        existing = {entry.name.rpartition("/")[0] for entry in self.store.list()}
        for place, name in enumerate(names):
            if name in existing or name in names[:place]:
                raise self._conflict(name)

    def _conflict(self, name: str) -> ConfigError:
        return ConfigError(
            f"callbacks.hf_checkpointer: {self.store.url}/{name} would be overwritten: name another save_folder or "
            "huggingface_folder_name, or set overwrite: true"
        )

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.run.stop

    def _write(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        """Write a folder, which replaces one of that name once it is complete."""
        rows = ((n, tuple(t.shape), t.view(torch.uint8).numpy().reshape(-1)) for n, t in weights.items())
        local = self.store if isinstance(self.store, LocalStore) else None
        parent = Path(local.url) if local is not None else None
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hf-", dir=parent) as folder:
            new = Path(folder, "new")
            write_folder(new, self.run.shape, rows, self.dtype, self._tokenizer)
            if parent is not None:
                target = parent / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if target.exists() and not self.section.overwrite:  # the run ends at a step that nobody foresaw
                    raise self._conflict(name)
                if target.exists():
                    target.rename(Path(folder, "old"))
                new.rename(target)
                return
            if self.store.list(name) and not self.section.overwrite:
                raise self._conflict(name)
            self.store.delete_prefix(name)
            for file in sorted(new.iterdir(), key=lambda path: path.name == "config.json"):  # config.json is the last
                self.store.put(f"{name}/{file.name}", file.read_bytes())
