"""bitsandbytes' NF4 (Dettmers et al. 2023): 4-bit floats with a float32 scale for 64 and more neighbours.

Of `NAME.weight`, uint8 [elements / 2, 1] with the first of two codes in the high nibble: `.absmax`, the scales,
float32; or uint8 with `.nested_absmax` and `.nested_quant_map` (double quantisation: scale = map[code] * nested scale
+ offset); `.quant_map`, the sixteen values; and `.quant_state.bitsandbytes__nf4`, JSON with the shape, block sizes and
the offset. A weight is scale * value in float32. The library rounds that to the model's 16 bits (`dtype`), we do not.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.common.json_files import parse_json
from roofline.ops.formats import nf4
from roofline.weights.quantised.method import READ, QuantisedMatrix, TensorFiles, check_keys

_STATE = ".quant_state.bitsandbytes__nf4"
_MOST_STATE_BYTES = 1 << 16
_STORED = ("U8", "BF16", "F16", "F32")  # bnb_4bit_quant_storage: the same bytes under another dtype
_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "quant_method": ("bitsandbytes",),
    "load_in_4bit": (True,),
    "_load_in_4bit": (True,),
    "load_in_8bit": (False,),
    "_load_in_8bit": (False,),
    "bnb_4bit_quant_type": ("nf4",),
    "bnb_4bit_use_double_quant": (True, False),
    "bnb_4bit_quant_storage": ("uint8", "bfloat16", "float16", "float32"),
    # How others compute with them; the last four are of 8 bits.
    **dict.fromkeys(("bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight")),
    **dict.fromkeys(("llm_int8_skip_modules", "llm_int8_threshold")),
}


@dataclass(frozen=True)
class _State:
    """What the JSON of a matrix says. nested: block size and offset of double quantisation, None: there is none."""

    shape: tuple[int, int]
    block: int
    nested: tuple[int, float] | None


@dataclass(frozen=True)
class Bitsandbytes:
    """A checked configuration."""

    def parameters(self, files: TensorFiles) -> Iterable[QuantisedMatrix]:
        """Every matrix that has a state."""
        for name in files.tensors:
            if name.endswith(_STATE):
                yield _parameter(files, name.removesuffix(_STATE))
            elif name.endswith(".quant_state.bitsandbytes__fp4"):
                raise UnsupportedError(f"{files.path}: tensor {shorten(name)!r}: FP4", "we read nf4", READ)

    def unread(self, name: str) -> bool:
        """No tensor."""
        return False


def _parameter(files: TensorFiles, name: str) -> QuantisedMatrix:
    if not name.endswith(".weight"):
        files.refuse(f"{name}{_STATE}", "belongs to no matrix of a name that ends with .weight")
    state = _state(files, name)
    rows, columns = state.shape
    if files.need(name, _STORED, of=f"{name}{_STATE}").nbytes * 2 != rows * columns:
        files.refuse(
            name, f"has {files.tensors[name].nbytes} bytes, a matrix of {state.shape} has half of its elements"
        )
    if state.block % nf4.BLOCK or columns % state.block:
        what = f"{files.path}: tensor {shorten(name)!r} of {state.shape} with a scale for {state.block} elements"
        reason = f"scales of a row are read for multiples of {nf4.BLOCK} that divide it"
        raise UnsupportedError(what, reason, ("a block size of 64", "BF16"))
    blocks = rows * columns // state.block
    files.need(f"{name}.quant_map", ("F32",), (16,), of=name)
    if not np.array_equal(files.floats(f"{name}.quant_map"), nf4.VALUES):
        files.refuse(f"{name}.quant_map", "holds other values than those of NF4")
    parts = [name, f"{name}{_STATE}", f"{name}.quant_map", f"{name}.absmax"]
    if state.nested is None:
        files.need(f"{name}.absmax", ("F32",), (blocks,), of=name)
    else:
        files.need(f"{name}.absmax", ("U8",), (blocks,), of=name)
        files.need(f"{name}.nested_absmax", ("F32",), (-(-blocks // state.nested[0]),), of=name)
        files.need(f"{name}.nested_quant_map", ("F32",), (256,), of=name)
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    return QuantisedMatrix(name, "NF4", state.shape, tuple(parts), partial(_bytes, files, name, state))


def _state(files: TensorFiles, name: str) -> _State:
    info = files.need(f"{name}{_STATE}", ("U8",), of=name)
    where = f"{files.path}: tensor {shorten(info.name)!r}"
    if info.nbytes > _MOST_STATE_BYTES:
        files.refuse(info.name, f"has {info.nbytes} bytes, a state has a few hundred")
    parsed = parse_json(files.path, f"tensor {shorten(info.name)!r}", files.source.read(info.name).tobytes())
    if not isinstance(parsed, dict):
        files.refuse(info.name, "does not hold a JSON object")
    known = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}
    if surplus := sorted(set(parsed) - known):
        raise UnsupportedError(f"{where}: key {shorten(surplus[0])!r}", "we do not know what it changes", READ)
    fields = Fields(where, parsed)
    shape = fields.elements("shape", int) or []
    if len(shape) != 2 or not all(1 <= size <= 1 << 30 for size in shape):
        fields.refuse("shape", "is not that of a matrix")
    if fields.need("quant_type", str) != "nf4":
        fields.refuse("quant_type", "is not nf4, as the tensor's name says")
    block = fields.need("blocksize", int)
    nested = None
    if f"{name}.nested_absmax" in files.tensors or "nested_offset" in parsed:
        if fields.need("nested_dtype", str) != "float32":
            raise UnsupportedError(f"{where}: nested_dtype", "we read float32", READ)
        nested = fields.need("nested_blocksize", int), fields.need("nested_offset", float)
    if block < 1 or (nested is not None and nested[0] < 1):
        fields.refuse("blocksize", "and nested_blocksize are not from 1 on")
    return _State((shape[0], shape[1]), block, nested)


def _bytes(files: TensorFiles, name: str, state: _State) -> np.ndarray:
    rows, columns = state.shape
    if state.nested is None:
        scale = files.floats(f"{name}.absmax")
    else:
        block, offset = state.nested
        code = files.array(f"{name}.absmax").reshape(-1)
        outer = files.floats(f"{name}.nested_absmax")[np.arange(len(code)) // block]
        scale = files.floats(f"{name}.nested_quant_map")[code] * outer + np.float32(offset)
    spread = np.repeat(scale.reshape(rows, -1), state.block // nf4.BLOCK, axis=1)  # [rows, columns / 64]
    assert spread.size == math.prod(state.shape) // nf4.BLOCK
    return nf4.join(files.source.read(name).reshape(rows, columns // 2), spread)


def method(path: Path, quantization: object) -> Bitsandbytes:
    """Raises UnsupportedError for a `quantization_config` that this module does not read."""
    what = f"{path}: quantization_config"
    table = check_keys(what, quantization, _KEYS)
    if table.get("load_in_4bit", table.get("_load_in_4bit")) is not True:
        raise UnsupportedError(f"{what} without load_in_4bit", "we read 4 bits of bitsandbytes", READ)
    if table.get("bnb_4bit_quant_type") is None:  # the library's default is fp4
        raise UnsupportedError(f"{what} without bnb_4bit_quant_type", "it is fp4 then, and we read nf4", READ)
    return Bitsandbytes()
