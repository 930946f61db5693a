"""Pre-tokenizers of byte-level BPE by the names GGUF files give them (``tokenizer.ggml.pre``).

The patterns are those that the models were trained with, as their own tokenizer.json files have them, written so that
a search takes time linear in the text. Each splits the pieces of the one before; its matches become pieces of their
own. Where llama.cpp splits otherwise is listed in docs/reference/tokenizers.md.
"""

import re
from collections.abc import Iterator

from roofline.common.errors import UnsupportedError
from roofline.text.tokenizers.vocabulary import JsonObject

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}{_SIGNS}{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{_SIGNS}{_SPACES}"
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_JAIS2_SPACES = r"|\s*[\r\n]+" + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}{_SIGNS}{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
# Words with single spaces between them are one piece, up to a digit or a sign.
_EXAONE_MOE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}(?:[\p{{L}}\p{{M}}]| (?=\p{{L}}))*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _cased(digits: str, *, endings: str = "", letters: str = "", slash: str = "/") -> str:
    """Words that begin anew where an upper case letter follows a lower case one.

    digits: the pattern of numbers; endings: what may follow a word; letters: what narrows the classes of letters down;
    slash: what a run of signs may end with, beside line ends.
    """
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]",
    )
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*{_SPACES}"


_TEKKEN = _cased(r"\p{N}")
_GPT4O = _cased(r"\p{N}{1,3}", endings=f"{_ENDINGS}?")
_KIMI = r"\p{Han}+|" + _cased(r"\p{N}{1,3}", endings=f"{_ENDINGS}?", letters=r"&&[^\p{Han}]", slash="")
_YOUTU_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_ASCII_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = rf"{_ASCII_SIGN_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}"
_SPARK = rf"{_ASCII_SIGN_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_HAN = "[一-龥ࠀ-一가-퟿]+"
_HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_AFMOE_POINTS = """
4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F
AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF
"""
# Numbers in groups of three from their right: what is left over of a run stands first. A search for the run's end at
# each digit, as the models' own patterns have it, would take time with the square of its length.
_RIGHT_THREES = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})++\z)", r"\p{N}{3}")
_DIGIT_THREES = (r"\p{N}+", r"\A\d{1,2}(?=(?:\d{3})++\z)", r"\d{3}")
_WORD_END_THREES = (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})++\z)")  # the pattern after it makes the groups
# Letters that have an upper and a lower case, as DeepSeek LLM lists them, by code point: some look like plain letters
_CASED_POINTS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""


def _inside(ranges: str) -> str:
    """What stands inside the brackets of a class, of ranges of code points in hexadecimal."""
    return "".join("-".join(chr(int(point, 16)) for point in points.split("-")) for points in ranges.split())


