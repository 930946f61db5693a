"""A checkpoint's tensors in the formats of a file to be written, piece by piece: no tensor is in memory as a whole but
one whose rows are reordered."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.ops.formats.base import SMALL, is_too_small
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.files.mapped import TensorInfo, forget
from roofline.weights.quantise.calibration import WeightCalibration
from roofline.weights.quantise.rounding import inverse_factor, round_to
from roofline.weights.rope_rows import heads_of, reorder

_PIECE = 1 << 22  # values that are rounded at once
_AHEAD = 16  # pieces that are begun before the first of them is written
_LARGE = 1e3  # a weight beyond which a float16 of the format may overflow
_EXACT = ("F32", "F16", "BF16")
Progress = Callable[[int, int], None]  # how much is done, and of how much


@dataclass(frozen=True)
class QuantiseTarget:
    """What a checkpoint's tensors become.

    formats: canonical name -> format; rope_style: the order of the rows of q and k; calibration: of tensors as they are
    written, no scales left to apply (`file_form.calibrated_form`).
    """

    formats: Mapping[str, str]
    rope_style: str
    calibration: WeightCalibration = field(default_factory=WeightCalibration)

    def infos(self, checkpoint: Checkpoint) -> list[TensorInfo]:
        """The tensors under their canonical names, in the checkpoint's order."""
        infos = []
        for name, info in checkpoint.tensors.items():
            form = self.formats[name]
            infos.append(TensorInfo(name, form, info.shape, formats.get(form).nbytes(info.shape)))
        return infos


def is_quantised(form: str) -> bool:
    """Whether a format holds fewer bits than the 16 or 32 that a model is trained in."""
    return form not in _EXACT


def pieces(
    checkpoint: Checkpoint,
    name: str,
    target: QuantiseTarget,
    pool: ThreadPoolExecutor,
    told: Callable[[int], None],
    only: range | None = None,
) -> Iterator[np.ndarray]:
    """The bytes of a tensor in its format, in order.

    told: called with the number of values of each piece that is done; only: these rows of a matrix, or elements of a
    vector, in the tensor's own order of them; None: all.

    Raises ConfigError where a weight is not a number, or infinite, or where a format does not hold a tensor's weights.
    """
    info, form = checkpoint.tensors[name], target.formats[name]
    raw = checkpoint.read(name)
    heads = heads_of(name, checkpoint.config)
    if heads is not None and target.rope_style != checkpoint.config["rope_style"]:
        raw = reorder(raw, info.shape[0], heads, target.rope_style)
    count = info.shape[0] if only is None else len(only)
    if only is not None:
        each = info.nbytes // info.shape[0]
        raw = raw[only.start * each : only.stop * each]
    rows, cols = (count, int(np.prod(info.shape[1:]))) if len(info.shape) > 1 else (1, count)
    row_bytes, step = len(raw) // rows, max(1, _PIECE // cols)
    waiting: deque[Future[np.ndarray]] = deque()
    sizes: list[_SmallPiece | None] = []  # of pieces that are rounded, in any order
    measured = _measured_columns(name, target.calibration, form)
    assert only is None or not target.calibration, "files whose tensors are parts of ours are not calibrated"
    matrix = rows // len(measured)  # rows of each of the matrices that lie one below the other

    def convert(start: int, stop: int) -> np.ndarray:
        part = raw[start * row_bytes : stop * row_bytes]
        shape = (stop - start, cols)
        if info.format == form:
            if not is_quantised(form):
                _finite(checkpoint, name, part, shape)
            out = part.copy()
        else:
            out = _converted(checkpoint, name, part, shape, form, measured[start // matrix], sizes)
        forget(part)
        told(len(part) // row_bytes * cols)
        return out

    try:
        for start, stop in _row_ranges(rows, matrix, step):
            waiting.append(pool.submit(convert, start, stop))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        _check_small(checkpoint, name, form, sizes)
    finally:
        for future in waiting:
            future.cancel()


@dataclass(frozen=True)
class _MeasuredColumns:
    """What calibration says of the columns of a matrix: their importance, and GPTQ's factor."""

    importance: np.ndarray | None = None
    factor: np.ndarray | None = None


def _measured_columns(name: str, calibration: WeightCalibration, form: str) -> list[_MeasuredColumns]:
    """Return what calibration says of each of the matrices that lie one below the other in a tensor."""
    if not is_quantised(form):
        return [_MeasuredColumns()]
    importance, products = calibration.importance.get(name), calibration.products.get(name)
    if importance is not None and importance.ndim == 1:
        importance = importance[None]
    if products is not None and products.ndim == 2:
        products = products[None]
    count = max((len(values) for values in (importance, products) if values is not None), default=1)
    return [
        _MeasuredColumns(
            None if importance is None else importance[number],
            None if products is None or not products[number].any() else inverse_factor(products[number]),
        )
        for number in range(count)
    ]


def _row_ranges(rows: int, matrix: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each piece, none of which spans two matrices."""
    for first in range(0, rows, matrix):
        for start in range(first, first + matrix, step):
            yield start, min(first + matrix, start + step)


def _converted(
    checkpoint: Checkpoint,
    name: str,
    part: np.ndarray,
    shape: tuple[int, int],
    form: str,
    measured: _MeasuredColumns,
    sizes: list["_SmallPiece | None"],
) -> np.ndarray:
    """The bytes of a piece; sizes: where it says how small its weights are, None where some are not."""
    values = _finite(checkpoint, name, part, shape)
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is refused below
        out = round_to(form, values, measured.importance, measured.factor)
        top = float(np.abs(values).max(initial=0))
        if top > _LARGE and not np.isfinite(formats.get(form).dequantize(out, shape)).all():
            what = f"{checkpoint.path}: tensor {name!r} holds values beyond the range of {form}"
            raise ConfigError(f"{what}, whose largest float16 is 65,504; use f32")
    small = None
    if top < SMALL:
        lost, total = formats.get(form).small_squares(values, out)
        small = _SmallPiece(top, lost, total)
    sizes.append(small)
    return out


@dataclass(frozen=True)
class _SmallPiece:
    """A piece of small weights: the largest, and the sums of squares of their errors and of themselves."""

    top: float
    lost: float
    total: float


def _check_small(checkpoint: Checkpoint, name: str, form: str, sizes: Sequence[_SmallPiece | None]) -> None:
    """Raise ConfigError where all pieces of a tensor are small, and rounding took most of them.

    Beside larger weights, small rows such as those of words that no training text had may become zeros.
    """
    small = [piece for piece in sizes if piece is not None]
    if len(small) < len(sizes) or not is_too_small(sum(p.lost for p in small), sum(p.total for p in small)):
        return
    top = max(piece.top for piece in small)
    cause = f"{checkpoint.path}: tensor {name!r} holds weights of at most {top:g}, too small for {form}"
    raise ConfigError(f"{cause}, which would leave zeros or other numbers; use bf16 or f32")


def _finite(checkpoint: Checkpoint, name: str, part: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """float32 of a piece of a tensor. Raises ConfigError where it holds NaN or infinity: no answer would be one."""
    values = formats.get(checkpoint.tensors[name].format).dequantize(part, shape)
    if not np.isfinite(values).all():
        what = f"{checkpoint.path}: tensor {name!r} holds NaN or infinity"
        raise ConfigError(f"{what}: the file is damaged, or training went wrong; take another copy of the model")
    return values
