"""Writes what a run has trained of a model into its folder: an adapter as PEFT does, or the model as Hugging Face."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.train.checkpoint import state
from roofline.train.checkpoint.adapter_export import write_run_adapter, written
from roofline.train.checkpoint.export import tokenizer_files
from roofline.weights.to_hf import write_folder

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

ADAPTER, MODEL = "adapter", "model"  # folders in the run's
_log = log.get("train")


class Outcome:
    """The folder RUN/adapter, written with each checkpoint and at the end, or RUN/model, written at the end.

    Attributes:
        every: steps between two.

    Raises UnsupportedError if the adapter has no form in PEFT's files.
    """

    def __init__(self, run: "Run") -> None:
        assert run.config.adapter is not None
        self.run, self.adapts = run, run.config.adapter.method != "full"
        self.every = (run.save_every if self.adapts else 0) or max(1, run.stop)
        self.folder = run.folder / (ADAPTER if self.adapts else MODEL)
        if self.adapts:
            run.world.first(self._check)

    def record(self) -> None:
        """Write what is trained as it is. All ranks take part; rank 0 collects it in memory."""
        run = self.run
        weights = state.full_weights(run, torch.float32 if self.adapts else torch.bfloat16)
        run.world.first(lambda: self._write(weights))
        run.log.pause()

    def _check(self) -> None:
        """Write an adapter of zeros elsewhere: what cannot be written must not be trained first."""
        rows = self.run.model.canonical()
        zeros = {param.name: torch.zeros(param.shape) for _, param, _ in rows}
        with tempfile.TemporaryDirectory() as folder:
            self._adapter(Path(folder, ADAPTER), zeros)

    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the folder, which replaces an earlier one once it is complete."""
        self.run.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self.run.folder) as folder:
            new = Path(folder, "new")
            if self.adapts:
                self._adapter(new, weights)
            else:
                rows = ((n, tuple(t.shape), t.view(torch.uint8).numpy().reshape(-1)) for n, t in weights.items())
                write_folder(new, self.run.shape, rows, "BF16", self._tokenizer())
            if self.folder.exists():
                self.folder.rename(Path(folder, "old"))
            new.rename(self.folder)

    def _adapter(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        write_run_adapter(folder, self.run.shape, self.run.forms, weights, written(self.run.config))

    def _tokenizer(self) -> dict[str, bytes]:
        """The tokenizer's files of the model, for the folder beside its weights."""
        config = self.run.config
        name = config.tokenizer.name if config.tokenizer is not None else config.model.pretrained_model_name_or_path
        try:
            return {name: path.read_bytes() for name, path in tokenizer_files(str(name)).items()}
        except ConfigError:
            _log.warning("%s is written without a tokenizer: %s has no tokenizer.json to copy", self.folder, name)
            return {}
