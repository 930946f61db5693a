"""Builds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.text.tokenizers.pretokenizers import ADDS_BOS, IGNORE_MERGES, byte_level_pipeline
from roofline.text.tokenizers.tokenizer import SPACE, Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, JsonObject, Vocabulary, checked_id, end_ids

T = TypeVar("T")

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type


def from_gguf(metadata: JsonObject, path: Path | str = "the GGUF file") -> Tokenizer:
    """The tokenizer that a GGUF file's key-value pairs describe; errors name it by `path`.

    Byte-level BPE ("gpt2") is split as its ``tokenizer.ggml.pre`` says. SentencePiece ("llama") follows sentencepiece
    itself: its dummy prefix is put before every text and after every special token, as Llama's reference code does.

    Raises:
        ConfigError: a key is missing or does not fit another; the message names it.
        UnsupportedError: a kind of tokenizer or splitting rule we do not know; lists the known.
    """
    within = "tokenizer.ggml."
    values = {key.removeprefix(within): metadata[key] for key in metadata if key.startswith(within)}
    fields = Fields(path, values, within)
    kind = fields.need("model", str)
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if kind not in makers:
        what = f"{path}: tokenizer.ggml.model = {shorten(kind)!r}"
        raise UnsupportedError(what, "no such tokenizer is built here", sorted(makers))
    tokens = _needed(fields, "tokens", str)
    types = fields.elements("token_type", int)
    types = [1] * len(tokens) if types is None else types
    if not tokens or len(types) != len(tokens):
        fields.refuse("token_type", f"has {len(types)} entries, {within}tokens {len(tokens)}")
    if min(types) < 0 or max(types) > _BYTE:
        fields.refuse("token_type", f"has an entry that is none of 0 to {_BYTE}")
    added = [
        AddedToken(i, tokens[i], special=types[i] == _CONTROL)
        for i in range(len(tokens))
        if types[i] in (_CONTROL, _USER_DEFINED) and tokens[i]
    ]
    ids = {key: _token_id(fields, key, len(tokens)) for key in ("bos", "eos", "eot", "eom", "unknown")}
    adds_bos = kind == "llama" or (kind == "gpt2" and fields.get("pre", str) in ADDS_BOS)
    prefix = ids["bos"] if fields.get("add_bos_token", bool, adds_bos) else None
    suffix = ids["eos"] if fields.get("add_eos_token", bool, kind == "t5") else None
    vocabulary = Vocabulary(
        tokens=tokens,
        **makers[kind](fields, tokens, types, ids["unknown"]),
        added=added,
        bos_id=ids["bos"],
        eos_ids=end_ids((ids["eos"], ids["eot"], ids["eom"]), added),
        prefix=() if prefix is None else (prefix,),
        suffix=() if suffix is None else (suffix,),
    )
    return Tokenizer.of_file(path, vocabulary)


def _byte_level(fields: Fields, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    pairs = _merges(fields)
    kind = fields.get("pre", str, "default")
    return {
        "model": "BPE",
        "lefts": [pair[0] for pair in pairs],
        "rights": [pair[1] for pair in pairs],
        "options": {"ignore_merges": kind in IGNORE_MERGES},
        "pipeline": byte_level_pipeline(kind),
    }


def _merges(fields: Fields) -> list[tuple[str, str]]:
    pairs = [merge.partition(" ") for merge in _needed(fields, "merges", str)]
    if not all(pair[2] for pair in pairs):
        fields.refuse("merges", "holds an entry that is not two tokens with a space between")
    return [(pair[0], pair[2]) for pair in pairs]


def _sentencepiece(fields: Fields, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    if "merges" in fields.values:
        pairs = _merges(fields)
    else:
        pairs = _merges_from_scores(tokens, types, _scores(fields, len(tokens)))
    options: dict[str, object] = {"byte_fallback": _BYTE in types, "fuse_unk": True}
    if unknown is not None:
        options["unk_token"] = tokens[unknown]
    return {
        "model": "BPE",
        "lefts": [pair[0] for pair in pairs],
        "rights": [pair[1] for pair in pairs],
        "options": options,
        **_visible_spaces(fields),
    }


def _unigram(fields: Fields, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    if fields.get("precompiled_charsmap", list):
        what = f"{fields.path}: tokenizer.ggml.precompiled_charsmap"
        raise UnsupportedError(what, "its normalisation is not built", ("llama", "gpt2"))
    return {
        "model": "Unigram",
        "scores": _scores(fields, len(tokens)),
        "options": {"unk_id": unknown, "byte_fallback": _BYTE in types},
        **_visible_spaces(fields),
    }


def _visible_spaces(fields: Fields) -> JsonObject:
    """How SentencePiece spells spaces, and the one that it may put before a text."""
    prefixed = fields.get("add_space_prefix", bool, True)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    pipeline = {"normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]}}
    return {"pipeline": pipeline, "byte_level": False, "strip_space": prefixed}


def _merges_from_scores(tokens: list[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges a SentencePiece BPE model implies: each piece from each pair of pieces, best score first.

    Control, unknown and byte tokens are no results of merges: sentencepiece never makes them from text.
    """
    never = {_UNKNOWN, _CONTROL, _BYTE}
    ids = {token: i for i, token in enumerate(tokens) if types[i] not in never}
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                merges.append((-scores[i], -cut, cut - len(token), ids[first], ids[second], first, second))
    merges.sort()
    return [(merge[5], merge[6]) for merge in merges]


def _scores(fields: Fields, count: int) -> list[float]:
    scores = _needed(fields, "scores", float)
    if len(scores) != count:
        fields.refuse("scores", f"has {len(scores)} entries, tokenizer.ggml.tokens {count}")
    return scores


def _token_id(fields: Fields, name: str, count: int) -> int | None:
    key = f"{name}_token_id"
    value = fields.get(key, int)
    return None if value is None else checked_id(fields, key, value, count)


def _needed(fields: Fields, key: str, kind: type[T]) -> list[T]:
    """The list at a key that must be there."""
    values = fields.elements(key, kind)
    return fields.need(key, list) if values is None else values
