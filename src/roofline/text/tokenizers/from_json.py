"""Builds a tokenizer from a tokenizer.json, as Hugging Face writes it."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.text.tokenizers.tokenizer import SPACE, Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, JsonObject, Vocabulary, end_ids

_BPE_OPTIONS = (
    *("unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


def from_json(source: str | Path | bytes, config: JsonObject) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Args:
        source: the file, or its bytes.
        config: the keys of tokenizer_config.json and generation_config.json in one mapping, of which are read:
            bos_token, eos_token, add_bos_token, add_eos_token, and eos_token_id (one or several).
    Raises:
        ConfigError: the file cannot be read, or its parts do not fit together.
        UnsupportedError: a model or decoder that is neither byte-level nor SentencePiece's.
    """
    name = "tokenizer.json" if isinstance(source, bytes) else str(source)
    try:
        data = json.loads(source if isinstance(source, bytes) else Path(source).read_bytes())
        model = data["model"]
        added = [_added(entry) for entry in data["added_tokens"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read as a tokenizer: {type(error).__name__}: {error}") from error
    byte_level, strip_space = _spelling(name, data)
    ids = _ids(model, added)
    bos = ids.get(_content(config.get("bos_token")))
    eos = ids.get(_content(config.get("eos_token")))
    prefix, suffix = _around(data.get("post_processor"))
    prefix = _switch(prefix, config.get("add_bos_token"), bos)
    suffix = _switch(suffix, config.get("add_eos_token"), eos)
    if bos is None and prefix:
        bos = prefix[0]
    eos_ids = config.get("eos_token_id")
    listed = list(eos_ids) if isinstance(eos_ids, (list, tuple)) else [eos_ids]
    return Tokenizer(
        Vocabulary(
            **_model_parts(name, model),
            pipeline={key: data.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")},
            added=added,
            byte_level=byte_level,
            strip_space=strip_space,
            bos_id=bos,
            eos_ids=end_ids((eos, *listed), added),
            prefix=prefix,
            suffix=suffix,
        )
    )


def _added(entry: JsonObject) -> AddedToken:
    return AddedToken(**{field.name: entry[field.name] for field in fields(AddedToken)})


def _model_parts(name: str, model: JsonObject) -> JsonObject:
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    try:
        if kind == "BPE":
            tokens = [""] * (max(model["vocab"].values(), default=-1) + 1)
            for token, token_id in model["vocab"].items():
                tokens[token_id] = token
            pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
            options = {key: model[key] for key in _BPE_OPTIONS if model.get(key) not in (None, "")}
            lefts, rights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            return {"model": kind, "tokens": tokens, "lefts": lefts, "rights": rights, "options": options}
        if kind == "Unigram":
            options = {"unk_id": model.get("unk_id"), "byte_fallback": model.get("byte_fallback", False)}
            tokens, scores = [entry[0] for entry in model["vocab"]], [entry[1] for entry in model["vocab"]]
            return {"model": kind, "tokens": tokens, "scores": scores, "options": options}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: malformed vocab or merges: {type(error).__name__}: {error}") from error
    raise UnsupportedError(f"{name}: model type {kind!r}", "it is not built here", ("BPE", "Unigram"))


def _spelling(name: str, data: JsonObject) -> tuple[bool, bool]:
    """Whether tokens are spelt in bytes, and whether decoding drops a first space."""
    steps = list(_flatten(data.get("decoder"), "decoders"))
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return True, False
    supported = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    spaces = [s for s in steps if s["type"] == "Metaspace" or (s["type"] == "Replace" and s.get("content") == " ")]
    if not kinds <= supported or not spaces:
        what = f"{name}: decoder {sorted(map(str, kinds))}"
        raise UnsupportedError(what, "its byte spelling is unknown", ("ByteLevel", *sorted(supported)))
    strip = any(s["type"] == "Strip" and s.get("start", 0) > 0 for s in steps)
    metaspace = any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
    if any(s.get("replacement", SPACE) != SPACE for s in spaces):
        raise UnsupportedError(f"{name}: a Metaspace with another sign than {SPACE}", "it is not built here")
    return False, strip or metaspace


def _flatten(part: JsonObject | None, key: str) -> list[JsonObject]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for inner in part[key] for step in _flatten(inner, key)]
    return [part]


def _ids(model: JsonObject, added: list[AddedToken]) -> dict[str | None, int]:
    vocab = model.get("vocab", {})
    ids: dict[str | None, int] = dict(vocab) if isinstance(vocab, dict) else {e[0]: i for i, e in enumerate(vocab)}
    ids.update((token.content, token.id) for token in added)
    return ids


def _content(token: JsonObject | str | None) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _around(processor: JsonObject | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids a post-processor's template puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in _flatten(processor, "processors"):
        if step.get("type") != "TemplateProcessing":
            continue
        side = before
        for piece in step["single"]:
            if "Sequence" in piece:
                side = after
            else:
                side += step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(before), tuple(after)


def _switch(ids: tuple[int, ...], enabled: bool | None, token_id: int | None) -> tuple[int, ...]:
    if enabled is None or token_id is None:
        return ids
    if enabled:
        return ids or (token_id,)
    return tuple(i for i in ids if i != token_id)
