"""How much each column of a model's matrices counts: the mean square of what it is multiplied with in a text.

A matrix W that is rounded to W + E gives x W + x E. Over the rows x of a text the expected square of x E, as far as the
columns of x are independent, is the sum over columns of mean(x^2) E^2: what `weights.quantise.rounding` weighs errors
by.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.quality.score import load_to_score, text_windows
from roofline.common.errors import CapacityError, ConfigError
from roofline.hardware.detect import detect
from roofline.ops.batch import PAGE_TOKENS, Segment
from roofline.program.ir import Instr

if TYPE_CHECKING:
    from roofline.program.ir import Program
    from roofline.weights.checkpoint import Checkpoint

CONTEXT = 512  # tokens of a window
TOKENS = 4096  # of a text, after which the means hardly change
_FLOOR = 1e-3  # of the mean: a column that a text never used may still be used by another

Progress = Callable[[int, int], None]


def column_importance(
    checkpoint: "Checkpoint", text: str, threads: int | None, progress: Progress = lambda done, total: None
) -> dict[str, np.ndarray]:
    """Canonical name of a matrix -> float32 [cols], with mean 1, from running the model on a text in plain float32.

    Args:
        text: of which up to `TOKENS` tokens are read.
        threads: that compute; None: as torch chooses.

    Raises ConfigError where the text is too short, CapacityError where the model in float32 has no room.
    """
    count = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    free = detect().memory_available
    if free is not None and 4 * count > free:
        remedy = "Quantise without --calibrate, which needs no more memory than a piece of a tensor."
        raise CapacityError("calibrating, which holds the model in float32,", 4 * count, free, "bytes", remedy)
    context = min(CONTEXT, checkpoint.config["max_position"])
    load = replace(LoadOptions(), backend="reference", arithmetic="plain", threads=threads)
    model = load_to_score(checkpoint, load, context)
    executable, tokenizer = model.executable, model.tokenizer
    from roofline.backends.reference.executable import ReferenceExecutable

    assert isinstance(executable, ReferenceExecutable), "it was asked for"
    assert tokenizer is not None, "it was loaded with its text side"
    windows = text_windows(tokenizer, text, context, context - 1, TOKENS)
    sums = _Squares(executable.program)
    executable.observe(sums.see)
    step = executable.limits.tokens
    done, total = 0, sum(len(window.ids) for window in windows)
    for window in windows:
        for start in range(0, len(window.ids), step):
            ids = window.ids[start : start + step]
            pages = range(-(-(start + len(ids)) // PAGE_TOKENS))
            executable.batch.fill([Segment(ids, start, pages)], range(len(ids)))
            executable.forward()
            done += len(ids)
            progress(done, total)
    executable.close()
    return sums.importance()


class _Squares:
    """Sums of the squares of what comes into the linear ops of a Program."""

    def __init__(self, program: "Program") -> None:
        self._program = program
        self._sums: dict[str, np.ndarray] = {}  # of a file's matrix, float64 [cols]

    def see(self, instr: Instr, operands: list[object]) -> None:
        import torch

        if not instr.op.startswith("linear"):
            return
        x = operands[0]
        assert isinstance(x, torch.Tensor), "plain arithmetic keeps rows as floats"
        squares = x.to(torch.float64).square().sum(dim=0).numpy()  # [cols]
        for piece in self._program.weights[instr.weights[0]].pieces:
            before = self._sums.get(piece.tensor)
            self._sums[piece.tensor] = squares if before is None else before + squares

    def importance(self) -> dict[str, np.ndarray]:
        found = {}
        for name, sums in self._sums.items():
            mean = sums.mean()
            if not np.isfinite(mean) or mean <= 0:
                raise ConfigError(f"tensor {name!r}: what it is multiplied with is zero, or no number, in this text")
            found[name] = np.maximum(sums / mean, _FLOOR).astype(np.float32)
        return found
