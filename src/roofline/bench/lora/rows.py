"""The rows of a bench: of random samples as long as short papers' abstracts, or of data."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# PubMedQA's 1,000 labelled questions have 516,000 tokens of Llama 3 with their abstracts and answers. How they are
# spread about the mean of 516 is assumed: three quarters lie within 150 tokens of it.
SAMPLES, MEAN, SPREAD, LEAST = 1000, 516, 130, 64
ANSWER = 0.15  # of a sample's tokens, which are the targets


@dataclass(frozen=True)
class Samples:
    """What rows hold. lengths: tokens of each sample, cut to the longest row; answers: of them, how many are targets;
    rows: how many; sha256: of all rows; name: for records."""

    lengths: tuple[int, ...]
    answers: tuple[int, ...]
    rows: int
    sha256: str
    name: str


def random_lengths(longest: int, seed: int) -> list[int]:
    """The lengths of the samples of a seed. longest: tokens of a row, at which longer ones are cut."""
    values = np.random.default_rng(seed).normal(MEAN, SPREAD, SAMPLES).round()
    return [int(length) for length in np.clip(values, min(LEAST, longest), longest)]


def write_random(lengths: Sequence[int], longest: int, vocab: int, seed: int, packed: bool, folder: Path) -> None:
    """Write samples of random ids as `roofline finetune` writes rows. longest: tokens of a row; vocab: ids are below
    it; packed: several samples in a row, else each has one."""
    from roofline.train.data.mds import ShardWriter
    from roofline.train.finetune.packing import pack
    from roofline.train.finetune.prepare import COLUMNS

    random = np.random.default_rng(seed)
    rows = pack(lengths, longest) if packed else [[number] for number in range(len(lengths))]
    with ShardWriter(folder, COLUMNS, hashes=("sha256",)) as writer:
        for numbers in rows:
            documents = np.array([lengths[number] for number in numbers], np.uint32)
            ids = random.integers(0, vocab, int(documents.sum())).astype(np.uint32)
            targets = [np.arange(length) >= length - max(1, round(ANSWER * length)) for length in documents.tolist()]
            writer.write({"tokens": ids, "documents": documents, "trained": np.concatenate(targets).astype(np.uint8)})


def samples_in(folder: Path, name: str) -> Samples:
    """What the rows in a folder hold."""
    digest, lengths, answers, rows = hashlib.sha256(), list[int](), list[int](), 0
    for tokens, documents, targets in _rows(folder):
        digest.update(tokens.tobytes() + documents.tobytes() + targets.tobytes())
        lengths += documents.tolist()
        answers += [int(part.sum()) for part in np.split(targets, np.cumsum(documents)[:-1])]
        rows += 1
    return Samples(tuple(lengths), tuple(answers), rows, digest.hexdigest(), name)


def _rows(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, lengths of documents, and which tokens are targets, of each row."""
    from roofline.train.data.mds import Shards

    shards = Shards(folder)
    for number in range(len(shards)):
        sample = shards[number]
        columns = [sample[name] for name in ("tokens", "documents", "trained")]
        assert all(isinstance(column, np.ndarray) for column in columns)
        yield tuple(columns)  # type: ignore[misc]
    shards.close()
