"""The quantisation methods by what `quantization_config` of config.json calls them (`quant_method`)."""

from collections.abc import Callable, Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import shorten
from roofline.weights.files.mapped import JsonObject
from roofline.weights.quantised import autoround, awq, bitsandbytes, compressed, float8, gptq, mxfp4
from roofline.weights.quantised.method import READ, Method

_METHODS: Mapping[str, Callable[[Path, object], Method]] = {
    "gptq": gptq.method,
    "awq": awq.method,
    "auto-round": autoround.method,
    "fp8": float8.method,
    "compressed-tensors": compressed.method,
    "bitsandbytes": bitsandbytes.method,
    "mxfp4": mxfp4.method,
}
KEYS = ("quantization_config", "compression_config")  # of config.json; the second is compressed-tensors' older name


def method_of(path: Path, config: JsonObject) -> Method:
    """The method of a config.json; for one without, 8-bit floats that are found by their dtype.

    Raises UnsupportedError for a method, or a setting of it, that we do not read.
    """
    stated = [config[key] for key in KEYS if config.get(key) is not None]
    if not stated:
        return float8.Float8()
    if len(stated) > 1 and stated[0] != stated[1]:
        raise UnsupportedError(f"{path}: {' and '.join(KEYS)}", "they contradict each other", READ)
    return check_config(path, stated[0])


def check_config(path: Path, quantization: object) -> Method:
    """The method that a `quantization_config` names. Raises UnsupportedError."""
    what = f"{path}: quantization_config"
    if not isinstance(quantization, Mapping):
        raise UnsupportedError(f"{what} = {shorten(str(quantization))}", "it is no table", READ)
    name = quantization.get("quant_method")
    if not isinstance(name, str) or name not in _METHODS:
        raise UnsupportedError(f"{what}: quant_method {shorten(str(name))}", "we do not read it", READ)
    return _METHODS[name](path, quantization)
