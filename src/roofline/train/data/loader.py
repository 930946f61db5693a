"""Reads the rows of token ids of each step ahead of time; `order` says which rows they are."""

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.units import parse_bytes
from roofline.train.config.data_sets import DatasetSection, LoaderSection, StreamSection
from roofline.train.data.mds import Shards
from roofline.train.data.order import BLOCK, Order, Stream, share
from roofline.train.data.row_arrays import PADDING, RowArrays
from roofline.train.data.row_digest import WORDS, row_sums
from roofline.train.data.row_lengths import LENGTHS, read_lengths
from roofline.train.data.synthetic import Synthetic
from roofline.train.storage.open import open_store

Share = tuple[int, int]  # a part of each global batch: (index, count), as `order.share` takes them


@dataclass(frozen=True)
class Rows:
    """The rows of a step that this rank computes.

    ids: the sample numbers of the whole global batch, in order. parts: this rank's shares of it, in order. sums: of the
    hashes of this rank's rows (`row_digest.row_sums`). each: rows that were made of each sample.
    """

    step: int
    ids: np.ndarray
    parts: tuple[RowArrays, ...]
    sums: np.ndarray = field(default_factory=lambda: np.zeros(WORDS, np.uint64))
    each: int = 1


class Source:
    """Samples by number, counted through all data sets of a loader section.

    Args:
        documents: also read where each document ends, from the shards' column or by eos_token_id.
        trained: also read which tokens are targets, from the shards' column; rows may be shorter than `length`.

    Attributes:
        vocab_limit: size of the model's vocabulary, once it is known.

    Raises ConfigError for a row whose length is not `length`, or that has an id outside the model's vocabulary.
    """

    def __init__(self, section: DatasetSection, length: int, documents: bool, trained: bool = False) -> None:
        self.length, self.section, self.documents, self.trained = length, section, documents or trained, trained
        self.vocab_limit: int | None = None
        if section.max_seq_len not in (None, length):
            raise ConfigError(f"max_seq_len={length}, but the data set's is {section.max_seq_len}")
        streams = list(section.streams.values()) or [section]
        limit = parse_bytes("cache_limit", section.cache_limit) if section.cache_limit is not None else None
        self.shards = [_shards(stream, stream.split or section.split, limit) for stream in streams]
        self._of_epoch = [_samples(*each) for each in zip(streams, self.shards, strict=True)]
        proportions = [stream.proportion for stream in streams]
        # A data set alone has all of each batch, and the weight that its receipts have had in all versions.
        shares = ["1"] if len(streams) == 1 else self._of_epoch
        self.weights = [str(share if own is None else own) for own, share in zip(proportions, shares, strict=True)]
        self._starts = np.cumsum([0, *(len(shards) for shards in self.shards)])
        self._noted_lengths: np.ndarray | None = None  # of a file beside the samples, int64 [samples]
        self._lock = threading.Lock()  # no thread may close shards that another one reads

    @property
    def remote(self) -> bool:
        """Whether shards have to be fetched from elsewhere."""
        return any(stream.remote for stream in (self.section, *self.section.streams.values()))

    @property
    def unhashed(self) -> list[str]:
        """What holds for each data set whose index has no hashes, in words."""
        return [text for shards in self.shards if (text := shards.versions.notice()) is not None]

    @property
    def versions(self) -> dict[str, str]:
        """By URL, what tells of the versions of shards in object stores whose index has no hashes.

        Shards of folders are left out: other machines have equal files of other times.
        """
        elsewhere = [shards for shards in self.shards if "://" in shards.source]
        return {shards.source: shards.versions.digest for shards in elsewhere if shards.versions.digest}

    @property
    def vocab(self) -> int | None:
        """The vocabulary size of the rows' tokenizer, if `roofline data tokenize` recorded it."""
        from roofline.train.data.tokenize import ABOUT, read_about

        sizes = [read_about(s.source).vocab for s in self.shards if open_store(s.source).exists(ABOUT)]
        return max(sizes, default=None)

    def order(self, global_batch: int, seed: int) -> Order:
        """The order in which a run reads these data sets."""
        seed = self.section.shuffle_seed if self.section.shuffle_seed is not None else seed
        blocks = {"py1b": self.section.shuffle_block_size or BLOCK, "py1s": 1}  # naive: all samples
        algorithm = self.section.shuffle_algo
        streams = [
            Stream(s.counts, weight, self.section.shuffle, blocks.get(algorithm) or len(s), s.identity)
            for s, weight in zip(self.shards, self.weights, strict=True)
        ]
        return Order(tuple(streams), global_batch, seed)

    @property
    def epoch(self) -> int:
        """The samples that an epoch of the run counts: epoch_size, or what the data sets give together."""
        return self.section.epoch_size or math.ceil(sum(self._of_epoch))

    @property
    def tokens(self) -> Fraction:
        """How many tokens a sample has on average. Raises ConfigError as `lengths` does."""
        return Fraction(int(self.lengths.sum()), len(self)) if self.trained else Fraction(self.length)

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each sample has, without padding, whether they are trained on or not: int64 [samples].

        Raises ConfigError for samples elsewhere whose lengths are not written beside them.
        """
        if not self.trained:
            return np.full(len(self), self.length)
        if self.remote:  # a pass over all rows would fetch them all before the first step
            parts = [read_lengths(shards.source, len(shards), self.length) for shards in self.shards]
            self._noted_lengths = np.concatenate(parts)
            return self._noted_lengths
        return np.array([len(self._tokens(*self._of_stream(number))) for number in range(len(self))], np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, number: int) -> dict[str, object]:
        """All columns of a sample."""
        return self._of_stream(number)[0]

    def _of_stream(self, number: int) -> tuple[dict[str, object], int]:
        """A sample, and which of the data sets has it."""
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        with self._lock:
            return self.shards[at][number - int(self._starts[at])], at

    def rows(self, numbers: Sequence[int] | np.ndarray) -> RowArrays:
        """The samples as rows."""
        tokens = np.zeros((len(numbers), self.length), np.int64)
        documents = np.full_like(tokens, PADDING) if self.documents else None
        trained = np.zeros(tokens.shape, bool) if self.trained else None
        for row, number in enumerate(numbers):
            sample, at = self._of_stream(int(number))
            ids = self._tokens(sample, at)
            self._check_length(int(number), len(ids), at)
            tokens[row, : len(ids)] = ids
            if documents is not None:
                documents[row, : len(ids)] = self._documents(sample, ids, at)
            if trained is not None:
                trained[row, : len(ids)] = self._trained(sample, len(ids), at)
        return RowArrays(tokens, documents, trained)

    def prefetch(self, numbers: np.ndarray) -> None:
        """Begin to fetch the shards of these samples in the background, those of the first samples first."""
        at = np.searchsorted(self._starts, numbers, side="right") - 1
        for index in np.unique(at).tolist():
            self.shards[index].prefetch((numbers[at == index] - self._starts[index]).tolist())

    def close(self) -> None:
        """Unmap the shards."""
        for shards in self.shards:
            shards.close()

    def _tokens(self, sample: dict[str, object], at: int) -> np.ndarray:
        tokens = sample.get("tokens")
        if isinstance(tokens, bytes):  # LLM Foundry's older data sets
            tokens = np.frombuffer(tokens, "<i8")
        fits = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and self._fits(len(tokens))
        if not isinstance(tokens, np.ndarray) or not fits:
            has = f"{len(tokens)} tokens" if isinstance(tokens, np.ndarray) else f"columns {', '.join(sample)}"
            raise ConfigError(f"{self.shards[at].source}: a row has {has}, max_seq_len is {self.length}")
        limit = self.vocab_limit
        if limit is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < limit:
            other = next(int(token) for token in tokens if not 0 <= token < limit)
            raise ConfigError(
                f"{self.shards[at].source}: a row has the id {other}, the model's vocabulary is {limit:,}: "
                "train a model of the data set's tokenizer"
            )
        return tokens

    def _check_length(self, number: int, count: int, at: int) -> None:
        """Raise ConfigError for a sample of another length than the file says by which tokens are counted."""
        if self._noted_lengths is not None and self._noted_lengths[number] != count:
            raise ConfigError(
                f"{self.shards[at].source}: row {number - int(self._starts[at])} has {count:,} tokens, and its "
                f"{LENGTHS} says {self._noted_lengths[number]:,}, so durations in tokens would be others: prepare the "
                "rows again, or give durations in ba, ep or sp"
            )

    def _fits(self, count: int) -> bool:
        return 2 <= count <= self.length if self.trained else count == self.length

    def _trained(self, sample: dict[str, object], count: int, at: int) -> np.ndarray:
        """Which of a row's tokens are targets, bool [count]."""
        trained = sample.get("trained")
        if not isinstance(trained, np.ndarray) or trained.shape != (count,):
            raise ConfigError(
                f"{self.shards[at].source}: its rows do not say which tokens are trained on, as those of `roofline "
                "finetune` do; for texts write train_loader.name: text"
            )
        return trained != 0

    def _documents(self, sample: dict[str, object], tokens: np.ndarray, at: int) -> np.ndarray:
        lengths = sample.get("documents")
        if isinstance(lengths, np.ndarray) and lengths.sum() == len(tokens):
            return np.repeat(np.arange(len(lengths)), lengths)
        if self.section.eos_token_id is None:
            raise ConfigError(
                f"{self.shards[at].source}: its rows do not say where documents end; "
                "attn_uses_sequence_id needs dataset.eos_token_id, or shards of `roofline data tokenize`"
            )
        ends = tokens == self.section.eos_token_id
        return np.cumsum(ends) - ends


