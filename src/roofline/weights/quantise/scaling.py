"""Scales of columns with which rounding loses least: AWQ (Lin et al., 2023, arXiv 2306.00978).

A column that is multiplied with large values is scaled up before the weights are rounded, so that its error becomes
smaller beside its weights, and what gives the column its input is scaled down by the same. The factors are a power of
the root mean square of the column's input; which power is tried out, for all matrices with the same input together, on
some of their rows.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.gguf_form import joined_spans, ordered_form
from roofline.weights.quantise.calibration import Folding, ParameterScale, WeightCalibration
from roofline.weights.quantise.rounding import round_to
from roofline.weights.quantise.tensors import Progress, is_quantised

_POWERS = np.arange(0.0, 1.01, 0.1)
_ROWS = 256  # of each matrix that the powers are tried on, evenly spread


def fit_scales(
    checkpoint: Checkpoint,
    kinds: Mapping[str, str],
    calibration: WeightCalibration,
    progress: Progress = lambda done, total: None,
) -> WeightCalibration:
    """The calibration with a scale for each parameter of its foldings.

    Args:
        kinds: format that each tensor of the GGUF file will be rounded to, by its name in `gguf_form`.
        progress: told how many foldings are done, and of how many.

    Raises ConfigError where a weight that is to be scaled is not a number, or infinite.
    """
    checkpoint = ordered_form(checkpoint)
    holders = {part: name for name, spans in joined_spans(checkpoint).items() for part, _ in spans}
    kinds = {name: kinds[holders.get(name, name)] for name in checkpoint.tensors}
    rows: dict[str, np.ndarray] = {}
    columns: dict[str, np.ndarray] = {}
    for done, folding in enumerate(calibration.foldings, start=1):
        factors = _best_factors(checkpoint, kinds, folding, calibration.importance)
        columns |= dict.fromkeys(folding.matrices, factors)
        for name in folding.divided:
            (rows if len(checkpoint.tensors[name].shape) > 1 else columns)[name] = 1 / factors
        progress(done, len(calibration.foldings))
    scales = {name: ParameterScale(rows.get(name), columns.get(name)) for name in {**rows, **columns}}
    return replace(calibration, scales=scales)


def _best_factors(
    checkpoint: Checkpoint, kinds: Mapping[str, str], folding: Folding, importance: Mapping[str, np.ndarray]
) -> np.ndarray:
    """float32 [cols]: those of the power with the least error of what the matrices give."""
    squares = importance[folding.matrices[0]]  # the same for all of them
    samples = {name: _sample(checkpoint, name) for name in folding.matrices if is_quantised(kinds[name])}
    best, least = np.ones_like(squares), np.inf
    for power in _POWERS if samples else ():
        factors = _factors(squares, float(power))
        loss = sum(_loss(kinds[name], values, squares, factors) for name, values in samples.items())
        if loss < least:
            best, least = factors, loss
    return best


def _factors(squares: np.ndarray, power: float) -> np.ndarray:
    """The power of the root mean squares, centred on 1, so that no value becomes much larger or smaller than it was."""
    factors = np.sqrt(squares) ** np.float32(power)
    return (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)


def _loss(form: str, values: np.ndarray, squares: np.ndarray, factors: np.ndarray) -> float:
    """The sum over rows and columns of the squared errors of the weights, times what these are multiplied with."""
    data = round_to(form, values * factors, squares / factors**2)
    error = formats.get(form).dequantize(data, values.shape) / factors - values
    return float(np.einsum("ij,ij,j->", error, error, squares))


def _sample(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """float32 [rows, cols]: some rows of a matrix."""
    info = checkpoint.tensors[name]
    count = info.shape[0]
    raw = checkpoint.read(name).reshape(count, -1)
    picked = np.linspace(0, count - 1, min(count, _ROWS)).astype(int)
    data = np.ascontiguousarray(raw[picked]).reshape(-1)
    values = formats.get(info.format).dequantize(data, (len(picked), info.shape[1]))
    if not np.isfinite(values).all():
        raise ConfigError(f"{checkpoint.path}: tensor {name!r} holds NaN or infinity, which cannot be scaled")
    return values
