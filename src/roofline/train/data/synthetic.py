"""Rows of ids drawn at random, for timing: no files, and each sample is the same wherever it is read."""

from collections.abc import Sequence

import numpy as np

from roofline.train.data.order import BLOCK, Order, Stream

SAMPLES = 1 << 20  # of an epoch
DOCUMENT = 256  # tokens of a document, where they are kept apart


class Synthetic:
    """As train.loader.Source, without data.

    Attributes:
        room: ids that the model has, to be set before rows are read.
    """

    vocab: int | None = None
    remote = False

    def __init__(self, length: int, documents: bool) -> None:
        self.length, self.documents = length, documents
        self.room: int | None = None

    def order(self, global_batch: int, seed: int) -> Order:
        """One after the other."""
        return Order((Stream((SAMPLES,), "1", False, BLOCK),), global_batch, seed)

    def __len__(self) -> int:
        return SAMPLES

    def rows(self, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens int64 [rows, length] and documents (the same shape, or None) of samples."""
        assert self.room is not None
        tokens = np.empty((len(numbers), self.length), np.int64)
        for row, number in enumerate(numbers):
            tokens[row] = np.random.default_rng(int(number)).integers(0, self.room, self.length)
        documents = np.arange(self.length) // DOCUMENT
        return tokens, np.tile(documents, (len(numbers), 1)) if self.documents else None

    def prefetch(self, numbers: np.ndarray) -> None:
        """Nothing is fetched."""

    def close(self) -> None:
        """Nothing is open."""
