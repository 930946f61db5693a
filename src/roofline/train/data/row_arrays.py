"""The arrays of some rows as the model's losses are computed from them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PADDING = -1  # the document of what fills up a row
_WIDTHS = 8  # rows are cut to a multiple of it


class RowArrays(NamedTuple):
    """Rows of equal length.

    tokens: int64 [rows, length]. documents: the document of each token, counted from 0 in each row, PADDING behind the
    last one, int64 [rows, length]; None where they are not kept apart. trained: whether each token is a target, bool
    [rows, length]; None where all are.
    """

    tokens: np.ndarray
    documents: np.ndarray | None = None
    trained: np.ndarray | None = None

    def rows(self, which: slice) -> "RowArrays":
        """Some of the rows."""
        return RowArrays(*(None if array is None else array[which] for array in self))  # type: ignore[arg-type]

    def real(self) -> int:
        """The number of tokens that are no padding."""
        return self.tokens.size if self.documents is None else int((self.documents != PADDING).sum())

    def without_padding(self) -> "RowArrays":
        """Without the columns at the end that hold padding alone, and without documents where rows have one each.

        A token sees none behind it, so neither changes what is computed for those that are no padding.
        """
        if self.trained is None or self.documents is None or not len(self.tokens):
            return self
        columns = np.flatnonzero((self.documents != PADDING).any(0))
        width = min(self.tokens.shape[1], -(-(int(columns[-1]) + 1 if len(columns) else 2) // _WIDTHS) * _WIDTHS)
        documents = self.documents[:, :width] if self.documents.max() > 0 else None
        return RowArrays(self.tokens[:, :width], documents, self.trained[:, :width])


@dataclass(frozen=True)
class Counted:
    """The tokens of a global batch: real ones, those that were computed (with padding), and those that are targets."""

    real: int = 0
    computed: int = 0
    trained: int = 0
