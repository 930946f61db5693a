"""Pre-tokenizers of byte-level BPE by the names GGUF files give them (``tokenizer.ggml.pre``).

The patterns are those of the models' own tokenizer.json files. Each splits the pieces of the one before; its matches
become pieces of their own.
"""

from roofline.common.errors import UnsupportedError
from roofline.text.tokenizers.vocabulary import JsonObject

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _CASED_REST
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}" + _CASED_REST
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = "[一-龥ࠀ-一가-퟿]+"
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
_CASED = "".join("-".join(chr(int(point, 16)) for point in points.split("-")) for points in _CASED_POINTS.split())
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_SHAPES: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT2,): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        *("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "gigachat", "roberta-bpe"),
    ),
    (r"\p{N}", _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum"),
    (_LLAMA3,): (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    ),
    (_QWEN2,): ("qwen2", "stablelm2", "hunyuan", "deepseek-r1-qwen", "megrez", "kormo", "grok-2"),
    (_QWEN35,): ("qwen35",),
    (_TEKKEN,): ("tekken",),
    (_GPT4O,): ("gpt-4o", "llama4", "kanana2"),
    (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3): ("deepseek-v3", "hunyuan-dense"),
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"): ("deepseek-coder",),
    (
        r"[\r\n]",
        r"\s?[" + _CASED + "]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ): ("deepseek-llm",),
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"): ("falcon",),
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): ("default",),
    (_BLOOM,): ("bloom", "poro-chat", "gpt3-finnish"),
    (_BLOOM, r"\p{N}"): ("viking",),
}
PATTERNS = {name: patterns for patterns, names in _SHAPES.items() for name in names}

# Their tokenizer.json says ignore_merges: a whole word of the vocabulary is taken as it is, reachable by merges or not.
IGNORE_MERGES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})
# Their tokenizer.json normalises to NFC first.
NFC = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35", "megrez"})
# Families whose tokenizer.json adds BOS, for files that do not say.
ADDS_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})


def byte_level_pipeline(kind: str) -> JsonObject:
    """Normalizer, pre-tokenizer and decoder of a kind, as tokenizer.json writes them.

    Raises UnsupportedError: an unknown kind; lists the known.
    """
    if kind not in PATTERNS:
        raise UnsupportedError(f"tokenizer.ggml.pre = {kind!r}", "its splitting rule is not known", sorted(PATTERNS))
    steps: list[JsonObject] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PATTERNS[kind]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    last = PATTERNS[kind][-1] == _GPT2  # built into ByteLevel, where it runs several times faster
    steps = steps[:-1] if last else steps
    return {
        "normalizer": {"type": "NFC"} if kind in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, {**byte_level, "use_regex": last}]},
        "decoder": {**byte_level, "use_regex": True},
    }
