"""PEFT's folder of an adapter, read: which tensors of adapter_model.safetensors belong to which matrix of ours.

Transformers keeps the gates and ups, and the downs, of all experts of a layer in a tensor each. PEFT wraps their module
once for each of them (`target_parameters`), the second around the first, whose matrices are therefore called
`experts.base_layer.lora_A`. A holds those of all experts one below the other, [experts * r, inputs]; in the columns of
B, [outputs, r * experts], the experts take turns.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from roofline.common import log
from roofline.common.errors import UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.common.files import read_regular
from roofline.common.json_files import parse_object
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_config import CONFIG, read_settings
from roofline.weights.adapter_matrices import finite_values
from roofline.weights.config.wrapped import other_module
from roofline.weights.files.safetensors import SafetensorsFile
from roofline.weights.names import matrix_from_hf

WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_EXPERTS = 4096
EXPERT_PARTS = ("gate_up_proj", "down_proj")  # in the order in which transformers' modules have them
_NAME = re.compile(
    r"base_model\.model\.(?P<module>[\w.]{1,200}?)(?P<within>(?:\.base_layer){0,2})\."
    r"(?:lora_(?P<part>[AB])\.weight|lora_(?P<magnitude>magnitude_vector)(?:\.weight)?)"
)
_EXPERTS = re.compile(r"(?:\w+\.)*layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?:\w+\.)?experts")
_FLOATS = ("F32", "F16", "BF16")


@dataclass
class _Group:
    """The tensors that belong together. tensor: the matrix of ours, or what those of all experts begin with; module:
    what the settings call it; tensors: "A", "B", "magnitude" -> name in the file; part: of experts, the parameter."""

    tensor: str
    module: str
    part: str = ""
    tensors: dict[str, str] = field(default_factory=dict)


class PeftFolder:
    """A folder with PEFT's two files, opened and checked. nbytes: of its matrices as float32.

    Raises ConfigError naming file and field for what is malformed, UnsupportedError for what adapters may have and ours
    not.
    """

    def __init__(self, folder: Path) -> None:
        config_path = folder / CONFIG
        config = parse_object(config_path, read_regular(config_path, MAX_CONFIG_BYTES))
        self._settings = read_settings(config_path, config)
        self._file = SafetensorsFile(folder / WEIGHTS)
        self._groups = self._grouped()
        used = [name for group in self._groups for name in group.tensors.values()]
        self.nbytes = 4 * sum(math.prod(self._file.tensors[name].shape) for name in used)

    def matrices(self) -> Iterator[AdapterMatrix]:
        """By the names of our tensors, rows in Hugging Face's order."""
        for group in self._groups:
            values = {part: finite_values(self._file, name) for part, name in group.tensors.items()}
            scale = float(np.float32(self._settings.scale_of(group.module)))
            if group.part:
                yield from _of_experts(group, values["A"], values["B"], self._settings.rank_of(group.module), scale)
                continue
            a, b = np.ascontiguousarray(values["A"]), np.ascontiguousarray(values["B"].T)
            yield AdapterMatrix(group.tensor, a, b, scale, values.get("magnitude"))

    def _grouped(self) -> list[_Group]:
        groups: dict[tuple[str, int], _Group] = {}
        unused: dict[str, None] = {}
        for name, info in self._file.tensors.items():
            match = _NAME.fullmatch(name)
            if match is not None and (part := other_module(match["module"])):
                unused[part] = None
                continue
            group = None if match is None else self._group(match, groups)
            if match is None or group is None:
                reason = "is no LoRA matrix of a linear layer in the model's blocks; nothing else is adapted here"
                raise UnsupportedError(f"{self._file.path}: tensor {shorten(name)!r}", reason)
            if info.format not in _FLOATS:
                refuse(
                    self._file.path, f"tensor {shorten(name)!r}", f"is {info.format}, not one of {', '.join(_FLOATS)}"
                )
            group.tensors[match["part"] or match["magnitude"].partition("_")[0]] = name
        if unused:
            line = "%s: matrices of %s are not used: a text passes through no such part"
            log.get("weights").warning(line, self._file.path, " and ".join(unused))
        if not groups:
            refuse(self._file.path, "tensors", "there are none")
        for (module, depth), group in groups.items():
            if group.part:
                self._name_part(group, depth, (module, 1) in groups)
        self._settings.check_patterns(self._file.path.with_name(CONFIG), [group.module for group in groups.values()])
        for group in groups.values():
            self._check(group)
        return sorted(groups.values(), key=lambda group: (group.tensor, group.part))

    def _group(self, match: re.Match[str], groups: dict[tuple[str, int], _Group]) -> _Group | None:
        """The group of a tensor; None where no matrix of ours has its name."""
        module, depth = match["module"], match["within"].count(".")
        if (module, depth) in groups:
            return groups[module, depth]
        if experts := _EXPERTS.fullmatch(module):
            group = _Group(f"layers.{experts['layer']}.mlp.experts", module, "unnamed")
        else:
            tensor = matrix_from_hf(f"{module}.weight")
            if tensor is None or not tensor.startswith("layers.") or depth:
                return None
            if key := self._settings.leaves_out(module):
                reason = (
                    f"{key} of {CONFIG} leaves it out, so PEFT does not read it: name it there, or take it out here"
                )
                refuse(self._file.path, f"tensors of {shorten(module)!r}", reason)
            group = _Group(tensor, self._settings.key_of(module))
        groups[module, depth] = group
        return group

    def _name_part(self, group: _Group, depth: int, nested: bool) -> None:
        """Say which parameter of the experts a group is of, which a nested one's names say, or else the settings."""
        if nested:
            group.part = EXPERT_PARTS[1 - depth] if depth < 2 else ""
        else:
            expert_parts = {
                parameter.rpartition(".")[2] for parameter in self._settings.parameters if "experts" in parameter
            }
            group.part = expert_parts.pop() if len(expert_parts) == 1 else ""
        if group.part not in EXPERT_PARTS:
            what = f"{self._file.path}: the experts' matrices of {group.module}"
            reason = (
                f"{CONFIG} does not say which of {' and '.join(EXPERT_PARTS)} they are of, and nothing else is read"
            )
            raise UnsupportedError(
                what, reason, tuple(f"target_parameters [mlp.experts.{part}]" for part in EXPERT_PARTS)
            )
        group.module = f"{group.module}.{group.part}"

    def _check(self, group: _Group) -> None:
        """All tensors of a group are there, in shapes that fit its rank."""
        rank, needed = self._settings.rank_of(group.module), {"A", "B"}
        if self._settings.dora and not group.part:
            needed.add("magnitude")
        if missing := sorted(needed - group.tensors.keys()):
            refuse(
                self._file.path, group.tensor, f"lora_{missing[0]}{'_vector' * (missing[0] == 'magnitude')} is missing"
            )
        if spare := group.tensors.keys() - needed:
            name = group.tensors[spare.pop()]
            refuse(self._file.path, f"tensor {shorten(name)!r}", f"is there, and {CONFIG} does not say use_dora")
        shapes = {part: self._file.tensors[name].shape for part, name in group.tensors.items()}
        a, b = shapes["A"], shapes["B"]
        experts = a[0] // rank if group.part and len(a) == 2 else 1
        expected = (
            ("A", "[r, inputs]", len(a) == 2 and 0 not in a and a[0] == experts * rank and experts <= MAX_EXPERTS),
            ("B", "[outputs, r]", len(b) == 2 and 0 not in b and b[1] == experts * rank),
            ("magnitude", "[outputs]", shapes.get("magnitude", b[:1]) == b[:1]),
        )
        for part, shape, fits in expected:
            if not fits:
                name = group.tensors[part]
                reason = f"has shape {list(shapes[part])}, not {shape} with r = {rank}"
                if group.part:
                    reason = (
                        f"has shape {list(shapes[part])}, not {shape.replace('r', 'r * experts', 1)} with r = {rank}"
                    )
                refuse(self._file.path, f"tensor {shorten(name)!r}", reason)


def _of_experts(group: _Group, a: np.ndarray, b: np.ndarray, rank: int, scale: float) -> Iterator[AdapterMatrix]:
    """A matrix for each expert of what PEFT has in one. a: [experts * rank, inputs]; b: [outputs, rank * experts]."""
    experts, part = len(a) // rank, group.part.removesuffix("_proj")
    of_b = np.ascontiguousarray(b.reshape(len(b), rank, experts).transpose(2, 1, 0))  # [experts, rank, outputs]
    for number in range(experts):
        rows = np.ascontiguousarray(a[number * rank : (number + 1) * rank])
        yield AdapterMatrix(f"{group.tensor}.{number}.{part}.weight", rows, of_b[number], scale)
