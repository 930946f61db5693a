"""Reads a SentencePiece model: the tokenizer.model that older folders have beside no tokenizer.json."""

from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import UnsupportedError
from roofline.common.fields import refuse
from roofline.text.tokenizers.protobuf import binary, decimal, flag, message, text, whole
from roofline.text.tokenizers.sentencepiece import BYTE, UNKNOWN, SentencePieces, check_charsmap
from roofline.text.tokenizers.vocabulary import MAX_ID, JsonObject

MAX_BYTES = 1 << 26  # of a file; Gemma's has 4,200,000
_KINDS: dict[int, Literal["Unigram", "BPE"]] = {1: "Unigram", 2: "BPE"}
_OTHER_KINDS = {3: "words", 4: "characters"}
# Numbers of fields in SentencePiece's messages.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_KIND, _SUFFIX_SPACE, _UNKNOWN_ID, _BOS_ID, _EOS_ID = 3, 24, 40, 41, 42
_CHARSMAP, _DUMMY_PREFIX, _SINGLE_SPACES, _ESCAPES = 2, 3, 4, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """What a tokenizer.model says. bos, eos: None where the model has none."""

    kind: Literal["Unigram", "BPE"]
    pieces: SentencePieces
    bos: int | None
    eos: int | None

    def parts(self) -> JsonObject:
        """Fields of the vocabulary."""
        return self.pieces.unigram() if self.kind == "Unigram" else self.pieces.bpe()


def read_model(path: str, data: bytes) -> SentencePieceModel:
    """Raises ConfigError where the bytes are no SentencePiece model, UnsupportedError for a kind that is not built."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int | memoryview] = {}
    for number, value in message(path, "the model", memoryview(data)):
        if number == _PIECES:
            if len(tokens) >= MAX_ID:
                refuse(path, "pieces", f"are more than {MAX_ID}")
            piece = _piece(path, f"piece {len(tokens)}", binary(path, "pieces", value))
            tokens.append(piece[0])
            scores.append(piece[1])
            types.append(piece[2])
        elif number == _TRAINER:
            inside = message(path, "trainer_spec", binary(path, "trainer_spec", value))
            trainer |= {key: whole(path, f"trainer_spec.{key}", v) for key, v in inside if isinstance(v, int)}
        elif number == _NORMALIZER:
            normalizer |= dict(message(path, "normalizer_spec", binary(path, "normalizer_spec", value)))
        elif number == _DENORMALIZER:
            inside = message(path, "denormalizer_spec", binary(path, "denormalizer_spec", value))
            if any(key == _CHARSMAP and v for key, v in inside):
                raise UnsupportedError(f"{path}: denormalizer_spec", "its map for decoding is not built here")
    if not tokens:
        refuse(path, "pieces", "are missing: it is no SentencePiece model")
    kind = trainer.get(_KIND, 1)
    if kind not in _KINDS:
        what = f"{path}: a model of {_OTHER_KINDS.get(kind, f'kind {kind}')}"
        raise UnsupportedError(what, "it is not built here", sorted(_KINDS.values()))
    if trainer.get(_SUFFIX_SPACE, 0) or not _switch(path, normalizer, _ESCAPES):
        raise UnsupportedError(f"{path}: spaces that are not visible, or stand behind words", "are not built here")
    ids = [_id(path, trainer, key, default, types) for key, default in ((_UNKNOWN_ID, 0), (_BOS_ID, 1), (_EOS_ID, 2))]
    charsmap = bytes(binary(path, "normalizer_spec.precompiled_charsmap", normalizer.get(_CHARSMAP, memoryview(b""))))
    pieces = SentencePieces(
        tokens,
        types,
        scores,
        ids[0],
        prefix_space=_switch(path, normalizer, _DUMMY_PREFIX),
        single_spaces=_switch(path, normalizer, _SINGLE_SPACES),
        charsmap=check_charsmap(path, "normalizer_spec.precompiled_charsmap", charsmap),
    )
    return SentencePieceModel(_KINDS[kind], pieces, ids[1], ids[2])


def _piece(path: str, name: str, data: memoryview) -> tuple[str, float, int]:
    """Text, score and kind of a piece."""
    token, score, kind = "", 0.0, 1
    for number, value in message(path, name, data):
        if number == 1:
            token = text(path, name, value)
        elif number == 2:
            score = decimal(path, name, value)
        elif number == 3:
            kind = whole(path, name, value)
    if not token or not 1 <= kind <= BYTE:
        refuse(path, name, f"has {'no text' if not token else f'kind {kind}, none of 1 to {BYTE}'}")
    return token, score, kind


def _switch(path: str, normalizer: dict[int, int | memoryview], number: int) -> bool:
    """A switch of the normalizer, each of which is on where the file does not say."""
    return flag(path, f"normalizer_spec.{number}", normalizer.get(number, 1))


def _id(path: str, trainer: dict[int, int], key: int, default: int, types: list[int]) -> int | None:
    """A special id, None where the model has none: it is below 0 then."""
    value = trainer.get(key, default)
    if value >= len(types):
        refuse(path, f"trainer_spec.{key}", f"the number {value} is no id from 0 to {len(types) - 1}")
    if key == _UNKNOWN_ID and (value < 0 or types[value] != UNKNOWN):
        refuse(path, f"trainer_spec.{key}", f"the number {value} is not the id of the piece for unknown text")
    return value if value >= 0 else None
