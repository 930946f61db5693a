"""Writes what a run has trained of a model into its folder: an adapter as PEFT does, or the model as Hugging Face."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roofline.common import log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.checkpoint import state
from roofline.train.checkpoint.adapter_export import write_run_adapter, written
from roofline.train.checkpoint.export import tokenizer_files
from roofline.train.model.shapes import files
from roofline.train.run_folder import ADAPTER, MODEL
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.latent_form import latent_form
from roofline.weights.to_hf import write_folder

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

LEAST_FIDELITY = 0.9  # of what training changed: below it a model is not rounded to bf16
_ELEMENTS = 1 << 20  # at a time, of which there are several copies in float64
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_log = log.get("train")


class TrainedFolder:
    """The folder RUN/adapter, written with each checkpoint and at the end, or RUN/model, written at the end.

    A model is rounded to bf16 if that keeps LEAST_FIDELITY of what training changed, and is float32 otherwise: a step
    of bf16 is 0.4 % of a weight, and small updates lie below it.

    Args:
        folder: another name, for a folder that is written when `write` is called, a model in float32.

    Attributes:
        every: steps between two.
        with_checkpoints: whether it is written with the checkpoint of a signal too.
        dtype: of what was written last; share: the part of what training changed that bf16 keeps of it (of an adapter,
            which is float32: 1).

    Raises UnsupportedError if the adapter has no form in PEFT's files.
    """

    def __init__(self, run: "Run", folder: str | None = None) -> None:
        assert run.config.adapter is not None
        self.run, self.adapts = run, run.config.adapter.method != "full"
        self.every = (run.save_every if self.adapts else 0) or max(1, run.stop)
        self.folder = run.folder / (folder or (ADAPTER if self.adapts else MODEL))
        self.with_checkpoints = self.adapts
        self._rounds = not self.adapts and folder is None
        self.dtype, self.share = "F32", 1.0
        if self.adapts:
            run.world.first(self._check)

    def record(self) -> None:
        """Write what is trained as it is, apart from the time of steps."""
        self.write()
        self.run.log.pause()

    def write(self) -> None:
        """Write what is trained as it is. All ranks take part; rank 0 collects it in memory.

        A model is written once nothing is left of the copy of a checkpoint, which is three times as large: otherwise
        this would be the run's fullest moment.
        """
        if not self.adapts:
            self.run.saver.wait()
        weights = state.full_weights(self.run, torch.float32)
        if self._rounds:
            share = self.run.world.share(self.run.world.first(lambda: rounding_fidelity(weights, self._base())))
            assert share is not None, "rank 0 computes it"
            self.share, self.dtype = share, "BF16" if share >= LEAST_FIDELITY else "F32"
            for name in weights:
                weights[name] = weights[name].to(DTYPES[self.dtype])
        self.run.world.first(lambda: self._write(weights))

    def describe_rounding(self) -> str:
        """Return what rounding did to the model that was written, in words; "" of an adapter."""
        if not self._rounds:
            return ""
        if self.dtype == "BF16":
            return f"{self.folder} in bf16 keeps {self.share:.1%} of what training changed"
        return f"{self.folder} is in float32, because bf16 would keep {self.share:.1%} of what training changed"

    def round_model(self) -> bool:
        """Give the run's model the values that were written, on each rank its own; whether that changed any."""
        if not self._rounds or self.dtype == "F32":
            return False
        with torch.no_grad():
            for parameter in self.run.model.parameters():
                parameter.copy_(parameter.to(DTYPES[self.dtype]))
        return True

    def _base(self) -> Callable[[str], torch.Tensor]:
        """Return what gives the model's values before training by their canonical names, in float32."""
        checkpoint = latent_form(open_checkpoint(files(self.run.config.model)), latent=False)
        params = {param.name: param for _, param, _ in self.run.model.canonical()}
        return lambda name: torch.from_numpy(checkpoint.parameter(params[name]))

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
                write_folder(new, self.run.shape, rows, self.dtype, self._tokenizer())
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
            return tokenizer_files(str(name))
        except (ConfigError, UnsupportedError) as error:
            _log.warning("%s is written without a tokenizer: %s", self.folder, error)
            return {}


def rounding_fidelity(trained: Mapping[str, torch.Tensor], base: Callable[[str], torch.Tensor]) -> float:
    """Return the share of training's change that rounding to bf16 leaves, counted against all that rounding loses.

    With C the change of a weight W, and X the rounded W + C: 1 less the sum of (X - (W + C))^2 by that of C^2, and 0
    where rounding loses more than training changed; 1 where nothing changed. What rounding does to the weights that
    training began with counts too, and so does noise across the change, which `projected_share` of
    bench.quality.survival leaves out: there a merged model is compared with its rounded base, here a trained one with
    itself.

    trained, base: float32, by canonical name.
    """
    lost = change = 0.0
    for name, tensor in trained.items():
        befores = base(name).reshape(-1).split(_ELEMENTS)
        for after, before in zip(tensor.reshape(-1).split(_ELEMENTS), befores, strict=True):
            change += float((after - before).double().square().sum())
            lost += float((after.bfloat16().float() - after).double().square().sum())
    return max(0.0, 1 - lost / change) if change else 1.0
