"""Which characters of a text each of its tokens stands for."""

from collections.abc import Iterable
from itertools import accumulate

from roofline.text.tokenizers.tokenizer import Tokenizer

Span = tuple[int, int]


def align(tokenizer: Tokenizer, text: str, ids: Iterable[int]) -> list[Span | None]:
    """(start, end) in characters for each of the ids that `text` was encoded to, without the tokenizer's own BOS.

    Tokens that share the bytes of a character all have it. None for tokens from where the tokenizer wrote the text
    differently before it took it apart (Unicode's normal forms, characters that no token has): what cannot be told is
    not guessed.
    """
    data = text.encode("utf-8", "surrogatepass")
    # The character that each byte belongs to: a byte that does not continue one begins the next.
    characters = list(accumulate(((byte & 0xC0) != 0x80 for byte in data), initial=-1))[1:]
    spans: list[Span | None] = []
    at: int | None = 0
    for token_id in ids:
        place = None if at is None else _place(data, at, tokenizer.token_bytes(token_id))
        at = None if place is None else place[1]
        if place is None:
            spans.append(None)
        elif place[0] == place[1]:  # a space that SentencePiece put before the text
            before = characters[place[0] - 1] + 1 if place[0] else 0
            spans.append((before, before))
        else:
            spans.append((characters[place[0]], characters[place[1] - 1] + 1))
    return spans


def _place(data: bytes, at: int, spelling: bytes) -> Span | None:
    """The bytes from `at` on that a token stands for; None where they are not its own."""
    if data.startswith(spelling, at):
        return at, at + len(spelling)
    if spelling.startswith(b" ") and data.startswith(spelling[1:], at):  # SentencePiece's first space is not the text's
        return at, at + len(spelling) - 1
    begin = len(data) - len(data[at:].lstrip())  # special tokens may swallow white space around them
    if begin > at and data.startswith(spelling, begin):
        return begin, begin + len(spelling)
    return None
