"""What SentencePiece makes of a text, in steps and models of the library: for GGUF files and tokenizer.model."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.fields import refuse
from roofline.text.tokenizers.charsmap import CharacterMap
from roofline.text.tokenizers.leftmost import has_equal_scores
from roofline.text.tokenizers.vocabulary import AddedToken, JsonObject

SPACE = "▁"  # SentencePiece's visible space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    1,
    2,
    3,
    4,
    5,
    6,
)  # kinds of pieces, in GGUF files as in SentencePiece's own
MAX_PIECE = 1 << 10  # characters of a token; to find its merges takes time with their square


@dataclass(frozen=True)
class SentencePieces:
    """A SentencePiece model.

    tokens, types, scores: by id. unknown: the id for what no piece spells. prefix_space: a text gets one space before
    it; single_spaces: several become one, and none stays at the ends; charsmap: normalizes characters, b"" without.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    unknown: int | None
    prefix_space: bool = True
    single_spaces: bool = False
    charsmap: bytes = b""

    def added(self) -> list[AddedToken]:
        """The tokens that are found in a text before it is split: control symbols and those that users defined."""
        return added_tokens(self.tokens, self.types)

    def bpe(self, merges: list[tuple[str, str]] | None = None) -> JsonObject:
        """Fields of the vocabulary of a BPE model; merges: where they are not to be made of the scores."""
        pairs = merges_from_scores(self.tokens, self.types, self.scores) if merges is None else merges
        options: dict[str, object] = {"byte_fallback": BYTE in self.types, "fuse_unk": True}
        if self.unknown is not None:
            options["unk_token"] = self.tokens[self.unknown]
        lefts, rights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        parts = {"model": "BPE", "lefts": lefts, "rights": rights, "options": options, **self._spelling()}
        scores = dict(zip(self.tokens, self.scores, strict=True)) if merges is None else {}
        if scores and has_equal_scores((left + right for left, right in pairs), scores):
            parts |= {"leftmost": True, "scores": list(self.scores)}
        return parts

    def unigram(self) -> JsonObject:
        """Fields of the vocabulary of a Unigram model."""
        options = {"unk_id": self.unknown, "byte_fallback": BYTE in self.types}
        spelling = self._spelling()
        if BYTE in self.types:
            # A text that spells <0x0A> is no line end: the library finds such pieces by their text, so it is cut there.
            cut = {"type": "Split", "pattern": {"Regex": r"<(?=0x[0-9A-F]{2}>)"}, "behavior": "Isolated"}
            spelling = {**spelling, "pipeline": {**spelling["pipeline"], "pre_tokenizer": {**cut, "invert": False}}}
        return {"model": "Unigram", "scores": list(self.scores), "options": options, **spelling}

    def _spelling(self) -> JsonObject:
        steps: list[JsonObject] = []
        if self.single_spaces:
            steps += [_replaced({"Regex": " {2,}"}, " "), _replaced({"Regex": r"\A | \z"}, "")]
        if self.prefix_space:
            steps.append({"type": "Prepend", "prepend": SPACE})
        steps.append(_replaced({"String": " "}, SPACE))
        pipeline = {"normalizer": {"type": "Sequence", "normalizers": steps}}
        charsmap = base64.b64encode(self.charsmap).decode()
        spelling = {"byte_level": False, "strip_space": self.prefix_space, "charsmap": charsmap}
        return {"pipeline": pipeline, **spelling}


def check_charsmap(path: object, key: str, charsmap: bytes) -> bytes:
    """The map itself. Raises ConfigError where the library could not work with it."""
    try:
        if charsmap:
            CharacterMap(charsmap)
    except ValueError as error:
        refuse(str(path), key, f"is not a compiled map of characters: {error}")
    return charsmap


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Control symbols and tokens for unknown text, which are special, and tokens that users defined."""
    return [
        AddedToken(i, tokens[i], special=types[i] != USER_DEFINED)
        for i in range(len(tokens))
        if types[i] in (CONTROL, UNKNOWN, USER_DEFINED) and tokens[i]
    ]


def merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges a SentencePiece BPE model implies: each piece from each pair of pieces, best score first.

    Control, unknown and byte tokens are no results of merges: sentencepiece never makes them from text.
    """
    never = {UNKNOWN, CONTROL, BYTE}
    ids = {token: i for i, token in enumerate(tokens) if types[i] not in never}
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for token, i in ids.items():
        if len(token) > MAX_PIECE:
            raise ConfigError(f"token {i} has {len(token)} characters, of {MAX_PIECE} that one made of merges may have")
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                merges.append((-scores[i], -cut, cut - len(token), ids[first], ids[second], first, second))
    merges.sort()
    return [(merge[5], merge[6]) for merge in merges]


def _replaced(pattern: JsonObject, content: str) -> JsonObject:
    return {"type": "Replace", "pattern": pattern, "content": content}
