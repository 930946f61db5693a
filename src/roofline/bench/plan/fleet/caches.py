"""Which beginnings of prompts lie in the caches of a fleet's replicas."""

import numpy as np

MOST_CELLS = 1 << 26  # replicas times beginnings that are followed; rarer beginnings are in no cache
_NEVER = -(1 << 62)


class Caches:
    """The prefix caches of all replicas, which keep what was used last: a beginning is in one until as many tokens as
    the cache holds were written into it since the beginning was used."""

    def __init__(self, replicas: int, cache_tokens: int, prefixes: int, prefix_tokens: int) -> None:
        self._cache_tokens, self._prefix_tokens = cache_tokens, prefix_tokens
        self._followed = min(prefixes, MOST_CELLS // replicas)
        self._written = np.zeros(replicas, np.int64)  # tokens, of each since the start
        self._used = np.full((replicas, self._followed), _NEVER, np.int64)  # what had been written at the last use

    def drop(self, replicas: np.ndarray) -> None:
        """Replicas that failed, or were switched off, have lost their caches."""
        self._used[replicas] = _NEVER

    def look_up(self, replicas: np.ndarray, prefixes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Take in requests, and tell of each whether its beginning was there. replicas, prefixes, tokens: int [n], of
        each request; tokens of prompt and answer. Returns bool [n]."""
        followed = prefixes < self._followed
        rows, columns = replicas[followed], prefixes[followed]
        hit = np.zeros(len(prefixes), bool)
        hit[followed] = self._written[rows] - self._used[rows, columns] < self._cache_tokens
        self._write(replicas, tokens - self._prefix_tokens)
        self._write(replicas[~followed], np.full(int((~followed).sum()), self._prefix_tokens))
        missed = ~hit[followed]
        new = np.unique(rows[missed] * np.int64(max(1, self._followed)) + columns[missed])
        self._write(new // max(1, self._followed), np.full(len(new), self._prefix_tokens))
        self._used[rows, columns] = self._written[rows]
        return hit

    def _write(self, replicas: np.ndarray, tokens: np.ndarray) -> None:
        self._written += np.bincount(replicas, tokens, len(self._written)).astype(np.int64)
