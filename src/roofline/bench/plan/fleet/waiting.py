"""Requests on their way to a replica's steps: those of a slice and those that wait, as arrays side by side."""

from dataclasses import dataclass, fields

import numpy as np


@dataclass
class Waiting:
    """Requests, in the order in which they came. replica, prompt, answer: int64 [n]; arrived: float64 [n], seconds.
    prompt: tokens that have to be computed."""

    replica: np.ndarray
    prompt: np.ndarray
    answer: np.ndarray
    arrived: np.ndarray

    @classmethod
    def none(cls) -> "Waiting":
        """No requests."""
        empty = np.zeros(0, np.int64)
        return cls(empty, empty, empty, np.zeros(0))

    def __len__(self) -> int:
        return len(self.replica)

    def chosen(self, which: np.ndarray) -> "Waiting":
        """Some of them: a mask, or indices."""
        return Waiting(*(getattr(self, field.name)[which] for field in fields(self)))

    def with_later(self, later: "Waiting") -> "Waiting":
        """These, then those."""
        if not len(self):
            return later
        pairs = ((getattr(self, field.name), getattr(later, field.name)) for field in fields(self))
        return Waiting(*(np.concatenate(pair) for pair in pairs))

    def places(self) -> np.ndarray:
        """How many requests of the same replica came before each, int64 [n]."""
        return places_among(self.replica)


def places_among(replicas: np.ndarray) -> np.ndarray:
    """How many equal values come before each, int64 [n]."""
    order = np.argsort(replicas, kind="stable")
    ordered = replicas[order]
    new = np.flatnonzero(np.diff(ordered, prepend=-1))
    starts = np.repeat(new, np.diff(new, append=len(ordered)))
    places = np.empty(len(ordered), np.int64)
    places[order] = np.arange(len(ordered)) - starts
    return places
