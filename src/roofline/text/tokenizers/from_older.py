"""Builds a tokenizer from the files that folders had before tokenizer.json: tokenizer.model, vocab.json, vocab.txt.

Such files do not say all: what is put around texts, and how they are split, is in the code of the class that
tokenizer_config.json names. The classes of the tables below are built; others are refused by name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.common.files import read_regular
from roofline.common.json_files import read_json_file
from roofline.text.tokenizers.folder_settings import NAMED, content_of, ids_of
from roofline.text.tokenizers.from_json import tokens_of
from roofline.text.tokenizers.from_model import MAX_BYTES, read_model
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import MAX_ID, AddedToken, JsonObject, Vocabulary, checked_id, end_ids
from roofline.text.tokenizers.wordpiece import word_pieces

MODEL, MERGES, WORDS = "tokenizer.model", "merges.txt", "vocab.txt"
_REMEDY = "save it again with transformers' fast tokenizer, which writes tokenizer.json"


class _Around(NamedTuple):
    """What a class has for BOS and EOS where tokenizer_config.json does not say, and whether it puts them around."""

    bos: str
    eos: str
    begins: bool = False
    ends: bool = False


_AROUND: dict[str, dict[str, _Around]] = {
    MODEL: {
        "LlamaTokenizer": _Around("<s>", "</s>", begins=True),
        "CodeLlamaTokenizer": _Around("<s>", "</s>", begins=True),
        "GemmaTokenizer": _Around("<bos>", "<eos>", begins=True),
        "T5Tokenizer": _Around("", "</s>", ends=True),
    },
    MERGES: {
        "GPT2Tokenizer": _Around("<|endoftext|>", "<|endoftext|>"),
        "CodeGenTokenizer": _Around("<|endoftext|>", "<|endoftext|>"),
        "Qwen2Tokenizer": _Around("", "<|endoftext|>"),
        "RobertaTokenizer": _Around("<s>", "</s>", begins=True, ends=True),
        "BartTokenizer": _Around("<s>", "</s>", begins=True, ends=True),
    },
    WORDS: dict.fromkeys(
        ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
        _Around("[CLS]", "[SEP]", begins=True, ends=True),
    ),
}
_BERT_NAMES = {
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_EXTRA_IDS = 100  # tokens that T5's class adds where its configuration does not say


def older_file(files: Mapping[str, Path]) -> str | None:
    """Which of the files the tokenizer is read from, None where none of them is one."""
    if MODEL in files:
        return MODEL
    if "vocab.json" in files and MERGES in files:
        return MERGES
    return WORDS if WORDS in files else None


def from_older(files: Mapping[str, Path], settings: Fields) -> Tokenizer:
    """The tokenizer of a folder without tokenizer.json.

    Args:
        files: name -> path of what is there.
        settings: the keys of tokenizer_config.json and generation_config.json.

    Raises:
        ConfigError: a file cannot be read, or two do not fit together; the message names file and key.
        UnsupportedError: a class whose code is not known here, or none is named.
    """
    source = older_file(files)
    if source is None:
        raise ConfigError(f"{settings.path}: none of {MODEL}, vocab.json with {MERGES}, {WORDS} is beside it")
    path, classes = files[source], _AROUND[source]
    name = (settings.get("tokenizer_class", str) or "").removesuffix("Fast")
    if name not in classes:
        what = f"{path}: tokenizer_class {shorten(name)!r}" if name else f"{path} without a tokenizer_class beside it"
        raise UnsupportedError(what, f"what it puts around texts is in its code, not here: {_REMEDY}", sorted(classes))
    around = classes[name]
    names = {"bos_token": around.bos, "eos_token": around.eos}
    if source == MODEL:
        parts, more_names = _of_model(path, settings, name)
    elif source == MERGES:
        parts, more_names = _of_merges(files["vocab.json"], path, settings, name), {}
    else:
        parts, more_names = _of_words(path, settings), _BERT_NAMES
    names |= more_names
    tokens: list[str] = parts["tokens"]
    added = _added(files, settings, tokens, parts["added"], names)
    ids = {token: i for i, token in enumerate(tokens) if token} | {token.content: token.id for token in added}
    # The class of vocab.txt knows no ends of texts, but what stands around one.
    ends = ("cls_token", "sep_token") if source == WORDS else ("bos_token", "eos_token")
    bos, eos = (ids.get(_named(settings, names, key)) for key in ends)
    return Tokenizer.of_file(
        path,
        Vocabulary(
            **{**parts, "added": added},
            bos_id=bos,
            eos_ids=end_ids((eos, *ids_of(settings, "eos_token_id")), added),
            prefix=_placed(settings, "add_bos_token", around.begins, bos),
            suffix=_placed(settings, "add_eos_token", around.ends, eos),
        ),
    )


def _placed(settings: Fields, key: str, default: bool, token_id: int | None) -> tuple[int, ...]:
    """The token that a switch puts around texts."""
    if not settings.get(key, bool, default):
        return ()
    if token_id is None:
        settings.refuse(key, f"is true, for this tokenizer_class or as it says, but no token is {key[4:]}")
    return (token_id,)


def _named(settings: Fields, names: Mapping[str, str], key: str) -> str:
    """The text of a special token."""
    return content_of(settings, key) or names.get(key, "")


def _of_model(path: Path, settings: Fields, name: str) -> tuple[JsonObject, dict[str, str]]:
    """Fields of the vocabulary, and texts of special tokens that the file has."""
    model = read_model(str(path), read_regular(path, MAX_BYTES))
    tokens = list(model.pieces.tokens)
    names = {"unk_token": tokens[model.pieces.unknown or 0]}
    for key, token_id in (("bos_token", model.bos), ("eos_token", model.eos)):
        if token_id is not None:
            names[key] = tokens[token_id]
    added = model.pieces.added()
    if name == "T5Tokenizer":
        count = settings.get("extra_ids", int, _EXTRA_IDS)
        checked_id(settings, "extra_ids", count, 1 << 16)
        added += [AddedToken(len(tokens) + i, f"<extra_id_{count - 1 - i}>", special=True) for i in range(count)]
    return {**model.parts(), "tokens": tokens, "added": added}, names


def _of_merges(vocab: Path, path: Path, settings: Fields, name: str) -> JsonObject:
    data = read_json_file(vocab)
    tokens = tokens_of(Fields(vocab, {"vocab": data}))
    lines = _lines(path)
    lines = lines[1:] if lines and lines[0].startswith("#version") else lines
    pairs = [line.partition(" ") for line in lines if line]
    if not all(pair[0] and pair[2] and " " not in pair[2] for pair in pairs):
        raise ConfigError(f"{path}: holds a line that is not two tokens with a space between")
    kind = "qwen2" if name == "Qwen2Tokenizer" else "gpt-2"
    return {
        "model": "BPE",
        "tokens": tokens,
        "lefts": [pair[0] for pair in pairs],
        "rights": [pair[2] for pair in pairs],
        "pipeline": byte_level_pipeline(kind, prefix_space=settings.get("add_prefix_space", bool, False)),
        "added": [],
    }


def _of_words(path: Path, settings: Fields) -> JsonObject:
    for key, only in (("do_basic_tokenize", True), ("never_split", None)):
        if settings.values.get(key, only) not in (only, None):
            raise UnsupportedError(f"{settings.path}: {key} other than {only}", "is not built here")
    tokens = [line.rstrip("\r") for line in _lines(path)]
    while tokens and not tokens[-1]:
        tokens.pop()
    unknown = _named(settings, _BERT_NAMES, "unk_token")
    lowercase, chinese = settings.get("do_lower_case", bool, True), settings.get("tokenize_chinese_chars", bool, True)
    parts = word_pieces(unknown, lowercase, settings.get("strip_accents", bool), chinese)
    return {**parts, "tokens": tokens, "added": []}


def _lines(path: Path) -> list[str]:
    try:
        lines = read_regular(path, MAX_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason}") from error
    if len(lines) > MAX_ID:
        raise ConfigError(f"{path}: has {len(lines)} lines, of {MAX_ID} that are allowed")
    return lines


def _added(
    files: Mapping[str, Path],
    settings: Fields,
    tokens: Sequence[str],
    model_tokens: Sequence[AddedToken],
    names: Mapping[str, str],
) -> list[AddedToken]:
    """The tokens that are found in a text before it is split, in the order of their ids; model_tokens: the model's."""
    special = {_named(settings, names, key) for key in NAMED}
    extra = settings.get("additional_special_tokens", list, [])
    special |= {entry for entry in extra if isinstance(entry, str)}
    ids = {token: i for i, token in enumerate(tokens) if token}
    added = {token.id: token for token in model_tokens}
    added |= {ids[name]: AddedToken(ids[name], name, special=True) for name in special if name in ids}
    if "added_tokens.json" in files:
        listed = Fields(files["added_tokens.json"], read_json_file(files["added_tokens.json"]))
        for content in listed.values:
            token_id = checked_id(listed, content, listed.need(content, int), MAX_ID)
            added[token_id] = AddedToken(token_id, content, special=content in special)
    decoder = settings.inside("added_tokens_decoder")
    for key in decoder.values:
        if not key.isdecimal() or len(key) > 8:
            decoder.refuse(key, "is not the id of a token")
        token_id = checked_id(decoder, key, int(key), MAX_ID)
        entry = decoder.inside(key)
        flags = {name: entry.get(name, bool, False) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        added[token_id] = AddedToken(token_id, entry.need("content", str), entry.get("special", bool, False), **flags)
    for token in added.values():
        if token.id < len(tokens) and tokens[token.id] != token.content:
            written = f"{shorten(token.content)!r} has the id {token.id} of {shorten(tokens[token.id])!r}"
            raise ConfigError(f"{settings.path}: an added token does not fit its vocabulary: {written}")
    return [added[token_id] for token_id in sorted(added)]
