"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it: codes of 4 or 8 bits, packed along the inputs.

Of `NAME`: `qweight` int32 [inputs * bits / 32, outputs]; `qzeros` int32 [groups, outputs * bits / 32]; `scales`
[groups, outputs]; `g_idx` int32 [inputs], the group of each input. A weight is scale * (code - zero). The libraries
compute that in the scales' float16 and so round it; here it is the product itself, which float32 holds exactly.

Files of version 1 (`checkpoint_format` "gptq") hold zero - 1, so one is added to each, carried from code to code
within a word, as GPTQModel does; "gptq_v2" holds the zero. With act-order (`desc_act`) neighbouring inputs are of
different groups, unless groups were fixed before: such a matrix becomes float32.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import shorten
from roofline.weights.quantised.integers import CodeLayout, Codes, even_groups, unpacked
from roofline.weights.quantised.method import (
    AUTOROUND,
    FLOATS,
    READ,
    QuantisedMatrix,
    TensorFiles,
    check_dynamic,
    check_keys,
)

_KEYS: Mapping[str, tuple[object, ...] | None] = {
    **AUTOROUND,
    "quant_method": ("gptq",),
    "method": ("gptq",),  # GPTQModel's (7) other name of it
    "bits": (4, 8),
    "group_size": None,  # checked below
    "sym": (True, False),
    "desc_act": (True, False),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "dynamic": None,  # checked below
    # How the codes were found, how others run them, activations among it, and what is in the file anyway.
    "activation": None,
    **dict.fromkeys(("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "mse", "lm_head")),
    **dict.fromkeys(("model_name_or_path", "model_file_base_name", "meta", "quantizer", "tokenizer")),
    **dict.fromkeys(("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length")),
    **dict.fromkeys(("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize")),
    **dict.fromkeys(("pad_token_id", "model_seqlen", "cache_block_outputs", "backend", "act_group_aware")),
}
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class Gptq:
    """A checked configuration. group: inputs that share a scale, -1: all; plus_one: to be added to stored zeros."""

    bits: int
    group: int
    symmetric: bool
    act_order: bool
    plus_one: bool

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
        if len(packed) != 2 or 0 in packed or packed[1] * self.bits % 32:
            files.refuse(
                weight, f"is of {packed}, not [inputs * {self.bits} / 32, outputs] with outputs in whole words"
            )
        columns, rows = packed[0] * 32 // self.bits, packed[1]
        count = files.group_count(weight, columns, self.group)
        scales = files.need(f"{module}.scales", FLOATS, (count, rows), of=weight)
        files.need(f"{module}.qzeros", ("I32",), (count, rows * self.bits // 32), of=weight)
        group_of, parts = even_groups(columns, count), [f"{module}.{part}" for part in _PARTS[:3]]
        if self.act_order or f"{module}.g_idx" in files.tensors:
            group_of = self._group_of(files, module, columns, count)
            parts.append(f"{module}.g_idx")
        layout = CodeLayout((rows, columns), self.bits, not self.symmetric, scales.format, group_of)
        make = partial(self._bytes, files, module, layout)
        why = f"act-order (desc_act): {layout.widened}" if layout.widened and self.act_order else layout.widened
        return QuantisedMatrix(
            name=f"{module}.weight",
            format=layout.format,
            shape=(rows, columns),
            parts=tuple(parts),
            make=make,
            widened=why,
        )

    def _group_of(self, files: TensorFiles, module: str, columns: int, count: int) -> np.ndarray:
        name = f"{module}.g_idx"
        files.need(name, ("I32",), (columns,), of=f"{module}.qweight")
        group_of = files.array(name).astype(np.int64)
        if group_of.max() >= count:
            files.refuse(name, f"has a group that is not one of the {count} there are scales of")
        if not self.act_order and (group_of != even_groups(columns, count)).any():
            files.refuse(name, "puts inputs out of order, and desc_act of quantization_config says they are in order")
        return group_of

    def _bytes(self, files: TensorFiles, module: str, layout: CodeLayout) -> np.ndarray:
        code = unpacked(files.array(f"{module}.qweight").T, self.bits)  # [rows, columns]
        words = files.array(f"{module}.qzeros")
        if self.plus_one:
            words = words + np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
        zero = unpacked(words, self.bits)  # [groups, rows]
        if self.symmetric:
            middle = 1 << (self.bits - 1)
            if (zero != middle).any():
                files.refuse(f"{module}.qzeros", f"holds other zeros than {middle}, and quantization_config says sym")
        scale = files.floats(f"{module}.scales").T
        return layout.bytes_of(Codes(code, scale, None if self.symmetric else zero.T))


def method(path: Path, quantization: object) -> Gptq:
    """Raises UnsupportedError for a `quantization_config` that this module does not read."""
    what = f"{path}: quantization_config"
    table = check_keys(what, quantization, _KEYS)
    check_dynamic(what, table.get("dynamic"))
    bits, group = table.get("bits"), table.get("group_size", 128)
    if bits is None:
        raise UnsupportedError(f"{what} without bits", "nothing else says how codes are packed", READ)
    if type(group) is not int or not (group == -1 or 1 <= group <= 1 << 20):
        raise UnsupportedError(f"{what}: group_size {shorten(str(group))}", "we read -1 and sizes of groups", READ)
    formats = [table.get(key) for key in ("checkpoint_format", "format") if table.get(key) is not None]
    if len(set(formats)) > 1:
        raise UnsupportedError(f"{what}: checkpoint_format and format", "they contradict each other", READ)
    symmetric, act_order = table.get("sym"), table.get("desc_act")
    plus_one = "gptq_v2" not in formats
    return Gptq(int(str(bits)), group, symmetric is not False, act_order is True, plus_one)
