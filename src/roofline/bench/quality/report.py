"""What rounding a model's weights cost: its predictions beside the source's, and the tensors that changed most."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.quality.score import Score, load_to_score, score, text_windows
from roofline.ops import formats
from roofline.weights.files.mapped import forget
from roofline.weights.quantise.calibration import ParameterScale, WeightCalibration
from roofline.weights.rope_rows import heads_of, reorder

if TYPE_CHECKING:
    from roofline.weights.checkpoint import Checkpoint

CONTEXT = 512
TOKENS = 4096  # of the text that are scored, unless more are asked for
WORST = 8  # tensors that are named
_ROWS = 1 << 20  # values of a tensor that are compared at once
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorError:
    """error: the root of the sum of squared differences over that of the source's squares; where columns were measured,
    each counts by its importance, which makes it the error of what the tensor gives."""

    name: str
    format: str
    error: float


@dataclass(frozen=True)
class QualityReport:
    """source, rounded: their scores on the held-out text; worst: the tensors with the largest errors, worst first."""

    source: Score
    rounded: Score
    worst: list[TensorError]

    def facts(self) -> dict[str, object]:
        """As plain values."""
        worst = [vars(error) for error in self.worst]
        return {"source": self.source.facts(), "rounded": self.rounded.facts(), "worst": worst}


def report(
    source: "Checkpoint",
    rounded: "Checkpoint",
    text: str,
    load: LoadOptions,
    calibration: WeightCalibration = WeightCalibration(),
    *,
    limit: int = TOKENS,
    progress: Progress = lambda done, total: None,
) -> QualityReport:
    """Compare two checkpoints of one model.

    text: that neither calibration nor training has seen; calibration: with which the second was rounded; limit: score
    only so many of the text's tokens. Raises as `load_to_score` and `windows_of`.
    """
    context = min(CONTEXT, source.config["max_position"])
    models = [load_to_score(path, load, context, text=path is source) for path in (source, rounded)]
    tokenizer = models[0].tokenizer
    assert tokenizer is not None, "it was loaded with its text side"
    windows = text_windows(tokenizer, text, context, context // 2, limit)
    first, second = score([model.executable for model in models], windows, progress)
    for each in models:
        each.executable.close()
    return QualityReport(first, second, worst_tensors(source, rounded, calibration))


def worst_tensors(
    source: "Checkpoint", rounded: "Checkpoint", calibration: WeightCalibration, count: int = WORST
) -> list[TensorError]:
    """The tensors whose rounding changed them most."""
    errors = [
        TensorError(name, info.format, _error(source, rounded, name, calibration))
        for name, info in rounded.tensors.items()
        if info.format != source.tensors[name].format
    ]
    return sorted(errors, key=lambda error: -error.error)[:count]


def _error(source: "Checkpoint", rounded: "Checkpoint", name: str, calibration: WeightCalibration) -> float:
    importance, scale = calibration.importance.get(name), calibration.scales.get(name, ParameterScale())
    info, other = source.tensors[name], rounded.tensors[name]
    raw, changed = source.read(name), rounded.read(name)
    heads = heads_of(name, source.config)
    if heads is not None and source.config["rope_style"] != rounded.config["rope_style"]:
        raw = reorder(raw, info.shape[0], heads, rounded.config["rope_style"])
    cols = info.shape[-1]
    rows = int(np.prod(info.shape)) // cols
    step = max(1, _ROWS // cols)
    difference = total = 0.0
    for start in range(0, rows, step):
        parts = []
        for data, form in ((raw, info.format), (changed, other.format)):
            row_bytes = len(data) // rows
            part = data[start * row_bytes : (start + step) * row_bytes]
            parts.append(formats.get(form).dequantize(part, (len(part) // row_bytes, cols)))
            forget(part)
        parts[1] = scale.undo(parts[1], start)
        weights = np.ones(cols, np.float32) if importance is None else importance
        difference += float(np.einsum("ij,ij,j->", parts[1] - parts[0], parts[1] - parts[0], weights))
        total += float(np.einsum("ij,ij,j->", parts[0], parts[0], weights))
    return (difference / total) ** 0.5 if total else 0.0
