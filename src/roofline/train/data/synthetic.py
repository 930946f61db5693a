"""Random rows of token ids for timing runs without data; a sample number always gives the same row."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from roofline.train.data.order import BLOCK, Order, Stream
from roofline.train.data.row_arrays import RowArrays

SAMPLES = 1 << 20  # in an epoch
DOCUMENT = 256  # tokens of each document, if documents are kept apart


class Synthetic:
    """Random samples with the interface of loader.Source.

    Attributes:
        vocab_limit: size of the model's vocabulary, to be set before rows are read.
    """

    vocab: int | None = None
    remote = False
    epoch = SAMPLES

    def __init__(self, length: int, documents: bool) -> None:
        self.length, self.documents = length, documents
        self.vocab_limit: int | None = None

    @property
    def tokens(self) -> Fraction:
        """Tokens of a sample."""
        return Fraction(self.length)

    def order(self, global_batch: int, seed: int) -> Order:
        """The samples in the order of their numbers."""
        return Order((Stream((SAMPLES,), "1", False, BLOCK),), global_batch, seed)

    def __len__(self) -> int:
        return SAMPLES

    def rows(self, numbers: Sequence[int] | np.ndarray) -> RowArrays:
        """The samples as rows."""
        assert self.vocab_limit is not None
        tokens = np.empty((len(numbers), self.length), np.int64)
        for row, number in enumerate(numbers):
            tokens[row] = np.random.default_rng(int(number)).integers(0, self.vocab_limit, self.length)
        documents = np.arange(self.length) // DOCUMENT
        return RowArrays(tokens, np.tile(documents, (len(numbers), 1)) if self.documents else None)

    def prefetch(self, numbers: np.ndarray) -> None:
        """Does nothing: there are no files to fetch."""

    def close(self) -> None:
        """Does nothing: there are no open files."""
