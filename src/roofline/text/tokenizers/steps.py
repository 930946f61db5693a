"""What a tokenizer file may make the library do: each step of its pipeline by name, and the types of what it says.

The library trusts its files: some values panic in it, some make it search or write without end. So each step is checked
here first, and one that is not in these tables is refused.
"""

import base64
import binascii
from collections.abc import Mapping
from types import MappingProxyType

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.text.tokenizers.charsmap import CharacterMap
from roofline.text.tokenizers.patterns import PatternError, least_length

MAX_STEPS = 256
MAX_DEPTH = 8
MAX_GROWTH = 512  # characters of normalized text for one of a text's own; two maps of compatible forms make 324

_CHARACTER, _PATTERN = "a single character", "a pattern"
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_SCHEMES = ("first", "never", "always")
# Step -> its keys with what they hold; a name that begins with ? may be absent or null.
Step = Mapping[str, type | str | tuple[str, ...]]
_NOTHING: Step = MappingProxyType({})
_BYTE_LEVEL: Step = {"add_prefix_space": bool, "trim_offsets": bool, "?use_regex": bool}
_METASPACE: Step = {
    "replacement": _CHARACTER,
    "?prepend_scheme": _SCHEMES,
    "?split": bool,
    "?add_prefix_space": bool,
}
_REPLACE: Step = {"pattern": _PATTERN, "content": str}
STEPS: dict[str, dict[str, Step]] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel"), _NOTHING),
        "Strip": {"strip_left": bool, "strip_right": bool},
        "Replace": _REPLACE,
        "Prepend": {"prepend": str},
        "Precompiled": {"precompiled_charsmap": str},
        "BertNormalizer": {
            "clean_text": bool,
            "handle_chinese_chars": bool,
            "?strip_accents": bool,
            "lowercase": bool,
        },
    },
    "pre_tokenizer": {
        **dict.fromkeys(("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts"), _NOTHING),
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Split": {"pattern": _PATTERN, "behavior": _BEHAVIORS, "invert": bool},
        "CharDelimiterSplit": {"delimiter": _CHARACTER},
        "Punctuation": {"?behavior": _BEHAVIORS},
        "Digits": {"individual_digits": bool},
    },
    "decoder": {
        **dict.fromkeys(("ByteFallback", "Fuse"), _NOTHING),
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Replace": _REPLACE,
        "Strip": {"content": _CHARACTER, "start": int, "stop": int},
        "WordPiece": {"prefix": str, "cleanup": bool},
    },
    "post_processor": {
        "ByteLevel": _BYTE_LEVEL,
        "TemplateProcessing": {"single": list, "special_tokens": dict},
        "BertProcessing": {"sep": list, "cls": list},
        "RobertaProcessing": {"sep": list, "cls": list, "?trim_offsets": bool, "?add_prefix_space": bool},
    },
}
_INSIDE = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
# How many characters a step may make of one, whatever the text is; Unicode's own decompositions have up to 18.
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}
_GROWTH = {"BertNormalizer": 3, "ByteLevel": 4}
_NULLABLE = {"strip_accents", "add_prefix_space"}


def checked_steps(fields: Fields, part: str) -> list[Fields]:
    """The steps of a part of the pipeline ("normalizer", "pre_tokenizer", "decoder", "post_processor"), in order.

    Raises ConfigError for a value of a wrong type or one that the library must not see, naming file and key;
    UnsupportedError for a step that is not known here.
    """
    steps: list[Fields] = []
    _flatten(fields, part, part, steps, MAX_DEPTH)
    for step in steps:
        _check(part, step)
    if part == "normalizer":
        _check_growth(fields, steps)
    return steps


def _flatten(fields: Fields, key: str, part: str, steps: list[Fields], depth: int) -> None:
    if fields.get(key, dict) is None:
        return
    _flatten_step(fields.inside(key), part, steps, depth)
    if len(steps) > MAX_STEPS:
        fields.refuse(key, f"has more than {MAX_STEPS} steps")


def _flatten_step(step: Fields, part: str, steps: list[Fields], depth: int) -> None:
    kind, inside = step.need("type", str), _INSIDE[part]
    if kind != "Sequence":
        steps.append(step)
        return
    step.need(inside, list)
    if depth == 0:
        step.refuse(inside, f"sequences are nested deeper than {MAX_DEPTH}")
    for inner in step.objects(inside):
        _flatten_step(inner, part, steps, depth - 1)


def _check(part: str, step: Fields) -> None:
    known, kind = STEPS[part], step.need("type", str)
    if kind not in known:
        what = f"{step.path}: {step.within}type = {shorten(kind)!r}"
        raise UnsupportedError(what, f"no such {part} is built here", ("Sequence", *known))
    for name, holds in known[kind].items():
        key = name.removeprefix("?")
        if key != name and (key not in step.values or (key in _NULLABLE and step.values[key] is None)):
            continue
        if holds == _PATTERN:
            _least_length(step, key)
            continue
        if isinstance(holds, type):
            value: object = step.need(key, holds)
            if holds is int and isinstance(value, int) and not 0 <= value < 1 << 31:
                step.refuse(key, f"is {describe(value)}, not a count")
            continue
        text = step.need(key, str)
        if isinstance(holds, tuple) and text not in holds:
            step.refuse(key, f"is {describe(text)}, not one of {', '.join(holds)}")
        if holds == _CHARACTER and len(text) != 1:
            step.refuse(key, f"is {describe(text)}, not {_CHARACTER}")
    if kind == "Precompiled":
        _longest_replacement(step)


def _least_length(step: Fields, key: str) -> int:
    """The least number of characters that a pattern matches; it is an object with one of two keys."""
    pattern = step.inside(key)
    literal, regex = pattern.get("String", str), pattern.get("Regex", str)
    if (literal is None) == (regex is None):
        step.refuse(key, "is not an object with either String or Regex")
    if literal is not None:
        if not literal:
            pattern.refuse("String", "is empty, and matches everywhere")
        return len(literal)
    assert regex is not None, "one of the two is there"
    try:
        return least_length(regex)
    except PatternError as error:
        pattern.refuse("Regex", f"the pattern {shorten(regex)!r} is not searched with, because {error}")


def _check_growth(fields: Fields, steps: list[Fields]) -> None:
    """Steps that write more than they read must not do so one after the other without bounds."""
    growth, unicode = 1.0, 1
    for step in steps:
        kind = step.need("type", str)
        unicode = max(unicode, _UNICODE.get(kind, 1))
        growth *= _GROWTH.get(kind, 1)
        if kind == "Replace":
            content, least = len(step.need("content", str)), _least_length(step, "pattern")
            growth *= max(1.0, content / least if least else content + 1.0)
        elif kind == "Prepend":
            growth *= 1 + len(step.need("prepend", str))  # of a text of one character
        elif kind == "Precompiled":
            growth *= _longest_replacement(step)
        if kind in ("Replace", "Precompiled"):  # what they wrote may be decomposed once more
            growth, unicode = growth * unicode, 1
        if growth * unicode > MAX_GROWTH:
            what = f"makes up to {growth * unicode:,.0f} characters of one, of {MAX_GROWTH} that are allowed"
            step.refuse("type", f"{kind} {what}")


def _longest_replacement(step: Fields) -> int:
    """Characters of the longest text that a compiled map of SentencePiece writes for one."""
    try:
        return CharacterMap(base64.b64decode(step.need("precompiled_charsmap", str), validate=True)).longest_text
    except (ValueError, binascii.Error) as error:
        step.refuse("precompiled_charsmap", f"is not a compiled map of characters: {error}")
