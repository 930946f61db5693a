"""Builds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, naming, shorten
from roofline.text.tokenizers.pretokenizers import ADDS_BOS, IGNORE_MERGES, VISIBLE_SPACES, byte_level_pipeline
from roofline.text.tokenizers.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    SentencePieces,
    added_tokens,
    check_charsmap,
)
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import END_TOKENS, AddedToken, JsonObject, Vocabulary, checked_id, end_ids
from roofline.text.tokenizers.wordpiece import word_pieces

T = TypeVar("T")

_ENDS = ("eos", "eot", "eom")
# What stands for a special token where a file does not say, as llama.cpp has it.
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {},
    "gemma4": {},
    "t5": {"eos": 1, "unknown": 2},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102},  # GGUF's own spelling
}
_ELSEWHERE = {
    "rwkv": "it finds the longest token in a tree of bytes, which is not",
    "plamo2": "it goes through a text from its end with a table of suffixes, which is not",
    "hybriddna": "it cuts DNA into groups of letters, which is not",
    "whitespace": "it splits at spaces and keeps them in no token, which is not",
    "no_vocab": "the file has no tokens, without which none is",
    "none": "the file has no tokens, without which none is",
}


def from_gguf(metadata: JsonObject, path: Path | str = "the GGUF file") -> Tokenizer:
    """The tokenizer that a GGUF file's key-value pairs describe; errors name it by `path`.

    Byte-level BPE ("gpt2") is split as its ``tokenizer.ggml.pre`` says. SentencePiece ("llama", "t5", "gemma4")
    follows sentencepiece itself: its dummy prefix is put before every text and after every special token, as Llama's
    reference code does. WordPiece ("bert") is Hugging Face's.

    Raises:
        ConfigError: a key is missing or does not fit another; the message names it.
        UnsupportedError: a kind of tokenizer or splitting rule we do not know; lists the known.
    """
    within = "tokenizer.ggml."
    values = {key.removeprefix(within): metadata[key] for key in metadata if key.startswith(within)}
    fields = Fields(path, values, within)
    kind = fields.need("model", str)
    if kind not in _DEFAULT_IDS:
        what = f"{path}: tokenizer.ggml.model = {shorten(kind)!r}"
        reason = f"{_ELSEWHERE.get(kind, 'no such tokenizer is')} built here"
        raise UnsupportedError(what, reason, sorted(_DEFAULT_IDS))
    tokens = _needed(fields, "tokens", str)
    types = _types(fields, tokens)
    if kind == "gpt2" and fields.get("pre", str) in VISIBLE_SPACES:
        tokens, types = _with_visible_spaces(tokens, types)
    ids = {key: _token_id(fields, key, len(tokens)) for key in ("bos", *_ENDS, "unknown", "seperator")}
    for key, token_id in _DEFAULT_IDS[kind].items():
        if f"{key}_token_id" not in values and token_id < len(tokens):
            ids[key] = token_id
    prefix, suffix = _around(fields, kind, ids)
    with naming(path):
        model = _model(fields, kind, tokens, types, ids["unknown"])
        added = _with_conditions(model.get("added") or added_tokens(tokens, types), metadata, path)
        parts: JsonObject = {"tokens": tokens, **model, "added": added}
        vocabulary = Vocabulary(
            **parts,
            bos_id=ids["bos"],
            eos_ids=end_ids((ids[key] for key in _ENDS), added),
            prefix=prefix,
            suffix=suffix,
        )
        return Tokenizer.of_file(path, vocabulary)


def _with_visible_spaces(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Tokens and types as SentencePiece has them: converters of tokenizer.json write runs of visible spaces that are
    added tokens as spaces, and do not say which tokens are bytes. llama.cpp takes both for what they are."""
    tokens = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
    named = {f"<0x{byte:02X}>" for byte in range(256)}
    pairs = zip(tokens, types, strict=True)
    return tokens, [BYTE if kind == NORMAL and token in named else kind for token, kind in pairs]


def takes_spaces_behind(name: str, content: str) -> bool:
    """Whether llama.cpp has a special or user-defined token take the white space behind it, which no key says.

    name: of the model (``general.name``).
    """
    is_phi = "phi-3" in name.lower() or "phi3" in name.lower()
    return is_phi and content not in ("<unk>", "<s>", "<|endoftext|>")


def _with_conditions(added: Sequence[AddedToken], metadata: JsonObject, path: Path | str) -> list[AddedToken]:
    """The added tokens with what llama.cpp knows of the white space around them by the names of models."""
    general = Fields(path, {key: metadata[key] for key in ("general.name", "general.architecture") if key in metadata})
    name, family = general.get("general.name", str, ""), general.get("general.architecture", str, "")
    kind = metadata.get("tokenizer.ggml.pre")
    mask = "[MASK]" if "modern-bert" in name.lower() else ""
    if kind in ("jina-v2-de", "jina-v2-es", "jina-v2-code") or family in ("nomic-bert-moe", "jina-bert-v3"):
        name, mask = "", "<mask>"
    return [
        replace(token, lstrip=token.content == mask, rstrip=takes_spaces_behind(name, token.content)) for token in added
    ]


