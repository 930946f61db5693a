"""Random samples whose lengths are those of short papers' abstracts with a question and an answer."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# PubMedQA's 1,000 labelled questions have 516,000 tokens of Llama 3 with their abstracts and answers. How they are
# spread about the mean of 516 is assumed: three quarters lie within 150 tokens of it.
SAMPLES, MEAN, SPREAD, LEAST = 1000, 516, 130, 64
ANSWER = 0.15  # of a sample's tokens, which are the targets


@dataclass(frozen=True)
class Samples:
    """Lengths of samples, cut to the longest row. name: in records; sha256: of the lengths."""

    lengths: tuple[int, ...]
    name: str = "random ids, lengths of abstracts"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.array(self.lengths, "<u4").tobytes()).hexdigest()

    def answers(self) -> list[int]:
        """The tokens of each sample that are targets."""
        return [max(1, round(ANSWER * length)) for length in self.lengths]


def samples(longest: int, seed: int) -> Samples:
    """The samples of a seed. longest: tokens of a row, at which longer ones are cut."""
    drawn = np.random.default_rng(seed).normal(MEAN, SPREAD, SAMPLES).round()
    return Samples(tuple(int(length) for length in np.clip(drawn, min(LEAST, longest), longest)))


def write_rows(drawn: Samples, vocab: int, seed: int, folder: Path) -> None:
    """Write each sample as a row of its own, as `roofline finetune --no-pack` does. vocab: ids are below it."""
    from roofline.train.data.mds import ShardWriter

    random = np.random.default_rng(seed)
    columns = {"tokens": "ndarray:uint32", "documents": "ndarray:uint32", "trained": "ndarray:uint8"}
    with ShardWriter(folder, columns) as writer:
        for length, answer in zip(drawn.lengths, drawn.answers(), strict=True):
            trained = np.zeros(length, np.uint8)
            trained[length - answer :] = 1
            ids = random.integers(0, vocab, length).astype(np.uint32)
            writer.write({"tokens": ids, "documents": np.array([length], np.uint32), "trained": trained})
