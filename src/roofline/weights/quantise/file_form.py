"""A calibrated checkpoint as a GGUF file has it: parameters scaled, and what was measured under the file's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.gguf_form import gguf_form, joined_spans, ordered_form
from roofline.weights.quantise.calibration import ParameterScale, WeightCalibration


@dataclass(frozen=True)
class CalibratedForm:
    """checkpoint: in a GGUF file's form, parameters scaled; calibration: of its tensors, columns as they are scaled,
    with no scales left to apply; scaled: the matrices whose columns are."""

    checkpoint: Checkpoint
    calibration: WeightCalibration
    scaled: frozenset[str]


def calibrated_form(checkpoint: Checkpoint, calibration: WeightCalibration) -> CalibratedForm:
    """Return a checkpoint in a GGUF file's form with what a text said of it.

    Raises ConfigError where the calibration is of tensors that the form does not have: applied in part, scales would
    make another model of it.
    """
    ordered = ordered_form(checkpoint)
    for name in (*calibration.scales, *calibration.importance, *calibration.products):
        if name not in ordered.tensors:
            raise ConfigError(f"{checkpoint.path}: what was calibrated has a tensor {name!r}, and the model has none")
    joined = joined_spans(ordered)
    columns = {name: scale.columns for name, scale in calibration.scales.items() if scale.columns is not None}
    importance = {
        name: values if name not in columns else values / columns[name] ** 2
        for name, values in calibration.importance.items()
    }
    products = {
        name: values if name not in columns else values / np.multiply.outer(columns[name], columns[name])
        for name, values in calibration.products.items()
    }
    measured = WeightCalibration(
        _of_joined(importance, joined), _of_joined(products, joined), reasons=_reasons(calibration.reasons, joined)
    )
    matrices = {name for name in columns if len(ordered.tensors[name].shape) > 1}
    matrices |= {name for name, spans in joined.items() if matrices.issuperset(part for part, _ in spans)}
    return CalibratedForm(gguf_form(scaled_checkpoint(ordered, calibration.scales)), measured, frozenset(matrices))


def scaled_checkpoint(checkpoint: Checkpoint, scales: Mapping[str, ParameterScale]) -> Checkpoint:
    """Return the checkpoint with those parameters scaled, in float32, which holds one of them at a time."""
    if not scales:
        return checkpoint
    infos = dict(checkpoint.tensors)
    for name in scales:
        infos[name] = replace(infos[name], format="F32", nbytes=4 * int(np.prod(infos[name].shape)))

    def read(name: str) -> np.ndarray:
        if name not in scales:
            return checkpoint.read(name)
        info = checkpoint.tensors[name]
        values = formats.get(info.format).dequantize(checkpoint.read(name), info.shape)
        rows = values.reshape(info.shape[0] if len(info.shape) > 1 else 1, -1)
        return np.ascontiguousarray(scales[name].apply(rows), np.float32).view(np.uint8).reshape(-1)

    return replace(checkpoint, tensors=infos, bytes_of=read)


def _of_joined(
    measured: Mapping[str, np.ndarray], joined: Mapping[str, list[tuple[str, range]]]
) -> dict[str, np.ndarray]:
    """Return what was measured with that of joined tensors, whose parts have all the same input."""
    by_tensor = dict(measured)
    for name, spans in joined.items():
        parts = [by_tensor.pop(part, None) for part in dict.fromkeys(part for part, _ in spans)]
        first = parts[0]
        if first is not None and all(part is not None and np.array_equal(part, first) for part in parts):
            by_tensor[name] = first
    return by_tensor


def _reasons(reasons: Mapping[str, str], joined: Mapping[str, list[tuple[str, range]]]) -> dict[str, str]:
    of_joined = {name: reasons[part] for name, spans in joined.items() for part, _ in spans if part in reasons}
    return {**reasons, **of_joined}
