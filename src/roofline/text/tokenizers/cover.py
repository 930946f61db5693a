"""The least number of tokens that can make up a text, without encoding it: that takes three hundred times its size in
memory, and seconds for megabytes.

The texts of a text's tokens, one after the other, are the text. So no encoding has fewer tokens than the shortest way
from its beginning to its end by steps that are not longer than the longest token that may begin where the step does.
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from roofline.common.fields import Fields
from roofline.text.tokenizers.density import Density
from roofline.text.tokenizers.steps import checked_steps
from roofline.text.tokenizers.vocabulary import Vocabulary

KEY = 5  # bytes that a token is told by; more would tell more tokens apart, in a larger table
SPACE = "▁"  # SentencePiece's visible space
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: dict[str, Form] = {"NFC": "NFC", "NFD": "NFD", "NFKC": "NFKC", "NFKD": "NFKD"}


@dataclass(frozen=True)
class Cover:
    """longest: of the tokens that begin with these KEY bytes, in bytes; shorter tokens stand there in full.

    dropped: bytes that make no tokens. forms: of Unicode, in one of which a text must be already. visible_spaces:
    whether the vocabulary writes a space as SPACE.
    """

    longest: dict[bytes, int]
    dropped: bytes
    forms: tuple[Form, ...]
    visible_spaces: bool

    def exceeds(self, text: str, most: int) -> bool:
        """Whether a text has surely more than `most` tokens. Reads no further than it takes to say so."""
        if any(not unicodedata.is_normalized(form, text) for form in self.forms):
            return False
        if self.visible_spaces:
            text = text.replace(SPACE, " ")
        data = text.encode("utf-8", "surrogatepass")
        if self.dropped:
            data = data.translate(None, self.dropped)
        return _covers_more_than(b" " + data, self.longest, most)


def cover_of(vocabulary: Vocabulary, density: Density, texts: Iterable[bytes]) -> Cover | None:
    """None where a normalizer may change more of a text than its form and its spaces. texts: of all tokens."""
    fields = Fields("tokenizer", vocabulary.pipeline)
    forms: list[Form] = []
    for step in checked_steps(fields, "normalizer") if "normalizer" in vocabulary.pipeline else ():
        kind = step.need("type", str)
        if kind in _FORMS:
            forms.append(_FORMS[kind])
        elif kind == "Replace":
            if step.inside("pattern").get("String", str) != " " or step.need("content", str) != SPACE:
                return None
        elif kind != "ByteLevel" and not (kind == "Prepend" and step.need("prepend", str) == SPACE):
            return None
    longest: dict[bytes, int] = {}
    for text in texts:
        text = text if vocabulary.byte_level else text.replace(SPACE.encode(), b" ")
        key = text[:KEY]
        longest[key] = max(longest.get(key, 0), len(text))
    return Cover(longest, density.dropped, tuple(forms), not vocabulary.byte_level)


def _covers_more_than(data: bytes, longest: dict[bytes, int], most: int) -> bool:
    """Whether `data` cannot be covered by `most` steps. Its first byte, a space that the tokenizer may put before a
    text, need not be covered."""
    end, reached, furthest, steps = len(data), 1, 0, 0
    for at in range(end):
        step = 1
        for size in range(KEY, 1, -1):
            length = longest.get(data[at : at + size], 0)
            if length:
                step = length
                break
        furthest = max(furthest, at + step)
        if at == reached:
            steps, reached = steps + 1, furthest
            if steps > most:
                return True
            if reached >= end:
                return False
    return steps > most