_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_SHAPES: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT2,): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "a.x-4.0", "exaone4", "mellum"),
        *("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "gigachat", "roberta-bpe"),
        "modern-bert",
    ),
    (r"\p{N}", _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    (_LLAMA3,): (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"),
    ),
    (_JAIS2,): ("jais-2",),
    (_QWEN2,): (
        *("qwen2", "stablelm2", "hunyuan", "deepseek-r1-qwen", "megrez", "kormo", "grok-2", "f2llmv2", "solar-open"),
    ),
    (_QWEN35,): ("qwen35",),
    (r"[^\n]+|\n+", _QWEN2): ("laguna",),
    (rf"{_WORD}|\p{{N}}{_SIGNS}{_SPACES}",): ("ufakzeka",),
    (r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORD}|\p{{N}}+{_SIGNS}{_SPACES}"): ("minicpm5",),
    (_BAILING,): ("bailingmoe", "bailingmoe2", "llada-moe"),
    (_SEED_CODER,): ("seed-coder",),
    (_EXAONE_MOE,): ("exaone-moe",),
    (_TEKKEN,): ("tekken",),
    (_GPT4O,): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"),
    (*_WORD_END_THREES, _GPT4O): ("tiny_aya", "cohere2moe"),
    (_KIMI,): ("kimi-k2",),
    (_YOUTU_ASIAN, _cased(r"\p{N}", endings=f"{_ENDINGS}?")): ("youtu",),
    (r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK_V3): ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
    (r"\p{N}{1,3}", _HAN_KANA, _SPARK, r"\p{N}"): ("spark2_5",),
    (*_RIGHT_THREES, f"[{_inside(_AFMOE_POINTS)}]+", _DEEPSEEK_V3): ("afmoe",),
    _DIGIT_THREES: ("superbpe",),
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"): ("deepseek-coder",),
    (
        r"[\r\n]",
        rf"\s?[{_inside(_CASED_POINTS)}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ): ("deepseek-llm",),
    (
        r"<sentinel:[0-9]+>",
        r"IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ): ("chameleon",),
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"): ("falcon",),
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): ("default",),
    (_BLOOM,): ("bloom", "poro-chat", "gpt3-finnish"),
    (_BLOOM, r"\p{N}"): ("viking",),
}
PATTERNS = {name: patterns for patterns, names in _SHAPES.items() for name in names}

_LLAMA3_FAMILY = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
)
# A whole word of the vocabulary is taken as it is, reachable by merges or not.
IGNORE_MERGES = _LLAMA3_FAMILY | {"tekken", "youtu", "glm4", "glm5", "minicpm5", "granite-embed-multi-97m"}
# Their tokenizer.json normalises to NFC first.
NFC = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35", "megrez", "f2llmv2"})
# Families whose tokenizers add BOS, for files that do not say.
ADDS_BOS = _LLAMA3_FAMILY | {"tekken", "chameleon"}
# Spelt in SentencePiece's alphabet, with merges: spaces become visible ones and nothing splits a text.
VISIBLE_SPACES = frozenset({"gemma4", "sarvam-moe", "granite-embed-multi-311m"})
# The name that llama.cpp's own converter writes for a splitting rule that has several.
_PREFERRED = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def byte_level_pipeline(kind: str, *, prefix_space: bool = False) -> JsonObject:
    """Normalizer, pre-tokenizer and decoder of a kind, as tokenizer.json writes them.

    prefix_space: a text that begins with none gets a space.

    Raises UnsupportedError: an unknown kind; lists the known.
    """
    if kind not in PATTERNS:
        kinds = sorted({*PATTERNS, *VISIBLE_SPACES})
        raise UnsupportedError(f"tokenizer.ggml.pre = {kind!r}", "its splitting rule is not known", kinds)
    steps: list[JsonObject] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PATTERNS[kind]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True}
    last = PATTERNS[kind][-1] == _GPT2  # built into ByteLevel, where it runs several times faster
    steps = steps[:-1] if last else steps
    return {
        "normalizer": {"type": "NFC"} if kind in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, {**byte_level, "use_regex": last}]},
        "decoder": {**byte_level, "use_regex": True},
    }


def kind_of_pipeline(pipeline: JsonObject, ignore_merges: bool) -> str | None:
    """The name that GGUF files give to a pipeline of tokenizer.json, the inverse of `byte_level_pipeline`.

    None where none of the names here stands for it. A name that says nothing of merges or NFC stands for a pipeline
    without them.
    """
    patterns = tuple(pattern and _as_escapes(pattern) for pattern in _patterns(pipeline.get("pre_tokenizer")))
    normalizers = [step["type"] for step in _steps(pipeline.get("normalizer"), "normalizers")]
    if None in patterns or normalizers not in ([], ["NFC"]):
        return None
    for kind, known in PATTERNS.items():
        if (
            tuple(map(_as_escapes, known)) == patterns
            and (kind in NFC) == bool(normalizers)
            and (kind in IGNORE_MERGES) == ignore_merges
        ):
            return _PREFERRED.get(kind, kind)
    return None


def _as_escapes(pattern: str) -> str:
    """A pattern with line ends as escapes and quotes as themselves: files write either."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n").replace(r"\"", '"')


def _steps(step: JsonObject | None, inside: str) -> Iterator[JsonObject]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step[inside]:
        yield from _steps(inner, inside)


def _patterns(pre_tokenizer: JsonObject | None) -> Iterator[str | None]:
    """The pattern of each step that splits; None for a step that no name of GGUF files stands for."""
    for step in _steps(pre_tokenizer, "pretokenizers"):
        if step["type"] == "Digits":
            yield r"\p{N}" if step["individual_digits"] else r"\p{N}+"
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            pattern = step["pattern"]
            yield pattern.get("Regex", re.escape(pattern.get("String", "")))
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            if step.get("use_regex", True):
                yield _GPT2
        else:
            yield None
