"""What a quantisation method is: which tensors of a file make a parameter, its format, and its bytes.

A method keeps the file's numbers: codes, scales and zero points go into a format of `ops.formats` that holds all of
them, and where there is none into float32, when the products are exact there.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.ops import formats
from roofline.weights.files.mapped import TensorInfo

FLOATS = ("F16", "BF16", "F32")  # dtypes that scales may have
READ = ("BF16", "F16", "F32", "GPTQ, AWQ, fp8, compressed-tensors, bitsandbytes NF4, MXFP4")


class TensorSource(Protocol):
    """Named tensors of files, in the dtypes of safetensors."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes] of a tensor."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix that tensors of a file make.

    Attributes:
        name: Hugging Face's, such as "model.layers.0.mlp.up_proj.weight".
        format: a name of `ops.formats`; shape: (rows, columns).
        parts: the tensors that are used up by it.
        make: its bytes, uint8, read and made anew at each call. Raises ConfigError where they are no numbers.
        widened: why it is float32 and not a quantised format, "" where it is not.
    """

    name: str
    format: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    make: Callable[[], np.ndarray]
    widened: str = ""

    @property
    def info(self) -> TensorInfo:
        """The same as tensors of a file are described."""
        return TensorInfo(self.name, self.format, self.shape, formats.get(self.format).nbytes(self.shape))


class Method(Protocol):
    """A quantisation method whose configuration was checked."""

    def parameters(self, files: "TensorFiles") -> Iterable[QuantisedMatrix]:
        """The parameters that are made of several tensors. Raises ConfigError, UnsupportedError naming the tensor."""

    def unread(self, name: str) -> bool:
        """Whether a tensor says only how activations or a cache were meant to be rounded, which ours are not."""


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a model's files, each asked for with the dtype and shape that it must have.

    path: what errors name. All that raise raise ConfigError.
    """

    path: Path
    source: TensorSource

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.source.tensors

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise the ConfigError that names the file and the tensor."""
        refuse(self.path, f"tensor {shorten(name)!r}", reason)

    def need(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...], of: str) -> TensorInfo:
        """The tensor `name`, of one of these dtypes and shapes (no shapes: any). of: the tensor it belongs to."""
        if name not in self.tensors:
            self.refuse(name, f"is missing beside {shorten(of)!r}; take a copy of the model that is whole")
        info = self.tensors[name]
        if info.format not in dtypes or (shapes and info.shape not in shapes):
            allowed = " or ".join(map(str, shapes)) or "any shape"
            self.refuse(name, f"is {info.format} of {info.shape}, not {' or '.join(dtypes)} of {allowed}")
        return info

    def group_count(self, name: str, columns: int, group_size: int) -> int:
        """How many groups of so many inputs, -1: of all, a matrix of `columns` inputs has. name: the tensor that a
        refusal names."""
        size = columns if group_size == -1 else group_size
        if columns % size:
            self.refuse(name, f"has {columns} inputs, which groups of {size} (group_size) do not divide")
        return columns // size

    def array(self, name: str) -> np.ndarray:
        """A tensor of integers in its shape: "I32" as uint32, "I8" as int8, "U8" as uint8, "I64" as int64."""
        kinds = {"I32": "<u4", "I8": "i1", "U8": "u1", "I64": "<i8"}
        info = self.tensors[name]
        return np.ascontiguousarray(self.source.read(name)).view(kinds[info.format]).reshape(info.shape)

    def floats(self, name: str) -> np.ndarray:
        """A tensor of floats as float32 in its shape. Refuses what is not finite."""
        info = self.tensors[name]
        raw = self.source.read(name)
        values = formats.get(info.format).dequantize(raw, (math.prod(info.shape),)).reshape(info.shape)
        if not np.isfinite(values).all():
            self.refuse(name, "holds NaN or infinity, so the file is damaged; take another copy of the model")
        return values


# What AutoRound (0.16) writes beside the keys of the method whose form its files have: how it looked for the codes, and
# how activations and a cache were meant to be rounded. Codes of another type lie otherwise.
AUTOROUND: Mapping[str, tuple[object, ...] | None] = {
    "data_type": ("int",),
    "provider": ("auto-round",),
    **dict.fromkeys(("autoround_version", "iters", "seqlen", "nsamples", "lr", "minmax_lr", "batch_size", "amp")),
    **dict.fromkeys(("gradient_accumulate_steps", "low_gpu_mem_usage", "scale_dtype", "dataset")),
    **dict.fromkeys(("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input")),
    **dict.fromkeys(("act_bits", "act_data_type", "act_dynamic", "act_sym", "act_group_size")),
    **dict.fromkeys(("block_name_to_quantize", "static_kv_dtype", "static_kv_granularity")),
    **dict.fromkeys(("static_attention_dtype", "static_attention_granularity")),
}


def check_dynamic(what: str, dynamic: object) -> None:
    """Raise UnsupportedError unless GPTQModel's settings by module leave modules out, which their tensors show too."""
    if dynamic is None:
        return
    settings = dynamic if isinstance(dynamic, Mapping) else {str(dynamic): None}
    other = next((str(key) for key in settings if not str(key).startswith("-:")), None)
    if other is not None:
        reason = "we read modules that are left out (-:), and one setting for all others"
        raise UnsupportedError(f"{what}: dynamic {shorten(other)}", reason, READ)


