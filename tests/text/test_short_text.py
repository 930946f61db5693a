"""The quick encoder gives the library's ids, or none; a stored tokenizer builds nothing before it must."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.text.tokenizers import short_text
from roofline.text.tokenizers.binary_file import Texts
from roofline.text.tokenizers.pretokenizers import PATTERNS, byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet

ASCII = st.text(alphabet=st.sampled_from([chr(c) for c in range(32, 127)] + ["\n", "\r", "\t", " "] * 8), max_size=60)
WORDS = st.lists(
    st.sampled_from(
        ["I'll", "don't", "  ", "\n\n", "x=12345;", "The", " quick", "HTTPServer", "'S", "a\tb", "...", "?!"]
    ),
    max_size=12,
).map("".join)
MARKS = st.lists(
    st.one_of(ASCII, st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "<|", "|>", "é"])), max_size=6
)


def made(kind: str) -> Vocabulary:
    """A vocabulary whose merges are pairs of pairs of frequent letters."""
    letters = sorted(byte_alphabet())
    first = [a + b for a in "etaoinshr Ġ" for b in "etaoinshr" if a != " "]
    second = [a + b for a in first[:40] for b in first[5:20]]
    lefts = [m[0] for m in first] + [m[:2] for m in second]
    rights = [m[1] for m in first] + [m[2:] for m in second]
    tokens = list(dict.fromkeys([*letters, *first, *second]))
    return Vocabulary("BPE", tokens, lefts=lefts, rights=rights, pipeline=byte_level_pipeline(kind))


def stored(tokenizer: Tokenizer) -> Tokenizer:
    again = Tokenizer.from_bytes(tokenizer.to_bytes())
    assert again._short_text is not None
    again._short_text._budget = 1 << 60
    return again


@pytest.fixture(scope="module")
def fast(smollm2: Tokenizer) -> Tokenizer:
    return stored(smollm2)


@pytest.mark.parametrize("kind", sorted({PATTERNS[kind]: kind for kind in PATTERNS}.values()))
def test_every_known_splitting_rule(kind: str) -> None:
    whole = Tokenizer(made(kind))
    again = Tokenizer.from_bytes(whole.to_bytes())
    assert again.has_short_text_encoder is (again._short_text is not None)
    if again._short_text is None:
        pytest.skip("left to the library")
    again._short_text._budget = 1 << 60

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(ASCII, WORDS))
    def same(text: str) -> None:
        found = again._encode_short(text)
        assert found is None or found == whole.encode(text, add_special=False)

    same()
    assert again._encode_short("The rain on 12 stones isn't here.\n\n  (see it)") is not None


def test_a_letter_without_a_token_is_left_to_the_library() -> None:
    vocabulary = made("gpt-2")
    tokenizer = stored(Tokenizer(replace(vocabulary, tokens=["" if t == "z" else t for t in vocabulary.tokens])))
    assert tokenizer._encode_short("z") is None
    assert tokenizer._encode_short('!"') == [0, 1]


def test_the_common_rules_are_quick() -> None:
    for kind in ("gpt-2", "smollm", "qwen2"):
        assert short_text.tables(made(kind)) is not None, kind


@settings(max_examples=300, deadline=None)
@given(st.one_of(ASCII, WORDS))
def test_smollm2(smollm2: Tokenizer, fast: Tokenizer, text: str) -> None:
    found = fast._encode_short(text)
    assert found == smollm2.encode(text, add_special=False)


@settings(max_examples=300, deadline=None)
@given(MARKS, st.randoms())
def test_marked_texts(smollm2: Tokenizer, fast: Tokenizer, pieces: list[str], random: object) -> None:
    text = "".join(pieces)
    trusted = bytes(b for piece in pieces for b in [random.random() < 0.7] * len(piece))  # type: ignore[attr-defined]
    found = list(fast._special_pattern.finditer(text))
    quickly = fast._encode_short_marked(text, trusted, found)
    assert quickly is None or quickly == smollm2.encode_marked(text, trusted)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "<s>", "[INST]", " a", "\n"]), max_size=8))
def test_added_tokens_that_are_not_special(byte_bpe: Tokenizer, pieces: list[str]) -> None:
    text, tokenizer = "".join(pieces), stored(byte_bpe)
    mask = b"\1" * len(text)
    assert tokenizer.encode_marked(text, mask) == byte_bpe.encode_marked(text, mask)
    assert tokenizer.has_short_text_encoder is not any(token in text for token in ("<think>", "</think>"))
    assert stored(byte_bpe).encode(text, add_special=True) == byte_bpe.encode(text, add_special=True)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_merges_in_any_order(data: st.DataObject) -> None:
    tokens, merges = sorted(byte_alphabet()), []
    known = ["a", "b", "c", "Ġ"]
    for _ in range(data.draw(st.integers(0, 20))):
        left, right = (data.draw(st.sampled_from(known)) for _ in range(2))
        merges.append((left, right))
        known.append(left + right)
        tokens.append(left + right)
    tokens = list(dict.fromkeys(tokens))
    lefts, rights = [m[0] for m in merges], [m[1] for m in merges]
    tokenizer = Tokenizer(Vocabulary("BPE", tokens, lefts=lefts, rights=rights, pipeline=byte_level_pipeline("gpt-2")))
    again = stored(tokenizer)
    for text in data.draw(st.lists(st.text(alphabet="abc ", max_size=40), max_size=5)):
        assert again._encode_short(text) == tokenizer.encode(text, add_special=False)


def test_a_trusted_chat_is_quick(smollm2: Tokenizer, fast: Tokenizer) -> None:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert fast.encode_marked(text, b"\1" * len(text)) == smollm2.encode_marked(text, b"\1" * len(text))
    assert "_parsing" not in fast.__dict__


@pytest.mark.slow
def test_what_is_left_to_the_library(smollm2: Tokenizer) -> None:
    tokenizer = stored(smollm2)
    for text in ("é", "\x00", "a" * 2001):
        assert tokenizer._encode_short(text) is None
    assert tokenizer._encode_short("a" * 2000) is not None
    assert tokenizer.encode("é", add_special=False) == smollm2.encode("é", add_special=False)
    assert tokenizer._short_text is None  # its tables are there now
    tokenizer = stored(smollm2)
    assert tokenizer._short_text is not None
    tokenizer._short_text._budget = 5
    assert tokenizer._encode_short("abc") is not None
    assert tokenizer._encode_short("abc") is None
    added = [AddedToken(999, "<s>", special=True, lstrip=True)]
    base = made("gpt-2")
    for changed in (
        {"options": {"byte_fallback": True}},
        {"options": {"ignore_merges": True}},
        {"added": added},
        {"byte_level": False},
        {"pipeline": {**base.pipeline, "normalizer": {"type": "Lowercase"}}},
        {"pipeline": {**base.pipeline, "normalizer": {"type": "NFKC"}}, "added": [AddedToken(999, "ﬁ", special=False)]},
        {"pipeline": {**base.pipeline, "pre_tokenizer": {"type": "Whitespace"}}},
        {"pipeline": {**base.pipeline, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}},
    ):
        assert short_text.tables(Vocabulary(**{**base.__dict__, **changed})) is None, changed


def test_patterns_that_cannot_be_translated() -> None:
    odd = (
        "a++",
        "a?+",
        "a{1}+",
        "^a",
        "a$",
        r"\\$",
        "(?m:a.)",
        "(?i)a",
        "(?<=b)a",
        "a(?=b)",
        "a*",
        "[]a]",
        "a||b",
        "[[a]]",
    )
    for pattern in (r"\p{Han}+", r"\p{P}", "é+", r"[a&&b]", r"(?<x", r"\bx", *odd):
        assert short_text._ascii(pattern) is None, pattern
    for pattern in (r"[$^]|\$\^", r"(?:a|b)(?!c)", r"(?i:'S)+[a-z]"):
        assert short_text._ascii(pattern) == pattern
    assert short_text._ascii(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}") == r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}"


def test_the_library_is_not_even_imported(run_python: Callable[..., str], smollm2: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(smollm2.to_bytes())
    code = (
        "import sys; from roofline.text.tokenizers.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_bytes(open({str(path)!r}, 'rb').read())\n"
        "ids = t.encode('Hello there', add_special=False); assert t.decode(ids) == 'Hello there'\n"
        "print('tokenizers' in sys.modules, *ids)"
    )
    assert run_python(code).split() == ["False", *map(str, smollm2.encode("Hello there", add_special=False))]


@pytest.mark.parametrize(
    ("left", "right", "more", "quick"),
    [
        ("a", "b", ["ab"], True),
        ("a", "b", [], False),
        ("no", "b", ["nob"], False),
        ("a", "no", ["ano"], False),
    ],
)
def test_a_merge_is_of_three_tokens_or_the_library_encodes(left: str, right: str, more: list[str], quick: bool) -> None:
    tokens = [*sorted(byte_alphabet()), *more]
    vocabulary = Vocabulary("BPE", tokens, lefts=[left], rights=[right], pipeline=byte_level_pipeline("gpt-2"))
    assert (short_text.tables(vocabulary) is not None) is quick


def stored_with(quick: Callable[[list[Any]], list[Any]]) -> bytes:
    """A stored tokenizer whose header has something else for the encoder of short texts."""
    data = Tokenizer(made("gpt-2")).to_bytes()
    end = 11 + int.from_bytes(data[7:11], "little")
    header = json.loads(data[11:end])
    header["quick"] = quick(header["quick"])
    packed = json.dumps(header).encode()
    return data[:7] + len(packed).to_bytes(4, "little") + packed + data[end:]


@pytest.mark.parametrize(
    ("quick", "message"),
    [
        (lambda quick: [[["a"], *quick[0][1:]], quick[1]], r"quick\[0\]\[0\]: is a list"),
        (lambda quick: ["ab", quick[1]], r"quick\[0\]: is the string 'ab'"),
        (lambda quick: quick[:1], "quick: has 1 elements instead of 2"),
    ],
)
def test_patterns_of_a_stored_tokenizer_are_texts(quick: Callable[[list[Any]], list[Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_bytes(stored_with(quick))


def test_a_stored_token_that_is_no_text_is_refused() -> None:
    data = b"ab\n\xc4\n"
    starts = memoryview(struct.pack("<III", 0, 3, 5))
    texts = Texts("tokens", memoryview(data), "\n", 2, starts)
    assert texts[0] == "ab"
    with pytest.raises(ConfigError, match="entry 1 of tokens is no text"):
        texts[1]


@pytest.mark.parametrize("ids", [[-1] * 256, [-1] * 255, [-1] * 257, [-2, *[-1] * 255]])
def test_a_stored_tokenizer_has_an_id_or_none_for_each_byte(ids: list[int]) -> None:
    changed = stored_with(lambda quick: [quick[0], ids])
    if ids == [-1] * 256:
        assert Tokenizer.from_bytes(changed)._short_text is not None
        return
    with pytest.raises(ConfigError, match="is not a list of 256 numbers of at least -1"):
        Tokenizer.from_bytes(changed)
