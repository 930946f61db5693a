"""AutoRound (Cheng et al. 2023) in its own form, whose tensors lie as those of GPTQ or AWQ do.

`packing_format` says which: "auto_round:auto_gptq" holds zero - 1, as GPTQ's first version; "auto_round:auto_awq" is
AWQ's "gemm". `extra_config` has other settings for single modules, of which we read that they are not quantised.
"""

from collections.abc import Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import shorten
from roofline.weights.quantised import awq, gptq
from roofline.weights.quantised.method import READ, Method

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN_BITS = 16  # and more: a module that is not quantised, as its tensors show too


def method(path: Path, quantization: object) -> Method:
    """Raises UnsupportedError for a `quantization_config` that this module does not read."""
    what = f"{path}: quantization_config"
    assert isinstance(quantization, Mapping), "it names the method"
    read_here = ("packing_format", "extra_config", "quant_method")
    table = {key: value for key, value in quantization.items() if key not in read_here}
    form = quantization.get("packing_format")
    if form not in (_GPTQ, _AWQ):
        raise UnsupportedError(f"{what}: packing_format {shorten(str(form))}", f"we read {_GPTQ} and {_AWQ}", READ)
    for module, settings in (quantization.get("extra_config") or {}).items():
        bits = settings.get("bits") if isinstance(settings, Mapping) else None
        if not isinstance(bits, int) or bits < _PLAIN_BITS:
            reason = "we read modules that are not quantised (bits 16), and one setting for all others"
            raise UnsupportedError(f"{what}: extra_config {shorten(str(module))}", reason, READ)
    if form == _GPTQ:
        return gptq.method(path, {**table, "quant_method": "gptq"})
    symmetric = table.pop("sym", None) is not False
    return awq.method(path, {**table, "quant_method": "awq", "zero_point": not symmetric})
