"""Writes what a run has trained beside a model's files: an adapter in PEFT's format, or the model in Hugging Face's."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.ops.adapters import AdapterMatrix
from roofline.train.checkpoint import state
from roofline.train.checkpoint.export import tokenizer_files
from roofline.train.model.adapted import Form
from roofline.weights.adapter_files import Written, write_adapter
from roofline.weights.adapter_matrices import rows_are_paired
from roofline.weights.families.shared.joined_experts import experts_apart
from roofline.weights.families.table import files_of
from roofline.weights.to_hf import write_folder

if TYPE_CHECKING:
    from roofline.train.config.adapter import AdapterSection
    from roofline.train.run.loop import Run

ADAPTER, MODEL = "adapter", "model"  # folders in the run's
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_log = log.get("train")


class Outcome:
    """The folder RUN/adapter, written with each checkpoint and at the end, or RUN/model, written at the end.

    Args:
        folder: another name, for a folder that is written when `write` is called, a model in float32.

    Attributes:
        every: steps between two.

    Raises UnsupportedError if the adapter has no form in PEFT's files.
    """

    def __init__(self, run: "Run", folder: str | None = None) -> None:
        assert run.config.adapter is not None
        self.run, self.section = run, run.config.adapter
        self.adapts = self.section.method != "full"
        self.every = (run.save_every if self.adapts else 0) or max(1, run.stop)
        self.folder = run.folder / (folder or (ADAPTER if self.adapts else MODEL))
        self._dtype = "F32" if self.adapts or folder else "BF16"
        if self.adapts:
            run.world.first(self._check)

    def record(self) -> None:
        """Write what is trained as it is, apart from the time of steps."""
        self.write()
        self.run.log.pause()

    def write(self) -> None:
        """Write what is trained as it is. All ranks take part; rank 0 collects it in memory."""
        weights = state.full_weights(self.run, DTYPES[self._dtype])
        self.run.world.first(lambda: self._write(weights))

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
                write_folder(new, self.run.shape, rows, self._dtype, self._tokenizer())
            if self.folder.exists():
                self.folder.rename(Path(folder, "old"))
            new.rename(self.folder)

    def _adapter(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        write_run_adapter(folder, self.run.shape, self.run.forms, weights, self._written())

    def _written(self) -> Written:
        return written(self.section, self.run.config.model.pretrained_model_name_or_path)

    def _tokenizer(self) -> dict[str, bytes]:
        """The tokenizer's files of the model, for the folder beside its weights."""
        config = self.run.config
        name = config.tokenizer.name if config.tokenizer is not None else config.model.pretrained_model_name_or_path
        try:
            return {name: path.read_bytes() for name, path in tokenizer_files(str(name)).items()}
        except ConfigError:
            _log.warning("%s is written without a tokenizer: %s has no tokenizer.json to copy", self.folder, name)
            return {}


def written(section: "AdapterSection", base: str | None) -> Written:
    """How an adapter of a configuration is written. base: the name or place of the model."""
    return Written(base, section.rslora)


def write_run_adapter(
    folder: Path, config: JsonObject, forms: Mapping[str, Form], weights: Mapping[str, torch.Tensor], how: Written
) -> None:
    """Write a new folder in PEFT's format. config: the canonical configuration; forms: the plan; weights: float32 by
    the names that `Model.canonical` gives."""
    matrices = []
    paired = rows_are_paired(config)
    for name, form in forms.items():
        stem = name.removesuffix(".weight")
        if not form.rank or (form.experts and form.shared):
            continue
        arrays = {each: weights[f"{stem}.{each}"].numpy() for each in form.trained}
        if form.experts:
            up = weights.get(f"{stem.removesuffix('.gate')}.up.lora_B") if stem.endswith(".gate") else None
            matrices += _of_experts(config, stem, form, arrays, None if up is None else up.numpy())
            continue
        b = np.ascontiguousarray(arrays["lora_B"].T)
        lengths = arrays.get("lora_magnitude_vector")
        matrices.append(AdapterMatrix(name, arrays["lora_A"], b, form.scale, lengths, paired))
    write_adapter(folder, config, matrices, how)


def _of_experts(
    config: JsonObject, stem: str, form: Form, arrays: Mapping[str, np.ndarray], up: np.ndarray | None
) -> list[AdapterMatrix]:
    """The matrix of each expert: of gate and up as one, which share A, or of down."""
    before, _, part = stem.rpartition(".experts.")
    in_turn = files_of(config["family"]).NAMES.hf_apart is experts_apart
    each_a = np.split(arrays["lora_A"], form.experts)
    each_b = np.split(arrays["lora_B"], form.experts)
    if up is not None:
        pairs = zip(each_b, np.split(up, form.experts), strict=True)
        joined = [np.stack([gate, other], 1) if in_turn else np.stack([gate, other]) for gate, other in pairs]
        each_b, part = [both.reshape(-1, form.rank) for both in joined], "gate_up"
    return [
        AdapterMatrix(f"{before}.experts.{number}.{part}.weight", a, np.ascontiguousarray(b.T), form.scale)
        for number, (a, b) in enumerate(zip(each_a, each_b, strict=True))
    ]