def check_keys(what: str, table: object, keys: Mapping[str, tuple[object, ...] | None]) -> Mapping[str, object]:
    """The table, when each of its keys is in `keys` with one of the values there.

    keys: key -> its values; None: any, for it does not change what the weights are. null is as if the key were absent.
    Raises UnsupportedError naming the key.
    """
    if not isinstance(table, Mapping):
        raise UnsupportedError(f"{what} = {shorten(str(table))}", "it is no table", READ)
    for key, value in table.items():
        if value is None:
            continue
        if key not in keys:
            raise UnsupportedError(f"{what}: key {shorten(str(key))!r}", "we do not know what it changes", READ)
        values = keys[key]
        if values is not None and not any(type(value) is type(other) and value == other for other in values):
            readable = ", ".join(map(str, values))
            raise UnsupportedError(f"{what}: {key} {shorten(str(value))}", f"we read {readable}", READ)
    return table


class PlainFloats:
    """No quantisation method."""

    def parameters(self, files: TensorFiles) -> Iterable[QuantisedMatrix]:
        """None."""
        for name in files.tensors:
            if name.endswith((".qweight", ".weight_packed")) or ".quant_state." in name:
                files.refuse(name, "is quantised, but config.json has no quantization_config that says how")
        return ()

    def unread(self, name: str) -> bool:
        """No tensor."""
        return False


@dataclass
class QuantisedTensors:
    """The tensors of `files` with those that make a parameter replaced by it.

    Attributes: tensors: name -> TensorInfo; widened: name -> why a quantised matrix is float32.
    Raises ConfigError and UnsupportedError as the method does.
    """

    files: TensorFiles
    method: Method
    tensors: dict[str, TensorInfo] = field(init=False, default_factory=dict)
    widened: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._parameters = {parameter.name: parameter for parameter in self.method.parameters(self.files)}
        used = {part for parameter in self._parameters.values() for part in parameter.parts}
        for parameter in self._parameters.values():
            if parameter.name in self.files.tensors and parameter.name not in used:
                self.files.refuse(
                    parameter.name, f"is there beside {shorten(parameter.parts[0])!r}, which makes it too"
                )
            self.tensors[parameter.name] = parameter.info
            if parameter.widened:
                self.widened[parameter.name] = parameter.widened
        for name, info in self.files.tensors.items():
            if name not in used and not self.method.unread(name):
                self.tensors[name] = info

    def is_made(self, name: str) -> bool:
        """Whether a tensor is a parameter that the method makes."""
        return name in self._parameters

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes]; made anew for a parameter of several tensors."""
        if name in self._parameters:
            return self._parameters[name].make()
        return self.files.source.read(name)