def _types(fields: Fields, tokens: list[str]) -> list[int]:
    """The kinds of the tokens. One that ends answers in some family is a control symbol, whatever the file says, unless
    it is a piece of text like others, an ordinary token that merging makes, or marked as unused."""
    types = fields.elements("token_type", int)
    types = [NORMAL] * len(tokens) if types is None else list(types)
    if not tokens or len(types) != len(tokens):
        fields.refuse("token_type", f"has {len(types)} entries, {fields.within}tokens {len(tokens)}")
    if min(types) < 0 or max(types) > BYTE:
        fields.refuse("token_type", f"has an entry that is none of 0 to {BYTE}")
    for i in (place for place, token in enumerate(tokens) if token in END_TOKENS):
        if types[i] != UNUSED and not (types[i] == NORMAL and _is_merged(fields, tokens[i])):
            types[i] = CONTROL
    return types


def _is_merged(fields: Fields, token: str) -> bool:
    """Whether a token comes of merging two others, as no special token does."""
    cuts = range(1, len(token))
    merges = fields.elements("merges", str)
    if merges is not None:
        results = {f"{token[:cut]} {token[cut:]}" for cut in cuts}
        return any(merge in results for merge in merges)
    tokens = frozenset(fields.elements("tokens", str) or ())
    return any(token[:cut] in tokens and token[cut:] in tokens for cut in cuts)


def _around(fields: Fields, kind: str, ids: dict[str, int | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a text."""
    begins = kind in ("llama", "bert", "gemma4") or (kind == "gpt2" and fields.get("pre", str) in ADDS_BOS)
    prefix = _placed(fields, "add_bos_token", begins, "bos", ids)
    suffix = _placed(fields, "add_eos_token", kind == "t5", "eos", ids)
    if kind == "bert":  # elsewhere a separator stands between two texts alone, which is no text's own end
        suffix = (*suffix, *_placed(fields, "add_sep_token", True, "seperator", ids))
    return prefix, suffix


def _placed(fields: Fields, switch: str, default: bool, key: str, ids: dict[str, int | None]) -> tuple[int, ...]:
    """The id of a token that a switch of the file puts around texts."""
    token_id = ids[key]
    if not fields.get(switch, bool, default):
        return ()
    if token_id is None and switch in fields.values:
        fields.refuse(switch, f"is true, but {fields.within}{key}_token_id is missing")
    return () if token_id is None else (token_id,)


def _model(fields: Fields, kind: str, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    """The fields of the vocabulary that are its kind's own."""
    if kind == "bert":
        return _word_pieces(fields, tokens, types, unknown)
    if kind == "gpt2" and fields.get("pre", str) not in VISIBLE_SPACES:
        return _byte_level(fields)
    prefixed = fields.get("add_space_prefix", bool, kind == "llama")
    single = fields.get("remove_extra_whitespaces", bool, False)
    units = fields.elements("precompiled_charsmap", int) or ()
    if units and not (min(units) >= -128 and max(units) <= 255):
        fields.refuse("precompiled_charsmap", "has an element that is no byte")
    charsmap = bytes(unit & 0xFF for unit in units)  # some files have signed ones
    check_charsmap(fields.path, f"{fields.within}precompiled_charsmap", charsmap)
    has_merges = "merges" in fields.values or kind in ("gpt2", "gemma4")
    scores = [] if has_merges and kind != "t5" else _scores(fields, len(tokens))
    pieces = SentencePieces(
        tokens=tokens,
        types=types,
        scores=scores,
        unknown=unknown,
        prefix_space=prefixed,
        single_spaces=single,
        charsmap=charsmap,
    )
    if kind == "t5":
        return pieces.unigram()
    return pieces.bpe(_merges(fields) if has_merges else None)


def _byte_level(fields: Fields) -> JsonObject:
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
    """Pairs of tokens, each written with a space between; the left one may begin with a space itself."""
    merges = _needed(fields, "merges", str)
    cuts = [merge.find(" ", 1) for merge in merges]
    if -1 in cuts:
        fields.refuse("merges", "holds an entry that is not two tokens with a space between")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _word_pieces(fields: Fields, tokens: list[str], types: Sequence[int], unknown: int | None) -> JsonObject:
    """BERT's tokens as BERT spells them: GGUF files put a visible space before a word's first token, and ## nowhere."""
    if unknown is None:
        fields.refuse("unknown_token_id", "is missing")
    first = fields.get("normalizer.lowercase", bool, True)
    accents = fields.get("normalizer.strip_accents", bool, first)
    special = {i for i, kind in enumerate(types) if kind != NORMAL} | {unknown}
    words = [
        token.removeprefix(SPACE) if i in special or token.startswith(SPACE) else f"##{token}" if token else ""
        for i, token in enumerate(tokens)
    ]
    return {"tokens": words, "added": added_tokens(words, types), **word_pieces(words[unknown], first, accents)}


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
