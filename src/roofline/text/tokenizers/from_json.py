"""Builds a tokenizer from a tokenizer.json, as Hugging Face writes it."""

from collections.abc import Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, has_type
from roofline.common.json_files import parse_object, read_json_file
from roofline.text.tokenizers.folder_settings import check_settings, content_of, ids_of, with_special_tokens
from roofline.text.tokenizers.steps import checked_steps
from roofline.text.tokenizers.tokenizer import SPACE, Tokenizer
from roofline.text.tokenizers.vocabulary import (
    MAX_ID,
    MODEL_KINDS,
    JsonObject,
    Vocabulary,
    added_token,
    checked_id,
    end_ids,
)

_FLAGS = ("fuse_unk", "byte_fallback", "ignore_merges")
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_ROOM = 1 << 16  # ids without a token that a small vocabulary may have
MAX_WORD = 256  # characters of a word that WordPiece takes apart, in time with their square; models have 100
_SPARSE = 16  # times as many ids as tokens that a large one may have


def from_json(source: str | Path | bytes, config: JsonObject, defaults: Mapping[str, str] | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Args:
        source: the file, or its bytes.
        config: the keys of the files beside it in one mapping, as `read_settings` makes it, of which are read:
            eos_token_id (one or several), the special tokens and added_tokens_decoder.
        defaults: special tokens of the tokenizer's class, which count where the vocabulary has them.
    Raises:
        ConfigError: the file cannot be read, its parts do not fit together, or the library could not work with it
            within bounds of time and memory; the message names file and key.
        UnsupportedError: a model, a step or a decoder that is not built here.
    """
    name = "tokenizer.json" if isinstance(source, bytes) else str(source)
    data = parse_object(name, source) if isinstance(source, bytes) else read_json_file(Path(source))
    file, settings = Fields(name, data), Fields("tokenizer_config.json", config)
    check_settings(settings)
    model = Fields(name, file.need("model", dict), "model.")
    parts = _model_parts(model)
    file.need("added_tokens", list)
    room = _room(len(parts["tokens"]))
    added = [added_token(entry, room) for entry in file.objects("added_tokens")]
    for part in ("normalizer", "pre_tokenizer"):
        checked_steps(file, part)
    spelling = _spelling(file, words=parts["model"] in ("WordPiece", "WordLevel"))
    ids = {token: i for i, token in enumerate(parts["tokens"]) if token}
    ids.update((token.content, token.id) for token in added)
    defaults = defaults or {}
    settings = Fields(settings.path, {**{key: text for key, text in defaults.items() if text in ids}, **config})
    added = with_special_tokens(settings, added, parts["tokens"])
    ids.update((token.content, token.id) for token in added)
    bos, eos = ids.get(content_of(settings, "bos_token")), ids.get(content_of(settings, "eos_token"))
    prefix, suffix = _around(file)
    if bos is None and prefix:
        bos = prefix[0]
    vocabulary = Vocabulary(
        **parts,
        pipeline={key: data.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")},
        added=added,
        **spelling,
        bos_id=bos,
        eos_ids=end_ids((eos, *ids_of(settings, "eos_token_id")), added),
        prefix=prefix,
        suffix=suffix,
    )
    return Tokenizer.of_file(name, vocabulary)


def _model_parts(model: Fields) -> JsonObject:
    kind = model.get("type", str) or ("BPE" if "merges" in model.values else model.need("type", str))
    if kind == "BPE":
        options: dict[str, object] = {key: True for key in _FLAGS if model.get(key, bool)}
        if model.get("unk_token", str):
            options["unk_token"] = model.need("unk_token", str)
        for key in _AFFIXES:
            if model.get(key, str):
                what = f"{model.path}: {model.within}{key} = {model.values[key]!r}"
                raise UnsupportedError(what, "how its tokens are spelt is not built here", ('""', "null"))
        pairs = _pairs(model)
        lefts, rights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return {"model": kind, "tokens": tokens_of(model), "lefts": lefts, "rights": rights, "options": options}
    if kind == "Unigram":
        tokens, scores = _scored(model)
        unknown = model.get("unk_id", int)
        if unknown is not None:
            checked_id(model, "unk_id", unknown, len(tokens))
        options = {"unk_id": unknown, "byte_fallback": model.get("byte_fallback", bool, False)}
        return {"model": kind, "tokens": tokens, "scores": scores, "options": options}
    if kind in ("WordPiece", "WordLevel"):
        options = {"unk_token": model.need("unk_token", str)}
        if kind == "WordPiece":
            longest = model.get("max_input_chars_per_word", int, 100)
            if not 0 < longest <= MAX_WORD:
                model.refuse("max_input_chars_per_word", f"is {describe(longest)}, not a number from 1 to {MAX_WORD}")
            options["max_input_chars_per_word"] = longest
            options["continuing_subword_prefix"] = model.get("continuing_subword_prefix", str, "##")
        return {"model": kind, "tokens": tokens_of(model), "options": options}
    what = f"{model.path}: model type {describe(model.values.get('type'))}"
    raise UnsupportedError(what, "it is not built here", MODEL_KINDS)


def _room(count: int) -> int:
    """How many ids a vocabulary of `count` tokens may have."""
    return min(MAX_ID, _ROOM + _SPARSE * count)


def tokens_of(model: Fields) -> list[str]:
    """The tokens of BPE by their ids. An id far beyond their number would ask for memory without bounds."""
    vocab = model.need("vocab", dict)
    inside, room = model.inside("vocab"), _room(len(vocab))
    if set(map(type, vocab.values())) - {int} or (vocab and not 0 <= min(vocab.values()) <= max(vocab.values()) < room):
        for token, token_id in vocab.items():
            checked_id(inside, token, inside.checked(token, token_id, int), room)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    return tokens


def _pairs(model: Fields) -> list[list[str]]:
    """The merges, each written as two tokens with a space between or as a list of two."""
    merges = model.need("merges", list)
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
    for i, pair in enumerate(pairs):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str:
            model.refuse(f"merges[{i}]", f"is {describe(merges[i])}, not two tokens")
    return pairs


def _scored(model: Fields) -> tuple[list[str], list[float]]:
    """The tokens of Unigram and their scores, written as pairs."""
    entries = model.elements("vocab", list)
    if entries is None:
        model.need("vocab", list)
    for i, entry in enumerate(entries or ()):
        if len(entry) != 2 or not isinstance(entry[0], str) or not has_type(entry[1], float):
            model.refuse(f"vocab[{i}]", "is not a list of a token and its score")
    return [entry[0] for entry in entries or ()], [float(entry[1]) for entry in entries or ()]


def _spelling(file: Fields, *, words: bool) -> JsonObject:
    """How tokens are spelt, in fields of the vocabulary. words: as the model has it, where the decoder does not say."""
    steps = [step.values for step in checked_steps(file, "decoder")]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return {"byte_level": True, "strip_space": False}
    if len(steps) == 1 and kinds == {"WordPiece"}:
        joins = steps[0]["cleanup"]
        return {"byte_level": False, "strip_space": True, "continues": steps[0]["prefix"], "joins_signs": joins}
    if words and not steps:  # the library puts a space between all tokens
        return {"byte_level": False, "strip_space": True, "continues": ""}
    spaces = [s for s in steps if s["type"] == "Metaspace" or (s["type"] == "Replace" and s.get("content") == " ")]
    if kinds & {"ByteLevel", "WordPiece"} or not spaces:
        what = f"{file.path}: decoder {sorted(map(str, kinds))}"
        kinds_built = ("ByteLevel", "Metaspace", "Replace", "WordPiece")
        raise UnsupportedError(what, "its byte spelling is unknown", kinds_built)
    strip = any(s["type"] == "Strip" and s["start"] for s in steps)
    metaspace = any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
    if any(s.get("replacement", SPACE) != SPACE for s in spaces):
        raise UnsupportedError(f"{file.path}: a Metaspace with another sign than {SPACE}", "it is not built here")
    return {"byte_level": False, "strip_space": strip or metaspace}


def _around(file: Fields) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids a post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in checked_steps(file, "post_processor"):
        kind = step.need("type", str)
        if kind == "TemplateProcessing":
            first, last = _template(step)
            before, after = [*before, *first], [*after, *last]
        elif kind in ("BertProcessing", "RobertaProcessing"):  # each around what those before it put there
            before, after = [_token_of(step, "cls"), *before], [*after, _token_of(step, "sep")]
    return tuple(before), tuple(after)


def _token_of(step: Fields, key: str) -> int:
    """The id of a token that is written as a list of its text and its id."""
    pair = step.need(key, list)
    if len(pair) != 2 or not isinstance(pair[0], str) or not has_type(pair[1], int):
        step.refuse(key, "is not a list of a token and its id")
    return checked_id(step, key, pair[1], MAX_ID)


def _template(step: Fields) -> tuple[list[int], list[int]]:
    before: list[int] = []
    after: list[int] = []
    texts, tokens = 0, step.inside("special_tokens")
    for piece in step.objects("single"):
        if "Sequence" in piece.values:
            piece.need("Sequence", dict)
            texts += 1
            continue
        name = piece.inside("SpecialToken").need("id", str)
        token = Fields(tokens.path, tokens.need(name, dict), f"{tokens.within}{name}.")
        token.need("ids", list)
        ids = [checked_id(token, "ids", i, MAX_ID) for i in token.elements("ids", int) or ()]
        (after if texts else before).extend(ids)
    if texts != 1:
        step.refuse("single", f"has {texts} places for the text, not 1")
    return before, after
