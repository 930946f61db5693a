"""Texts of messages of which some parts are the server's own."""

from collections.abc import Iterable


class MarkedText(str):
    """A text in which special tokens are such where the server wrote them, as in what a chat template writes.

    mask: one byte a character, 1: the server's own, 0: a user's.
    """

    __slots__ = ("mask",)
    mask: bytes

    @classmethod
    def of(cls, pieces: Iterable[tuple[str, bool]]) -> "MarkedText":
        """Join texts, of each of which it is known whether the server wrote it."""
        pieces = list(pieces)
        text = cls("".join(piece for piece, _ in pieces))
        text.mask = b"".join(bytes([is_ours]) * len(piece) for piece, is_ours in pieces)
        return text