def open_source(section: LoaderSection, length: int, documents: bool) -> Source | Synthetic:
    """The samples that a loader section names."""
    if section.name == "synthetic":
        return Synthetic(length, documents)
    return Source(section.dataset, length, documents, trained=section.name == "finetuning")


def read_batch(source: Source | Synthetic, order: Order, shares: Sequence[Share], step: int) -> Rows:
    """The rows of a step that a rank with these shares of each global batch computes."""
    ids = order.batch(step)
    parts, sums = [], np.zeros(WORDS, np.uint64)
    for index, count in shares:
        parts.append(source.rows(share(ids, index, count)))
        sums += row_sums(parts[-1], share(np.arange(len(ids)), index, count))
    return Rows(step, ids, tuple(parts), sums)


class Loader:
    """An iterator over the rows of each step from `step` on; threads read ahead while earlier steps are computed.

    Args:
        shares: the parts of each global batch that this rank computes.
    """

    def __init__(
        self, source: Source | Synthetic, order: Order, section: LoaderSection, shares: Sequence[Share], step: int = 0
    ) -> None:
        self._source, self._order, self._shares, self._next = source, order, tuple(shares), step
        self._pool = ThreadPoolExecutor(max(1, section.num_workers), "roofline-loader")
        self._steps_ahead = section.num_workers * section.prefetch_factor
        rows = sum(len(share(np.arange(order.global_batch), index, count)) for index, count in shares)
        samples = section.dataset.predownload or 8 * rows
        # Steps behind the one being read whose shards are fetched already.
        self._fetched_steps = min(64, -(-samples // max(1, rows))) if source.remote else 0
        self._waiting: deque[Future[Rows]] = deque()

    def __next__(self) -> Rows:
        while len(self._waiting) <= self._steps_ahead:
            self._waiting.append(self._pool.submit(self._read, self._next))
            self._next += 1
        return self._waiting.popleft().result()

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, step: int) -> Rows:
        if self._fetched_steps:
            coming = [self._order.batch(step + 1 + offset) for offset in range(self._fetched_steps)]
            self._source.prefetch(np.concatenate([share(batch, *part) for batch in coming for part in self._shares]))
        return read_batch(self._source, self._order, self._shares, step)


def in_turn(
    source: Source | Synthetic, batch: int, rank: int, world: int, limit: int
) -> Iterator[tuple[np.ndarray, RowArrays]]:
    """Every sample once, in file order, for evaluation: this rank's numbers and rows of each batch * world rows.

    limit: most batches of `batch` rows to read, negative for all; so the number of rows does not depend on `world`.
    Every rank gets equally many batches, so the last one may have no rows for some ranks.
    """
    rows = len(source) if limit < 0 else min(len(source), limit * batch)
    for start in range(0, rows, batch * world):
        numbers = np.arange(start, min(start + batch * world, rows))
        own = share(numbers, rank, world)
        yield own, source.rows(own)


def _samples(section: StreamSection, shards: Shards) -> Fraction:
    """The samples that a data set gives to an epoch."""
    return Fraction(section.choose or len(shards) * Fraction(str(section.repeat or 1)))


def _shards(section: StreamSection, split: str | None, limit: int | None) -> Shards:
    """The shards of a data set: at the URL `remote` with `local` as their cache, or in the folder `local`."""
    if section.remote is None and section.local is None:
        raise ConfigError("train_loader.dataset: local is missing, the folder of shards, or remote, their URL")
    below = f"/{split}" if split else ""
    if section.remote is None:
        return Shards(Path(f"{section.local}{below}"))
    return Shards(f"{section.remote.rstrip('/')}{below}", Path(section.local) if section.local else None, limit)
