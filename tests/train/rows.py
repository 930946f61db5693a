"""What the shards of the tests hold; small to import, for the processes that the tests start."""

import numpy as np

from roofline.train.data.mds import Shards

ROWS, SHARDS = 20, 8  # samples of a shard, shards
SAMPLES = ROWS * SHARDS


def sample(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, number)).integers(0, 1 << 16, 250, np.uint16)


def right(shards: Shards, number: int, seed: int = 0) -> None:
    assert np.array_equal(shards[number]["tokens"], sample(number, seed)), number
