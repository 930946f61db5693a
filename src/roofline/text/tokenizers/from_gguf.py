"""Builds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Sequence
from typing import Any

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.text.tokenizers.pretokenizers import ADDS_BOS, IGNORE_MERGES, byte_level_pipeline
from roofline.text.tokenizers.tokenizer import SPACE, Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, JsonObject, Vocabulary, end_ids

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type


def from_gguf(metadata: JsonObject) -> Tokenizer:
    """The tokenizer that a GGUF file's key-value pairs describe.

    Byte-level BPE ("gpt2") is split as its ``tokenizer.ggml.pre`` says. SentencePiece ("llama") follows sentencepiece
    itself: its dummy prefix is put before every text and after every special token, as Llama's reference code does.

    Raises:
        ConfigError: a key is missing or does not fit another; the message names it.
        UnsupportedError: a kind of tokenizer or splitting rule we do not know; lists the known.
    """
    kind = _get(metadata, "model", str)
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if kind not in makers:
        raise UnsupportedError(f"tokenizer.ggml.model = {kind!r}", "no such tokenizer is built here", sorted(makers))
    tokens = _get(metadata, "tokens", Sequence)
    types = _get(metadata, "token_type", Sequence, default=[1] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(tokens)}")
    added = [
        AddedToken(i, tokens[i], special=types[i] == _CONTROL)
        for i in range(len(tokens))
        if types[i] in (_CONTROL, _USER_DEFINED) and tokens[i]
    ]
    ids = {key: _token_id(metadata, key, len(tokens)) for key in ("bos", "eos", "eot", "eom", "unknown")}
    adds_bos = kind == "llama" or (kind == "gpt2" and metadata.get("tokenizer.ggml.pre") in ADDS_BOS)
    prefix = ids["bos"] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    suffix = ids["eos"] if metadata.get("tokenizer.ggml.add_eos_token", kind == "t5") else None
    parts = makers[kind](metadata, list(tokens), types, ids["unknown"])
    return Tokenizer(
        Vocabulary(
            tokens=list(tokens),
            **parts,
            added=added,
            bos_id=ids["bos"],
            eos_ids=end_ids((ids["eos"], ids["eot"], ids["eom"]), added),
            prefix=() if prefix is None else (prefix,),
            suffix=() if suffix is None else (suffix,),
        )
    )


def _byte_level(metadata: JsonObject, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    merges = _get(metadata, "merges", Sequence)
    pairs = [merge.partition(" ") for merge in merges]
    if not all(pair[2] for pair in pairs):
        raise ConfigError("tokenizer.ggml.merges holds an entry that is not two tokens with a space between")
    kind = _get(metadata, "pre", str, default="default")
    return {
        "model": "BPE",
        "lefts": [pair[0] for pair in pairs],
        "rights": [pair[2] for pair in pairs],
        "options": {"ignore_merges": kind in IGNORE_MERGES},
        "pipeline": byte_level_pipeline(kind),
    }


def _sentencepiece(metadata: JsonObject, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    if "tokenizer.ggml.merges" in metadata:
        pairs = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        pairs = _merges_from_scores(tokens, types, _scores(metadata, len(tokens)))
    options: dict[str, object] = {"byte_fallback": _BYTE in types, "fuse_unk": True}
    if unknown is not None:
        options["unk_token"] = tokens[unknown]
    return {
        "model": "BPE",
        "lefts": [pair[0] for pair in pairs],
        "rights": [pair[1] for pair in pairs],
        "options": options,
        **_visible_spaces(metadata),
    }


def _unigram(metadata: JsonObject, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedError(
            "tokenizer.ggml.precompiled_charsmap", "its normalisation is not built", ("llama", "gpt2")
        )
    return {
        "model": "Unigram",
        "scores": _scores(metadata, len(tokens)),
        "options": {"unk_id": unknown, "byte_fallback": _BYTE in types},
        **_visible_spaces(metadata),
    }


def _visible_spaces(metadata: JsonObject) -> JsonObject:
    """How SentencePiece spells spaces, and the one that it may put before a text."""
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
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


def _scores(metadata: JsonObject, count: int) -> list[float]:
    scores = _get(metadata, "scores", Sequence)
    if len(scores) != count:
        raise ConfigError(f"tokenizer.ggml.scores has {len(scores)} entries, tokenizer.ggml.tokens {count}")
    return [float(score) for score in scores]


def _token_id(metadata: JsonObject, name: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not 0 <= int(value) < count:
        raise ConfigError(f"tokenizer.ggml.{name}_token_id = {value} is not one of the {count} tokens")
    return int(value)


def _get(metadata: JsonObject, name: str, kind: type, default: object = None) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is None:
        raise ConfigError(f"the file has no tokenizer.ggml.{name}")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, kind):
        raise ConfigError(f"tokenizer.ggml.{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value
