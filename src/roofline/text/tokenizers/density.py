"""The least number of tokens that a text can have, from its size alone: encoding millions of bytes takes seconds."""

from dataclasses import dataclass

from roofline.common.fields import Fields
from roofline.text.tokenizers.steps import checked_steps
from roofline.text.tokenizers.vocabulary import Vocabulary, byte_alphabet

# By how much a normalizer may shorten a text in UTF-8: three letters of Hangul become one syllable, 9 bytes 3;
# Kelvin's sign becomes K, 3 bytes 1; a bold letter of mathematics 4 bytes 1, and may then be composed.
_SHRINKS = {"NFC": 3, "NFD": 3, "NFKC": 12, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = frozenset({"ByteLevel", "Metaspace", "Split", "Punctuation", "Digits"})  # unless it removes what matches


@dataclass(frozen=True)
class Density:
    """The longest text that a token stands for: `most` bytes of UTF-8, beside bytes of `dropped`, which make none."""

    most: int
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """A text has this many tokens or more."""
        data = text.encode("utf-8", "surrogatepass")
        return -(-len(data.translate(None, self.dropped) if self.dropped else data) // self.most)


def density_of(vocabulary: Vocabulary) -> Density | None:
    """None where a text of any size may have a few tokens: some steps drop characters, some tokens stand for any."""
    if vocabulary.charsmap or any(token.lstrip or token.rstrip for token in vocabulary.added):
        return None
    tokens = frozenset(vocabulary.tokens)
    alphabet = byte_alphabet()
    if vocabulary.byte_level:
        dropped = bytes(byte for spelling, byte in alphabet.items() if spelling not in tokens)
        longest = max((len(token) for token in vocabulary.tokens), default=0)
    elif vocabulary.options.get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in alphabet.values()):
        dropped = b""
        longest = max((len(token.encode("utf-8", "surrogatepass")) for token in vocabulary.tokens), default=0)
    else:
        return None
    shrink = _shrinkage(vocabulary)
    longest = max([longest, *(len(token.content.encode("utf-8", "surrogatepass")) for token in vocabulary.added)])
    return Density(longest * shrink, dropped) if longest and shrink is not None else None


def _shrinkage(vocabulary: Vocabulary) -> int | None:
    """By how much the pipeline may shorten a text; None: without bounds."""
    fields = Fields("tokenizer", vocabulary.pipeline)
    shrink = 1
    for step in checked_steps(fields, "normalizer") if "normalizer" in vocabulary.pipeline else ():
        kind = step.need("type", str)
        if kind == "Replace":
            literal = step.inside("pattern").get("String", str)
            if literal is None or len(step.need("content", str)) < len(literal):
                return None
            shrink *= max(1, -(-len(literal.encode()) // max(1, len(step.need("content", str).encode()))))
            continue
        if kind not in _SHRINKS:
            return None
        shrink *= _SHRINKS[kind]
    for step in checked_steps(fields, "pre_tokenizer") if "pre_tokenizer" in vocabulary.pipeline else ():
        if step.need("type", str) not in _KEEPS_ALL or step.get("behavior", str) == "Removed":
            return None
    return shrink
