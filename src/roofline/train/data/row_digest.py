"""A digest of what the rows of a global batch hold, for order receipts: 64 bits, whatever processes share the rows.

Each row is hashed with its place in the batch, and the hashes are added. So every process hashes the rows that it has
read, and the sum travels with a sum that the step needs anyway. It tells other data, other documents' bounds or another
order from the same; it does not keep out somebody who forges rows on purpose.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from roofline.train.data.row_arrays import RowArrays

WORDS = 2  # of 32 bits: sums of them over processes are exact in float64
BYTES = 4 * WORDS
_FORM = f"<{WORDS}I"


def row_sums(part: RowArrays, places: Sequence[int] | np.ndarray) -> np.ndarray:
    """The sum of the hashes of rows, uint64 [WORDS].

    places: of the rows in the batch.
    """
    tokens, documents, trained = part
    total = np.zeros(WORDS, np.uint64)
    for row, place in enumerate(places):
        digest = hashlib.blake2b(int(place).to_bytes(8, "little"), digest_size=BYTES)
        digest.update(tokens[row].astype("<u4").data)
        if documents is not None:
            digest.update(documents[row].astype("<u4").data)
        if trained is not None:
            digest.update(trained[row].astype("u1").data)
        total += np.array(struct.unpack(_FORM, digest.digest()), np.uint64)
    return total % (1 << 32)


def row_digest(sums: Sequence[float]) -> bytes:
    """The digest of a batch from the sum of all its rows' hashes."""
    return struct.pack(_FORM, *(int(value) % (1 << 32) for value in sums))
