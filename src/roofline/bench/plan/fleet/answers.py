"""The answers that a fleet is generating, in buckets by the progress at which they end.

All requests that a replica computes advance by a token a step, so a replica has one measure of progress, in tokens, and
an answer ends when that has grown by its length. What lies in one bucket of a replica ends together.
"""

import numpy as np

BUCKETS_OF_LONGEST = 256  # into which the longest answer is divided


class Answers:
    """count, started, tokens: float64 [replicas, buckets], of the answers that end in a bucket: how many, the sum of
    the moments of their first ids, and of their lengths. running: int64 [replicas]; progress: float64 [replicas]."""

    def __init__(self, replicas: int, longest: int) -> None:
        self._width = max(1.0, longest / BUCKETS_OF_LONGEST)
        self._buckets = int(longest / self._width) * 2 + 4  # of prompts that are computed beside them, as much again
        self.count, self.started, self.tokens = np.zeros((3, replicas, self._buckets))
        self.running = np.zeros(replicas, np.int64)
        self.progress = np.zeros(replicas)
        self._reached = np.zeros(replicas, np.int64)  # bucket of each replica's progress, counted on without end

    def add(self, replicas: np.ndarray, distance: np.ndarray, first: np.ndarray, lengths: np.ndarray) -> None:
        """Answers that end when their replica has made so much more progress, `distance`, [answers] each. first:
        moments of their first ids; lengths: in tokens."""
        bucket = ((self.progress[replicas] + distance) / self._width).astype(np.int64)
        reached = self._reached[replicas]
        bucket = np.clip(bucket, reached, reached + self._buckets - 1)
        flat = replicas * self._buckets + bucket % self._buckets
        for table, values in ((self.count, None), (self.started, first), (self.tokens, lengths)):
            np.add.at(table.reshape(-1), flat, 1.0 if values is None else values)
        self.running += np.bincount(replicas, minlength=len(self.running))

    def advance(self, more: np.ndarray, now: float, seconds: float) -> list[tuple[np.ndarray, ...]]:
        """Let replicas make progress, float64 [replicas], in a slice. Returns what ends, in parts: how many answers,
        the sums of their first moments and lengths, and the moment of their last ids; [buckets] of each."""
        progress = self.progress + more
        reached = (progress / self._width).astype(np.int64)
        ended: list[tuple[np.ndarray, ...]] = []
        for step in range(int((reached - self._reached).max(initial=0))):
            bucket = self._reached + step
            rows = np.flatnonzero(bucket < reached)
            slots = bucket[rows] % self._buckets
            rows, slots = self._filled(rows, slots)
            if not len(rows):
                continue
            count, started, tokens = (table[rows, slots] for table in (self.count, self.started, self.tokens))
            middle = (self._reached[rows] + step + 0.5) * self._width
            end = now + seconds * (middle - self.progress[rows]) / more[rows]
            ended.append((count, started, tokens, end))
            for table in (self.count, self.started, self.tokens):
                table[rows, slots] = 0.0
            self.running[rows] -= count.astype(np.int64)
        self.progress, self._reached = progress, reached
        return ended

    def _filled(self, rows: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        some = self.count[rows, slots] > 0
        return rows[some], slots[some]

    def drop(self, replicas: np.ndarray) -> int:
        """Forget all that some replicas have; how many answers these were."""
        lost = int(self.running[replicas].sum())
        for table in (self.count, self.started, self.tokens):
            table[replicas] = 0.0
        self.running[replicas] = 0
        return lost
