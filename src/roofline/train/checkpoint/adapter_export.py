"""Writes adapters in PEFT's format: of a run while it trains, and of its checkpoints."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.ops.adapters import AdapterMatrix
from roofline.train.checkpoint import checkpoint
from roofline.train.checkpoint.state import WEIGHTS
from roofline.train.config.schema import TrainConfig
from roofline.train.model.adaptation import forms as plan
from roofline.train.model.form import ParameterForm, trained_rows
from roofline.train.model.shapes import files
from roofline.train.storage.store import Store
from roofline.weights.adapter_files import AdapterDescription, write_adapter
from roofline.weights.adapter_matrices import rows_are_paired
from roofline.weights.config.wrapped import modules_within
from roofline.weights.families.shared.joined_experts import experts_apart
from roofline.weights.families.table import files_of
from roofline.weights.joined_rows import holders_of, in_files


def export_adapter(store: Store, step: int, facts: JsonObject, folder: Path, dtype: str) -> None:
    """Write the adapter of a checkpoint as a new folder. facts: the checkpoint's; dtype: "F32", "F16" or "BF16"."""
    config, shape = TrainConfig.model_validate(facts["config"]), facts["model"]
    family, cfg = configure(shape)
    forms = plan(config, shape)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.name in forms]
    rows = [row for param in table for row in trained_rows(cfg.family, param, forms[param.name])]
    tensors = {param.name: torch.empty(param.shape) for _, param in rows}
    checkpoint.load(store, step, {f"{WEIGHTS}{name}": tensors[param.name] for name, param in rows})
    write_run_adapter(folder, shape, forms, tensors, replace(written(config), dtype=dtype))


def written(config: TrainConfig) -> AdapterDescription:
    """How the adapter of a run is written."""
    assert config.adapter is not None
    within = ""
    with suppress(ConfigError):  # a run can be written where its model is no more
        within = modules_within(files(config.model))
    return AdapterDescription(config.model.pretrained_model_name_or_path, config.adapter.rslora, within=within)


def write_run_adapter(
    folder: Path,
    config: JsonObject,
    forms: Mapping[str, ParameterForm],
    weights: Mapping[str, torch.Tensor],
    how: AdapterDescription,
) -> None:
    """Write a new folder in PEFT's format. config: the canonical configuration; forms: the plan; weights: float32 by
    the canonical names that `Model.canonical` gives."""
    matrices, holders, of_holders = [], holders_of(config), dict[str, np.ndarray]()
    paired, tiled = rows_are_paired(config), bool(config.get("tiled", False))
    for name, form in forms.items():
        stem = name.removesuffix(".weight")
        if not form.rank or (form.experts and form.shared):
            continue
        arrays = {part: weights[f"{stem}.{part}"].numpy() for part in form.trained}
        if form.experts:
            up = weights.get(f"{stem.removesuffix('.gate')}.up.lora_B") if stem.endswith(".gate") else None
            matrices += _of_experts(config, stem, form, arrays, None if up is None else up.numpy())
            continue
        b = np.ascontiguousarray(arrays["lora_B"].T)
        lengths = arrays.get("lora_magnitude_vector")
        holder = in_files(name, holders)
        a = of_holders[holder] if form.shared else arrays["lora_A"]
        of_holders[holder] = a
        matrix = AdapterMatrix(tensor=name, a=a, b=b, scale=form.scale, magnitude=lengths)
        matrices.append(replace(matrix, paired=paired, tiled=tiled))
    write_adapter(folder, config, matrices, how)


def _of_experts(
    config: JsonObject, stem: str, form: ParameterForm, arrays: Mapping[str, np.ndarray], up: np.ndarray | None
) -> list[AdapterMatrix]:
    """The matrix of each expert: of gate and up as one, which share A, or of down."""
    before, _, part = stem.rpartition(".experts.")
    in_turn = files_of(config["family"]).NAMES.hf_apart is experts_apart
    each_a = np.split(arrays["lora_A"], form.experts)
    each_b = np.split(arrays["lora_B"], form.experts)
    if up is not None:
        pairs = zip(each_b, np.split(up, form.experts), strict=True)
        joined = [np.stack([gate, other], 1) if in_turn else np.stack([gate, other]) for gate, other in pairs]
        each_b, part = [joined_pair.reshape(-1, form.rank) for joined_pair in joined], "gate_up"
    return [
        AdapterMatrix(f"{before}.experts.{number}.{part}.weight", a, np.ascontiguousarray(b.T), form.scale)
        for number, (a, b) in enumerate(zip(each_a, each_b, strict=True))
    ]
