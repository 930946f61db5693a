"""What rounding a model's weights cost: its predictions beside the source's, and the tensors that changed most."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.quality.score import Score, load_to_score, score, text_windows
from roofline.ops import formats
from roofline.weights.files.mapped import TensorInfo, forget
from roofline.weights.gguf_form import gguf_form
from roofline.weights.gguf_tensors import stacked_parts
from roofline.weights.quantise.calibration import WeightCalibration
from roofline.weights.quantise.file_form import CalibratedForm, calibrated_form
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
    """The tensors whose rounding changed them most, both checkpoints as a GGUF file has them: rows joined, heads in its
    order, experts of a layer in one tensor, multipliers and scales of columns taken in."""
    form = calibrated_form(source, calibration)
    written = gguf_form(rounded)
    parts = stacked_parts(form.checkpoint.tensors.values())
    errors = []
    for name, infos in stacked_parts(written.tensors.values()).items():
        compared = _ComparedTensor(form, written, parts[name], infos)
        if any(info.format != infos[0].format for info in parts[name]):
            errors.append(TensorError(name, infos[0].format, compared.error()))
    return sorted(errors, key=lambda error: -error.error)[:count]


@dataclass(frozen=True)
class _ComparedTensor:
    """A tensor of a file, of the source and rounded; parts, others: what either has of it, one below the other."""

    source: CalibratedForm
    rounded: "Checkpoint"
    parts: list[TensorInfo]
    others: list[TensorInfo]

    def error(self) -> float:
        """Return the root of the sum of squared differences over that of the source's squares, columns weighed."""
        difference = total = 0.0
        for values, changed, weights in self._rows():
            difference += float(np.einsum("ij,ij,j->", changed - values, changed - values, weights))
            total += float(np.einsum("ij,ij,j->", values, values, weights))
        return (difference / total) ** 0.5 if total else 0.0

    def _rows(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield rows of the source, the same rounded, and how much their columns count."""
        form = self.source
        cols = self.parts[0].shape[-1]
        rows = sum(int(np.prod(info.shape)) for info in self.parts) // cols
        matrix = rows // max(len(self.parts), len(self.others), *map(self._matrices, self.parts))
        step = max(1, _ROWS // cols)
        for first in range(0, rows, matrix):
            info, at = _holder(self.parts, first, cols)
            other, other_at = _holder(self.others, first, cols)
            raw, changed = self._read(info), self.rounded.read(other.name)
            weights = form.calibration.importance.get(info.name, np.ones(cols, np.float32))
            weights = weights if weights.ndim == 1 else weights[at // matrix]
            for start in range(0, matrix, step):
                count = min(step, matrix - start)
                yield (
                    _values(raw, info.format, at + start, count, cols),
                    _values(changed, other.format, other_at + start, count, cols),
                    weights,
                )

    def _matrices(self, info: TensorInfo) -> int:
        importance = self.source.calibration.importance.get(info.name)
        return len(importance) if importance is not None and importance.ndim > 1 else 1

    def _read(self, info: TensorInfo) -> np.ndarray:
        checkpoint, style = self.source.checkpoint, self.rounded.config["rope_style"]
        raw, heads = checkpoint.read(info.name), heads_of(info.name, checkpoint.config)
        if heads is None or checkpoint.config["rope_style"] == style:
            return raw
        return reorder(raw, info.shape[0], heads, style)


def _holder(parts: Sequence[TensorInfo], row: int, cols: int) -> tuple[TensorInfo, int]:
    """Return the part in which a row of a tensor lies, and which row of it that is."""
    for info in parts:
        rows = int(np.prod(info.shape)) // cols
        if row < rows:
            return info, row
        row -= rows
    raise AssertionError(f"{parts[0].name} has no row {row}")


def _values(raw: np.ndarray, form: str, start: int, count: int, cols: int) -> np.ndarray:
    """float32 [count, cols]: rows of a tensor from its bytes."""
    row = formats.get(form).nbytes((1, cols))
    part = raw[start * row : (start + count) * row]
    values = formats.get(form).dequantize(part, (count, cols))
    forget(part)
    return values
