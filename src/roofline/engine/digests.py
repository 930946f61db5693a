"""Digests of logits: what tells two computations of a step apart by their bits.

SHA-256 takes 0.11 ms for the 49,152 logits of SmolLM2 on a core with instructions for it, less than BLAKE2 (0.22 ms)
and some hundredth of a step: so each step has one, not every so-manieth, and a difference is told to the step. A
request without digests costs nothing.
"""

import hashlib

import numpy as np

DIGEST_BYTES = 16


def digests_of(logits: np.ndarray) -> list[bytes]:
    """A digest of each row of float32 [rows, vocab]: the first 16 bytes of SHA-256 of its numbers, little-endian."""
    rows = np.ascontiguousarray(logits, "<f4")
    return [hashlib.sha256(row).digest()[:DIGEST_BYTES] for row in rows]
