"""Writes adapters as PEFT (0.21.2) does: a folder that it loads, and that we serve."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import formats
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_config import CONFIG
from roofline.weights.adapter_matrices import joined, rows_together, with_rows, with_value_heads
from roofline.weights.adapter_peft import EXPERT_PARTS, WEIGHTS
from roofline.weights.families.shared.tensor_names import EXPERT, without_expert
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.files.output import new_folder
from roofline.weights.files.safetensors_writer import write_file
from roofline.weights.names import to_hf

_PREFIX = "base_model.model."
_PEFT_VERSION = "0.21.2"  # whose files these are like


@dataclass(frozen=True)
class AdapterDescription:
    """How an adapter is written. base: the model it was trained on, by name or path; rslora: scales are said as alpha /
    sqrt(r); dtype: "F32", "F16" or "BF16"; dropout: of the training, for the reader; within: what transformers has
    before the modules of the model, where that is the text part of one that reads more; "": nothing."""

    base: str | None = None
    rslora: bool = False
    dtype: str = "F32"
    dropout: float = 0.0
    within: str = ""

    def module(self, name: str) -> str:
        """What a module is called in the model that the adapter is put on."""
        return name.replace("model.", self.within, 1) if self.within else name


@dataclass(frozen=True)
class _Module:
    """A module of the model as PEFT names it. prefix: before its tensors; key: as patterns of ranks name it; parameter:
    of experts the one that it stands for, in a layer, of a linear layer that is named by its weight that weight."""

    prefix: str
    key: str
    rank: int
    scale: float
    tensors: dict[str, np.ndarray]
    parameter: str = ""


def write_adapter(
    folder: Path,
    config: JsonObject,
    matrices: Sequence[AdapterMatrix],
    written: AdapterDescription = AdapterDescription(),
) -> Path:
    """Write a new folder, which is complete once it exists.

    Args:
        config: the canonical configuration of the model whose matrices these are.
        matrices: by the names of our tensors; of an expert `layers.N.mlp.experts.E.gate_up.weight`, or `.gate.weight`
            and `.up.weight`, and `.down.weight`, which all experts of a layer have with one rank and one scale.

    Raises ConfigError, CapacityError where the place cannot be written, ConfigError for matrices that PEFT's files have
    no form for.
    """
    in_order = (with_value_heads(with_rows(matrix, config, paired=False), config, tiled=False) for matrix in matrices)
    parts = () if files_of(config["family"]).NAMES.modules_apart else None
    rows = list(joined(rows_together(in_order, config, parts), config))
    modules = _modules(config, rows, written)
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        for kind, values in module.tensors.items():
            suffix = "lora_magnitude_vector" if kind == "magnitude" else f"lora_{kind}.weight"
            tensors[f"{module.prefix}.{suffix}"] = values
    form = formats.get(written.dtype)
    infos = [TensorInfo(name, written.dtype, v.shape, form.nbytes(v.shape)) for name, v in tensors.items()]
    turned = any(map(files_of(config["family"]).NAMES.is_transposed, (matrix.tensor for matrix in matrices)))
    settings = _settings(modules, written) | {"fan_in_fan_out": turned}
    with new_folder(folder, sum(info.nbytes for info in infos)) as part:
        (part / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        write_file(part / WEIGHTS, infos, lambda info: [form.quantize(tensors[info.name])])
    return folder


def _modules(config: JsonObject, matrices: Sequence[AdapterMatrix], written: AdapterDescription) -> list[_Module]:
    family, names = config["family"], files_of(config["family"]).NAMES
    modules, experts = [], {}  # type: list[_Module], dict[str, dict[int, AdapterMatrix]]
    for matrix in matrices:
        name, number = without_expert(matrix.tensor)
        if number:
            experts.setdefault(name, {})[int(number)] = matrix
            continue
        if names.is_by_head(matrix.tensor):
            what, reason = (
                f"an adapter of {matrix.tensor} in PEFT's files",
                "Hugging Face has its rows in another order",
            )
            raise UnsupportedError(what, reason)
        module = written.module(names.module_of(to_hf(family, matrix.tensor).removesuffix(".weight")))
        tensors = {"A": matrix.a, "B": np.ascontiguousarray(matrix.b.T)}
        if matrix.magnitude is not None:
            tensors["magnitude"] = matrix.magnitude
        parameter = f"{module}.weight" if module.rpartition(".")[2] in names.as_parameters else ""
        if parameter and matrix.magnitude is not None:
            raise UnsupportedError(f"DoRA of {parameter}", "PEFT takes the module for experts", ("method lora",))
        modules.append(
            _Module(_PREFIX + module, parameter or module, matrix.rank, matrix.scale, tensors, parameter=parameter)
        )
    of_experts = (
        _of_experts(name, group, experts, written, names.experts_module) for name, group in sorted(experts.items())
    )
    return [*modules, *of_experts]


def _of_experts(
    name: str,
    group: dict[int, AdapterMatrix],
    experts: dict[str, dict[int, AdapterMatrix]],
    written: AdapterDescription,
    within: str,
) -> _Module:
    """What PEFT has in one of the matrices of a layer's experts; see `adapter_peft`. name: with EXPERT in it; within:
    their module in a layer."""
    before, _, part = name.removesuffix(".weight").rpartition(f".{EXPERT}.")
    in_order = [group[number] for number in sorted(group)]
    first = in_order[0]
    if f"{part}_proj" not in EXPERT_PARTS or sorted(group) != list(range(len(group))):
        parts = " and ".join(part.removesuffix("_proj") for part in EXPERT_PARTS)
        raise ConfigError(f"{name}: PEFT's files have {parts} of all experts of a layer, from the first one on")
    if any((module.rank, module.scale) != (first.rank, first.scale) for module in in_order):
        raise ConfigError(f"{name}: its experts have several ranks or scales, and PEFT's files have one")
    if first.magnitude is not None:
        raise UnsupportedError(f"{name}: DoRA of experts", "PEFT has none", ("method lora",))
    a = np.concatenate([module.a for module in in_order])  # [experts * r, inputs]
    b = np.stack([module.b for module in in_order]).transpose(2, 1, 0)  # [outputs, r, experts]
    tensors = {"A": a, "B": np.ascontiguousarray(b).reshape(len(b), -1)}
    module = written.module(f"model.{before.removesuffix('mlp.experts')}{within}")
    other = name.replace(f".{part}.", ".down.")
    prefix = f"{_PREFIX}{module}" + (".base_layer" if part == "gate_up" and other in experts else "")
    return _Module(
        prefix=prefix,
        key=f"{module}.{part}_proj",
        rank=first.rank,
        scale=first.scale,
        tensors=tensors,
        parameter=f"{within}.{part}_proj",
    )


def _settings(modules: Sequence[_Module], written: AdapterDescription) -> dict[str, object]:
    """The fields of adapter_config.json: what most modules have, and patterns for the others."""

    def alpha_of(module: _Module) -> float:
        alpha = module.scale * (math.sqrt(module.rank) if written.rslora else module.rank)
        return round(alpha, 6) if math.isclose(round(alpha, 6), alpha, rel_tol=1e-6) else alpha

    rank = Counter(module.rank for module in modules).most_common(1)[0][0]
    alpha = Counter(alpha_of(module) for module in modules).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": written.base,
        "inference_mode": True,
        "peft_version": _PEFT_VERSION,
        "r": rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": written.dropout,
        "use_rslora": written.rslora,
        "use_dora": any("magnitude" in module.tensors for module in modules),
        "bias": "none",
        "init_lora_weights": True,
        "rank_pattern": {module.key: module.rank for module in modules if module.rank != rank},
        "alpha_pattern": {module.key: _number(alpha_of(module)) for module in modules if alpha_of(module) != alpha},
        "target_modules": _targets([module.key for module in modules if not module.parameter], written.within),
        "target_parameters": sorted({module.parameter for module in modules if module.parameter}) or None,
        "modules_to_save": None,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _targets(modules: Sequence[str], within: str) -> list[str]:
    """The last parts of the modules' names where all layers that have any have the same, else the full names, and so
    within a model that has such modules elsewhere too: PEFT puts matrices of its own wherever a name fits."""
    by_layer: dict[str, set[str]] = {}
    for module in modules:
        layer, _, leaf = module.rpartition(".")
        number = next((part for part in layer.split(".") if part.isdigit()), "")
        by_layer.setdefault(number, set()).add(leaf)
    sets = {frozenset(leaves) for leaves in by_layer.values()}
    numbers = {int(number) for number in by_layer if number}
    alike = not within and len(sets) == 1 and numbers == set(range(len(numbers)))
    return sorted(set().union(*by_layer.values())) if alike else sorted(modules)
