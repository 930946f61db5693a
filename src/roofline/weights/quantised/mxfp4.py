"""MXFP4 as transformers writes gpt-oss: the experts of a layer in two tensors for each product.

`NAME_blocks` uint8 [experts, outputs, inputs / 32, 16] holds two 4-bit floats (E2M1) a byte, the first in its lower
half; `NAME_scales` uint8 [experts, outputs, inputs / 32] the exponents of the groups of 32. These are the numbers of
our format MXFP4, whose bytes hold element i beside element i + 16. Rows of `gate_up_proj` are in turn gate and up.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from roofline.weights.quantised.method import PlainFloats, QuantisedMatrix, TensorFiles, check_keys

_BLOCKS = re.compile(r"(?P<within>.+\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)_blocks")
# What a tensor of all experts holds, and in which of its outputs.
PROJECTIONS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "quant_method": ("mxfp4",),
    "dequantize": (False, True),  # at load, by transformers
    "modules_to_not_convert": None,  # these are in the file as floats
}


class Mxfp4(PlainFloats):
    """See the module."""

    def parameters(self, files: TensorFiles) -> Iterable[QuantisedMatrix]:
        """A matrix for each expert's gate, up and down."""
        super().parameters(files)
        for name in files.tensors:
            match = _BLOCKS.fullmatch(name)
            if match is not None:
                yield from _of_tensor(files, name, match["within"], match["part"])


def _of_tensor(files: TensorFiles, name: str, within: str, part: str) -> Iterable[QuantisedMatrix]:
    info = files.need(name, ("U8",), of=name)
    if len(info.shape) != 4 or info.shape[3] != 16 or (part == "gate_up_proj" and info.shape[1] % 2):
        files.refuse(name, f"of shape {info.shape} is not [experts, outputs, groups of 32 inputs, 16 bytes]")
    scales = name.removesuffix("_blocks") + "_scales"
    files.need(scales, ("U8",), info.shape[:3], of=name)
    experts, outputs, groups, _ = info.shape
    for ours, rows in PROJECTIONS[part].items():
        shape = (len(range(outputs)[rows]), 32 * groups)
        for number in range(experts):
            make = partial(_bytes, files, name, scales, number, rows)
            yield QuantisedMatrix(f"{within}.{number}.{ours}.weight", "MXFP4", shape, (name, scales), make)


def _bytes(files: TensorFiles, blocks: str, scales: str, number: int, rows: slice) -> np.ndarray:
    """uint8: for each group of 32 its exponent and 16 bytes of element i beside element i + 16."""
    pairs, exponents = files.array(blocks)[number, rows], files.array(scales)[number, rows]
    if (exponents == 255).any():
        files.refuse(scales, "holds NaN (255), so the file is damaged; take another copy of the model")
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([exponents[..., None], halves], axis=-1).reshape(-1)


def method(path: Path, quantization: object) -> Mxfp4:
    """The method of a `quantization_config`. Raises UnsupportedError for a setting that we do not read."""
    check_keys(f"{path}: quantization_config", quantization, _KEYS)
    return Mxfp4()
