"""The formats that a `quantization_config` says the weights have, of a model whose weights are not here."""

from collections.abc import Callable, Mapping

from roofline.models.mixes import stays_float
from roofline.ops import formats
from roofline.weights.quantised import float8

PLAIN = "BF16"  # of what the method leaves as it is
Shapes = Mapping[str, tuple[int, ...]]


def stated_formats(
    method: str, quantization: Mapping[str, object], shapes: Shapes, name_of: Callable[[str], str]
) -> dict[str, str] | None:
    """Canonical name -> format of each tensor; None for a method whose tensors cannot be told from these settings.

    method: as `quant_method` calls it; name_of: what Hugging Face calls a parameter.
    """
    if method not in ("fp8", "mxfp4"):
        return None
    kept = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    modules = tuple(map(str, kept)) if isinstance(kept, list | tuple) else ()
    form_of = _float8 if method == "fp8" else _mxfp4
    result = {}
    for name, shape in shapes.items():
        is_matrix = len(shape) > 1 and name.startswith("layers.") and not stays_float(name)
        converted = is_matrix and not (modules and _is_in(name_of(name), modules))
        result[name] = form_of(name, shape) if converted else PLAIN
    return result


def _float8(name: str, shape: tuple[int, ...]) -> str:
    """What a load makes of a matrix of e4m3: the same bytes, or float32 where rows are no whole blocks."""
    return "F32" if shape[-1] % formats.get(float8.FORMAT).block else float8.FORMAT


def _mxfp4(name: str, shape: tuple[int, ...]) -> str:
    return "MXFP4" if ".experts." in name else PLAIN


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a parameter is in one of these modules, which are named from the beginning or by their last words."""
    path = f".{name.rpartition('.')[0]}."
    return any(f".{module.strip('.')}." in path for module in modules)
