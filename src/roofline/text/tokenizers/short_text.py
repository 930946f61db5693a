"""Encodes short ASCII texts by itself, so that a first prompt need not wait for the library to build its tables.

It does byte-level BPE with tables from the stored tokenizer (binary_file.py). Tests compare it with the library; it
returns None, and the library has to encode, for whatever it does not encode with certainty.
"""

import re
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from roofline.text.tokenizers.vocabulary import JsonObject, Vocabulary, byte_alphabet

MAX_TEXT = 2000  # characters of one text
MAX_TOTAL = 20000  # characters in all: after these the library's tables have paid for themselves
_PLAIN = re.compile(r"[\n\r\t -~]*")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"  # what ByteLevel has built in
# The ASCII part of the Unicode classes that pre-tokenizers use, as they stand inside brackets; M, marks, has none.
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}


def tables(vocabulary: Vocabulary) -> tuple[list[str], list[int], bytes, bytes] | None:
    """(patterns that split a text, id of each byte or -1, sorted pairs, their results), None for other tokenizers.

    A pair is left id << 32 | right id, its result rank << 32 | new id, both uint64, little-endian.
    """
    options = {name: value for name, value in vocabulary.options.items() if value not in (None, False, "")}
    if vocabulary.model != "BPE" or not vocabulary.byte_level or options:
        return None
    normalizer = vocabulary.pipeline.get("normalizer")
    if normalizer and normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):  # these leave ASCII as it is
        return None
    if any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in vocabulary.added if t.special):
        return None
    if normalizer and not all(t.content.isascii() for t in vocabulary.added):  # "ﬁ" is looked for as "fi"
        return None
    patterns = _patterns(vocabulary.pipeline.get("pre_tokenizer"))
    if patterns is None:
        return None
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if token}
    merges: dict[int, int] = {}
    for rank, (first, second) in enumerate(zip(vocabulary.lefts, vocabulary.rights, strict=True)):
        if first not in ids or second not in ids or first + second not in ids:
            return None
        pair = ids[first] << 32 | ids[second]  # of a pair that is listed twice the last counts, as in the library
        merges[pair] = rank << 32 | ids[first + second]
    pairs = sorted(merges)
    starts = {byte: ids.get(character, -1) for character, byte in byte_alphabet().items()}
    results = array("Q", [merges[pair] for pair in pairs])
    return patterns, [starts[b] for b in range(256)], little(array("Q", pairs)), little(results)


class ShortTextEncoder:
    """Encodes with the tables that `tables` made."""

    def __init__(self, patterns: Sequence[str], starts: Sequence[int], pairs: memoryview, results: memoryview) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._starts = starts
        self._pairs, self._results = pairs.cast("Q"), results.cast("Q")
        self._words: dict[str, list[int]] = {}
        self._budget = MAX_TOTAL

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text without special tokens, None where the library must encode it."""
        self._budget -= len(text)
        if len(text) > MAX_TEXT or self._budget < 0 or not _PLAIN.fullmatch(text):
            return None
        ids: list[int] = []
        for word in self._split(text):
            word_ids = self._words.get(word)
            if word_ids is None:
                starts = [self._starts[byte] for byte in word.encode()]
                if -1 in starts:
                    return None
                word_ids = self._words[word] = self._merged(starts)
            ids += word_ids
        return ids

    def _split(self, text: str) -> list[str]:
        """Each pattern splits the pieces of the one before; matches and what lies between them become pieces."""
        pieces = [text] if text else []
        for pattern in self._patterns:
            finer = []
            for piece in pieces:
                at = 0
                for match in pattern.finditer(piece):
                    finer += [piece[at : match.start()], match[0]]
                    at = match.end()
                finer.append(piece[at:])
            pieces = [piece for piece in finer if piece]
        return pieces

    def _merged(self, ids: list[int]) -> list[int]:
        """The pair of the lowest rank becomes one, the leftmost first, until none is left."""
        while len(ids) > 1:
            results = [self._result(first, second) for first, second in pairwise(ids)]
            best = min(results)
            if best == _NONE:
                break
            at = results.index(best)
            ids[at : at + 2] = [best & 0xFFFFFFFF]
        return ids

    def _result(self, first: int, second: int) -> int:
        pair = first << 32 | second
        at = bisect_left(self._pairs, pair)
        return self._results[at] if at < len(self._pairs) and self._pairs[at] == pair else _NONE


_NONE = 1 << 64


def _patterns(step: JsonObject | None) -> list[str] | None:
    """Patterns of Python's `re` that split ASCII text as a pre-tokenizer does; None for one that it cannot express."""
    if step is None:
        return None
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            parts = [_patterns(inner) for inner in steps]
            return None if any(p is None for p in parts) else [p for part in parts if part for p in part]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [_GPT2] if step.get("use_regex", True) else []
        case {"type": "Digits"}:
            return ["[0-9]" if step.get("individual_digits") else "[0-9]+"]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            translated = _ascii(pattern)
            return None if translated is None else [translated]
    return None


def _ascii(pattern: str) -> str | None:
    """A library pattern with its Unicode classes cut to ASCII; None where that is not certain to mean the same."""
    parts: list[str] = []
    inside = False  # brackets
    for part in re.findall(r"\\p\{\w+\}|\\.|.", pattern, re.DOTALL):
        if part.startswith("\\p"):
            name = part[3:-1]
            if name not in _CLASSES or (not inside and not _CLASSES[name]):
                return None
            parts.append(_CLASSES[name] if inside else f"[{_CLASSES[name]}]")
        elif not part.isascii() or (part.startswith("\\") and part[1:] not in "srnStd$.|^+*?()[]{}\\/-"):
            return None
        else:
            if part == "[" and inside:  # a class in a class: the library's own syntax
                return None
            inside = (inside or part == "[") and part != "]"
            parts.append(part)
    translated = "".join(parts)
    # What Python and the library read differently, or might: operators and odd ends of brackets; anchors (of lines or
    # of the text), repeated repeats (possessive or not), groups other than (?:, (?i: and (?!.
    bare = re.sub(r"\\.", "x", translated, flags=re.DOTALL)
    outside = re.sub(r"\[[^\]]*\]", "x", bare)
    if re.search(r"&&|--|~~|\|\||\[\^?\]", bare) or re.search(r"[\^$]|[+*?}]\+|\(\?(?!:|i:|!)", outside):
        return None
    try:
        return None if re.compile(translated).search("") else translated
    except re.error:
        return None


def little(numbers: "array[float] | array[int]") -> bytes:
    """The bytes of numbers, the least significant first; on other machines the array is swapped in place."""
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers.tobytes()
