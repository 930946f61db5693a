"""A text that is longer than a model's context, cut into windows that overlap."""

from collections.abc import Sequence
from dataclasses import dataclass

from roofline.common.errors import ConfigError


@dataclass(frozen=True)
class ScoredWindow:
    """ids: what a model reads from its first position on; first: the first of them that is scored, by its place."""

    ids: Sequence[int]
    first: int


def windows_of(ids: Sequence[int], context: int, stride: int, bos: int | None) -> list[ScoredWindow]:
    """Windows of up to `context` tokens, each `stride` after the one before, which score every token once.

    The first token of a text is not scored, unless there is a `bos`, which then begins each window: a token is scored
    with all of its window before it. The smaller the stride, the more each token sees, and the longer it takes.

    Raises ConfigError where the text is too short, or the stride longer than the window.
    """
    head = [] if bos is None else [bos]
    room = context - len(head)
    if not 1 <= stride <= room:
        raise ConfigError(f"stride={stride} is not from 1 to the {room} tokens of a window")
    stride = min(stride, room if head else room - 1)  # a token without another before it is not predicted
    if len(ids) + len(head) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, too few to predict one from another")
    windows, scored = [], 0 if head else 1
    end = min(room, len(ids))
    while True:
        start = max(0, end - room)
        windows.append(ScoredWindow([*head, *ids[start:end]], scored - start + len(head)))
        scored = end
        if end == len(ids):
            return windows
        end = min(end + stride, len(ids))
