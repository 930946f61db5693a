"""How many tokens each row of samples has, in a file beside their shards: elsewhere the rows are not read for it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.fields import has_type
from roofline.common.files import write_atomically
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError

LENGTHS = "lengths.json"


def write_lengths(folder: Path, lengths: Sequence[int]) -> None:
    """Write the tokens of each row of the shards in a folder, in their order."""
    write_atomically(folder / LENGTHS, json.dumps(list(lengths)) + "\n")


def read_lengths(source: str | Path, rows: int, longest: int) -> np.ndarray:
    """The tokens of each of so many rows of the shards in a folder or at a URL, int64 [rows].

    longest: tokens that a row has at most. Raises ConfigError. Whether a row has as many is seen when it is read.
    """
    try:
        lengths = json.loads(open_store(source).get(LENGTHS))
    except MissingError as error:
        raise ConfigError(
            f"{source} has no {LENGTHS}: durations in tokens need the length of every row, which `roofline finetune` "
            "and `roofline prefer` write beside the rows, and of rows elsewhere no other is read before the run. "
            "Prepare the rows again, copy them to a folder here, or give durations in ba, ep or sp"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{source}/{LENGTHS} is damaged: {error}") from error
    is_list = isinstance(lengths, list) and all(has_type(each, int) and each > 0 for each in lengths)
    if not is_list or len(lengths) != rows:
        raise ConfigError(f"{source}/{LENGTHS} is damaged, or of other rows: it has no lengths of {rows:,} rows")
    if max(lengths, default=0) > longest:
        raise ConfigError(
            f"{source}/{LENGTHS} is of other rows: it has one of {max(lengths):,} tokens, and max_seq_len is "
            f"{longest:,}"
        )
    return np.array(lengths, np.int64)
