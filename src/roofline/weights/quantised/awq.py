"""AWQ (Lin et al. 2023) in the "gemm" packing of AutoAWQ: codes of 4 bits, packed along the outputs.

Of `NAME`: `qweight` int32 [inputs, outputs / 8]; `qzeros` int32 [groups, outputs / 8]; `scales` [groups, outputs]. The
eight codes of a word are those of outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest first. A weight is scale * (code - zero):
the product itself, which float32 holds exactly, where the library rounds it to the scales' float16.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import shorten
from roofline.weights.quantised.integers import CodeLayout, Codes, even_groups, nibbles
from roofline.weights.quantised.method import (
    AUTOROUND,
    FLOATS,
    READ,
    QuantisedMatrix,
    TensorFiles,
    check_dynamic,
    check_keys,
)

_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # output of eight -> which code of the word is its
_KEYS: Mapping[str, tuple[object, ...] | None] = {
    **AUTOROUND,
    "quant_method": ("awq",),
    "method": ("awq",),  # GPTQModel's (7) other name of it
    "bits": (4,),
    "w_bit": (4,),
    "group_size": None,  # checked below, as its other name
    "q_group_size": None,
    "zero_point": (True,),
    "version": ("gemm", "GEMM"),
    "format": ("gemm",),
    "checkpoint_format": ("gemm",),
    "pack_dtype": ("int32",),
    "sym": (False,),
    "desc_act": (False,),
    "dynamic": None,  # checked below
    "activation": None,  # how others round them
    # What is in the file anyway, and how others run it.
    **dict.fromkeys(("modules_to_not_convert", "meta", "lm_head", "backend", "do_fuse", "exllama_config")),
    **dict.fromkeys(("fuse_max_seq_len", "modules_to_fuse")),
}


@dataclass(frozen=True)
class Awq:
    """A checked configuration. group: inputs that share a scale, -1: all."""

    group: int

    def parameters(self, files: TensorFiles) -> Iterable[QuantisedMatrix]:
        """Every matrix that has a `qweight`."""
        for name in files.tensors:
            if name.endswith(".qweight"):
                yield self._parameter(files, name.removesuffix(".qweight"))

    def unread(self, name: str) -> bool:
        """No tensor."""
        return False

    def _parameter(self, files: TensorFiles, module: str) -> QuantisedMatrix:
        weight = f"{module}.qweight"
        packed = files.need(weight, ("I32",), of=weight).shape
        if len(packed) != 2 or 0 in packed:
            files.refuse(weight, f"is of {packed}, not [inputs, outputs / 8]")
        columns, rows = packed[0], packed[1] * 8
        count = files.group_count(weight, columns, self.group)
        scales = files.need(f"{module}.scales", FLOATS, (count, rows), of=weight)
        files.need(f"{module}.qzeros", ("I32",), (count, rows // 8), of=weight)
        layout = CodeLayout((rows, columns), 4, True, scales.format, even_groups(columns, count))
        parts = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        make = partial(_bytes, files, module, layout)
        return QuantisedMatrix(
            name=f"{module}.weight",
            format=layout.format,
            shape=layout.shape,
            parts=parts,
            make=make,
            widened=layout.widened,
        )


def _bytes(files: TensorFiles, module: str, layout: CodeLayout) -> np.ndarray:
    code, zero = (_ordered(files.array(f"{module}.{part}")).T for part in ("qweight", "qzeros"))
    return layout.bytes_of(Codes(np.ascontiguousarray(code), files.floats(f"{module}.scales").T, zero))


def _ordered(words: np.ndarray) -> np.ndarray:
    """Codes by output: uint32 [n, outputs / 8] -> uint8 [n, outputs]."""
    return nibbles(words).reshape(len(words), -1, 8)[:, :, _PLACE].reshape(len(words), -1)


def method(path: Path, quantization: object) -> Awq:
    """Raises UnsupportedError for a `quantization_config` that this module does not read."""
    what = f"{path}: quantization_config"
    table = check_keys(what, quantization, _KEYS)
    check_dynamic(what, table.get("dynamic"))
    if table.get("bits") is None and table.get("w_bit") is None:
        raise UnsupportedError(f"{what} without bits", "nothing else says how codes are packed", READ)
    sizes = [table[key] for key in ("group_size", "q_group_size") if table.get(key) is not None] or [128]
    group = sizes[0]
    if sizes[-1] != group or type(group) is not int or not (group == -1 or 1 <= group <= 1 << 20):
        raise UnsupportedError(f"{what}: group_size {shorten(str(sizes))}", "we read -1 and sizes of groups", READ)
    return Awq(group)
