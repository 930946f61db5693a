"""What the files beside a tokenizer.json say of its special tokens and ends, put together as transformers does.

tokenizer_config.json goes before everything else, but where it has no ``added_tokens_decoder`` (older folders),
special_tokens_map.json overrides it and added_tokens.json is read. What no file says is in the code of the class that
tokenizer_config.json or config.json name, or that transformers has for the family.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from roofline.common.fields import Fields, has_type
from roofline.common.json_files import read_json_file
from roofline.text.tokenizers.vocabulary import MAX_ID, AddedToken, JsonObject, checked_id

DECODER = "added_tokens_decoder"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SWITCHES = ("add_bos_token", "add_eos_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word")

_BART = {
    **{"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"},
    **{"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
}
_BERT = {
    **{"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"},
    "mask_token": "[MASK]",
}
_END_OF_TEXT = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# The special tokens that a class has where no file names one, by the class's name without Fast (transformers 5.24).
_DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": {
        **_LLAMA,
        **{"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>"},
        **{"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"},
    },
    "GemmaTokenizer": {
        **{"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "CohereTokenizer": {
        **{"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        **{"pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"},
    },
    "Qwen2Tokenizer": {**_END_OF_TEXT, "pad_token": "<|endoftext|>"},
    "GPT2Tokenizer": {**_END_OF_TEXT, "bos_token": "<|endoftext|>"},
    "GPTNeoXTokenizer": {**_END_OF_TEXT, "bos_token": "<|endoftext|>", "pad_token": "<|padding|>"},
    "RobertaTokenizer": _BART,
    "XLMRobertaTokenizer": _BART,
    "BartTokenizer": _BART,
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "BertTokenizer": _BERT,
    "MPNetTokenizer": {**_BART, "unk_token": "[UNK]"},
}
_GENERIC = "TokenizersBackend"
# The class that transformers has for a family (config.json's model_type); others have none of their own, as Llama.
_CLASS_OF_FAMILY = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gpt2", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("glm4", "granite", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "mistral3", "llava"), _GENERIC),
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}


def read_settings(files: Mapping[str, Path]) -> JsonObject:
    """The keys of the files in one mapping, as `from_json` and `from_older` take it.

    ``eos_token_id`` is generation_config.json's, or config.json's in a folder without one, where a model that reads
    more than text may have it in its text part; ``added_tokens`` is what added_tokens.json has, text -> id, where it
    counts.

    Raises ConfigError naming file and key where a value has a wrong type.
    """
    config = _read(files, "config.json")
    if "generation_config.json" in files:
        generation = _read(files, "generation_config.json")
        check_settings(generation)
        settings = dict(generation.values)
    else:
        ends = _ends_of(config)
        settings = {"eos_token_id": ends.values.get("eos_token_id")}
    tokenizer_config = _read(files, "tokenizer_config.json")
    check_settings(tokenizer_config)
    settings |= tokenizer_config.values
    if DECODER not in tokenizer_config.values:
        special = _read(files, "special_tokens_map.json")
        check_settings(special)
        settings |= special.values
        if "tokenizer.json" in files:
            older = _read(files, "added_tokens.json")
            settings["added_tokens"] = {
                content: checked_id(older, content, older.need(content, int), MAX_ID) for content in older.values
            }
    if settings.get("tokenizer_class") is None:
        family = _CLASS_OF_FAMILY.get(config.get("model_type", str, ""))
        settings["tokenizer_class"] = config.get("tokenizer_class", str) or family
    return settings


def _ends_of(config: Fields) -> Fields:
    """The fields of a config.json, or of its text part, that have the ids which end an answer."""
    has_none = config.values.get("eos_token_id") is None
    ends = config.inside("text_config") if has_none else config
    ids_of(ends, "eos_token_id")
    return ends


def default_tokens(files: Mapping[str, Path], settings: JsonObject) -> Mapping[str, str]:
    """The special tokens of the class of which transformers makes an object for a tokenizer.json: key -> text.

    Empty for the class that has none of its own. settings: as `read_settings` has them.
    """
    name = Fields("tokenizer_config.json", settings).get("tokenizer_class", str, "").removesuffix("Fast")
    if _CLASS_OF_FAMILY.get(_read(files, "config.json").get("model_type", str, "")) == _GENERIC:
        return {}
    if name == "LlamaTokenizer" and b'"ByteLevel"' in files["tokenizer.json"].read_bytes():
        return {}
    return _DEFAULTS.get(name, {})


def check_settings(settings: Fields) -> None:
    """Raise ConfigError where what is read of a file of settings has a wrong type."""
    for key in NAMED:
        content_of(settings, key)
    for key in _SWITCHES:
        settings.get(key, bool)
    ids_of(settings, "eos_token_id")


def content_of(settings: Fields, key: str) -> str:
    """The text of a token that is written as it is or as an object; "" where there is none."""
    if isinstance(settings.values.get(key), Mapping):
        return settings.inside(key).need("content", str)
    return settings.get(key, str, "")


def ids_of(settings: Fields, key: str) -> list[int]:
    """One id or several."""
    ids = settings.elements(key, int) if has_type(settings.values.get(key), list) else [settings.get(key, int)]
    return [checked_id(settings, key, i, MAX_ID) for i in ids or () if i is not None]


def with_special_tokens(settings: Fields, added: Sequence[AddedToken], tokens: Sequence[str]) -> list[AddedToken]:
    """The added tokens of a tokenizer.json with those of its settings, in the order of their ids.

    Those of ``added_tokens_decoder`` take the place of tokens of the same text. Tokens that have a name
    (``eos_token``, ``image_token``) or are listed as special are special ones, and are added where the file has none of
    that text. A token that the vocabulary does not have gets the next id, whatever the settings have for it.

    tokens: the model's own, by id.
    """
    by_content = {token.content: token for token in added}
    specials: dict[str, AddedToken] = {}
    for token in _named_tokens(settings):
        specials.setdefault(token.content, token)
    entries = list(_decoder_tokens(settings))
    entries += [token for token in _older_tokens(settings, specials) if token.content not in by_content]
    contents = {*by_content, *(token.content for token in entries)}
    entries += [token for token in specials.values() if token.content not in contents]
    special = {*specials, *(token.content for token in added if token.special)}
    ids = {token: i for i, token in enumerate(tokens) if token}
    following = max(len(tokens), 1 + max((token.id for token in added), default=-1))
    for token in entries:
        place = by_content[token.content].id if token.content in by_content else ids.get(token.content)
        if place is None:
            place, following = following, following + 1
        by_content[token.content] = replace(token, id=place)
    tokens_in_order = (replace(t, special=True) if t.content in special else t for t in by_content.values())
    return sorted(tokens_in_order, key=lambda token: token.id)


def _read(files: Mapping[str, Path], name: str) -> Fields:
    path = files.get(name)
    return Fields(path or name, {} if path is None else read_json_file(path))


def _decoder_tokens(settings: Fields) -> list[AddedToken]:
    """Those of ``added_tokens_decoder``, in the order of the ids that it has for them."""
    decoder = settings.inside(DECODER)
    for key in decoder.values:
        if not key.isdecimal() or len(key) > 8:
            decoder.refuse(key, "is not the id of a token")
    ids = {key: checked_id(decoder, key, int(key), MAX_ID) for key in decoder.values}
    return [_described(decoder.inside(key), ids[key]) for key in sorted(ids, key=ids.__getitem__)]


def _older_tokens(settings: Fields, specials: Mapping[str, AddedToken]) -> list[AddedToken]:
    """Those of added_tokens.json; those of `specials` are special."""
    ids = settings.inside("added_tokens").values
    tokens = [AddedToken(cast(int, ids[text]), text, text in specials, normalized=text not in specials) for text in ids]
    return sorted((token for token in tokens if token.content), key=lambda token: token.id)


def _named_tokens(settings: Fields) -> Iterator[AddedToken]:
    """The special tokens that settings have a name for, or list; their ids say nothing."""
    places = [(settings, key) for key in settings.values if key.endswith("_token") and key not in _SWITCHES]
    for key in _LISTS:
        if has_type(settings.values.get(key), dict):
            inside = settings.inside(key)
        else:
            entries = settings.get(key, list, [])
            inside = Fields(settings.path, {f"{key}[{i}]": entry for i, entry in enumerate(entries)}, settings.within)
        places += [(inside, name) for name in inside.values]
    for fields, key in places:
        value = fields.values[key]
        if isinstance(value, Mapping):
            yield replace(_described(fields.inside(key), 0), special=True)
        elif isinstance(value, str) and value:
            yield AddedToken(0, fields.checked(key, value, str), special=True)


def _described(entry: Fields, token_id: int) -> AddedToken:
    """The token that an object of settings describes."""
    special = entry.get("special", bool, False)
    flags = {name: entry.get(name, bool, False) for name in _FLAGS}
    content = entry.need("content", str)
    if not content:
        entry.refuse("content", "is empty: a token has a text")
    return AddedToken(token_id, content, special, normalized=entry.get("normalized", bool, not special), **flags)
