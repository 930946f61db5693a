"""What tokenizer files and chats may ask for: each limit from both sides."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from roofline.common.errors import ConfigError
from roofline.common.fields import Fields
from roofline.text.templates import simple_template
from roofline.text.templates.simple_template_parser import make_outline
from roofline.text.tokenizers.binary_file import from_bytes, to_bytes
from roofline.text.tokenizers.from_json import _room, from_json
from roofline.text.tokenizers.patterns import PatternError, least_length
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.short_text import tables
from roofline.text.tokenizers.steps import checked_steps
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet, checked_id, end_ids

LEAST = {
    "": 0,
    "abc": 3,
    "a|bcd": 1,
    "(?:ab){2,3}c": 5,
    "a{,3}b": 1,
    "a{2,}": 2,
    "a{3}{2}": 6,
    "a?b*c+": 1,
    "[ab]c": 2,
    "[^]a]b": 2,
    "[[a]b]c": 2,
    r"[\]a]c": 2,
    r"^a$\bx\z": 2,
    "(?=abc)d": 1,
    "(?<!ab)d": 1,
    "(?>ab)": 2,
    "(?i)ab": 2,
    "(?i:ab)c": 3,
    r"\p{L}\d\x{2581}\(": 4,
    r"(?:\(a){3}": 6,
}


@pytest.mark.parametrize("pattern", LEAST)
def test_how_little_a_pattern_matches(pattern: str) -> None:
    assert least_length(pattern) == LEAST[pattern]


PATTERN_LIMITS = {  # searched with: not
    "x" * 16384: "x" * 16385,
    "(" * 16 + "a" + ")" * 16: "(" * 17 + "a" + ")" * 17,
    "a{1000}": "a{1001}",
    "a{2,1000}b": "a{2,1001}b",
    "a{1000,}": "a{1001,}",
    "(a{10}){100}": "(a{10}){101}",
    "(?:(?:a{10}){10}){10}": "(?:(?:a{10}){10}){11}",
    r"(?:a{10}\)[)]){100}": r"(?:a{10}\)[)]){101}",
    "a{10}{100}": "a{10}{101}",
    "(?:a{10}){2}{50}": "(?:a{10}){2}{51}",
    "(?=a{10}){100}": "(?=a{10}){101}",
    "(?:a{10}|b){100}": "(?:b|a{10}){101}",
    "a{001000}": "a{0001000}",
    "a{1,001000}": "a{1,0001000}",
    "a*b+c*d{2,}": "a*b+c*d{2,}e*",
    "(?:a*b*|c*)d*e*": "(?:a*b*|c*)d*e*f*",
    "(?=a*b*)c*d*": "(?=a*b*)c*d*e*",
    "a{2}b*c*d*e*": "a{2}+b*c*d*e*",
    "(a+)+": "(a+)+b",
    "(?:a+)?b": "(?:a+){,2}b",
    "(?:a+){1}b": "(?:a+){2}b",
    "(?:a+)++b": "(?:a+){1}+b",
    "a{2}+b": "a{2,3}+b",
    "(?:ab|cd)+x": "(?:ab|ad)+x",
    "(?:ab)+x": "(?:a.|.b)+x",
    "(?:a{2}b)+c": "(?:a{2,3}b)+c",
    "(?:(?=a+)b)+c": "(?:(?:a?)b)+c",
    "(?:a|b)c": "(?:a|b)c)",
    "(?:b(?:a|b)+)": "(?:b(?:a+)+)",
}


@pytest.mark.parametrize("pattern", PATTERN_LIMITS)
def test_patterns_at_the_limits_of_what_is_searched_with(pattern: str) -> None:
    least_length(pattern)
    with pytest.raises(PatternError):
        least_length(PATTERN_LIMITS[pattern])


def replaced(content: int, kind: str = "String", pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": "x" * content}


def charsmap(longest: int) -> dict[str, Any]:
    """A trie of one word, and three texts."""
    data = (1024).to_bytes(4, "little") + b"\1\0\0\0" * 256 + b"ab\0" + "é".encode() * longest + b"\0c\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def nested(depth: int) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


NORMALIZERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # built, not built, why
    "steps": (sequence(*[{"type": "Nmt"}] * 256), sequence(*[{"type": "Nmt"}] * 257), "more than 256 steps"),
    "depth": (nested(8), nested(9), "sequences are nested deeper than 8"),
    "prepend": ({"type": "Prepend", "prepend": "x" * 511}, {"type": "Prepend", "prepend": "x" * 512}, "up to 513"),
    "replace": (replaced(512), replaced(513), "up to 513 characters of one, of 512"),
    "replace two": (replaced(1024, "String", "ab"), replaced(1026, "String", "ab"), "up to 513"),
    "replace some": (replaced(1024, "Regex", "a{2,3}"), replaced(1026, "Regex", "a{2,3}"), "up to 513"),
    "replace nothing": (replaced(511, "Regex", "a*"), replaced(512, "Regex", "a*"), "up to 513"),
    "shorter, then longer": (sequence(replaced(1, "String", "aaa"), replaced(512)),
                             sequence(replaced(2), replaced(257)), "up to 514"),
    "NFC": (sequence({"type": "NFC"}, replaced(170)), sequence({"type": "NFC"}, replaced(171)), "up to 513"),
    "NFD": (sequence({"type": "NFD"}, replaced(128)), sequence({"type": "NFD"}, replaced(129)), "up to 516"),
    "NFKC": (sequence({"type": "NFKC"}, replaced(28)), sequence({"type": "NFKC"}, replaced(29)), "up to 522"),
    "NFKD, NFC": (sequence({"type": "NFKD"}, {"type": "NFC"}, replaced(28)),
                  sequence({"type": "NFC"}, {"type": "NFKD"}, replaced(29)), "up to 522"),
    "a form after": (sequence(replaced(170), {"type": "NFC"}), sequence(replaced(171), {"type": "NFC"}), "up to 513"),
    "ByteLevel": (sequence({"type": "ByteLevel"}, replaced(128)), sequence({"type": "ByteLevel"}, replaced(129)),
                  "up to 516"),
    "compiled": (charsmap(512), charsmap(513), "up to 513"),
    "compiled, form": (sequence(charsmap(170), {"type": "NFC"}), sequence(charsmap(171), {"type": "NFC"}), "up to 513"),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMALIZERS)
def test_normalizers_that_write_as_much_as_they_may(case: str) -> None:
    built, too_much, reason = NORMALIZERS[case]
    assert checked_steps(Fields("a file", {"normalizer": built}), "normalizer")
    with pytest.raises(ConfigError, match=reason):
        checked_steps(Fields("a file", {"normalizer": too_much}), "normalizer")


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "a trie of 0 bytes in 0"),
    (b"\0\0\0", "a trie of 0 bytes in 3"),
    (b"\0\0\0\0", "a trie of 0 bytes in 4"),
    (b"\0\0\0\0a\0", "a trie of 0 bytes in 6"),
    (b"\5\0\0\0" + b"\0" * 8, "a trie of 5 bytes in 12"),
    (b"\4\0\0\0" + b"\0" * 3, "a trie of 4 bytes in 7"),
    (b"\4\0\0\0" + b"\0" * 5, "place 0 of the trie leads to 0, of 1"),  # the library would look at the 97th for an a
    (b"\0\4\0\0" + b"\0" * 1024, "its last text does not end"),

])  # fmt: skip
def test_maps_of_characters_that_are_none(data: bytes, reason: str) -> None:
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    with pytest.raises(ConfigError, match=reason):
        checked_steps(Fields("a file", {"normalizer": step}), "normalizer")
    whole = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\0\4\0\0" + b"\0" * 1025).decode()}
    assert checked_steps(Fields("a file", {"normalizer": whole}), "normalizer")


def test_counts_of_steps_are_counts() -> None:
    def check(**changes: object) -> list[Fields]:
        step = {"type": "Strip", "content": " ", "start": 0, "stop": 0} | changes
        return checked_steps(Fields("a file", {"decoder": step}), "decoder")

    assert check(start=2**31 - 1)
    for changes, reason in (
        ({"start": 2**31}, "not a count"),
        ({"stop": -1}, "not a count"),
        ({"content": "ab"}, "single"),
        ({"content": ""}, "single"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check(**changes)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_json(**vocab: int) -> bytes:
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"added_tokens": [], "decoder": BYTE_LEVEL, "model": model}).encode()


def test_ids_may_leave_gaps_but_not_any() -> None:
    assert _room(0) == 65536
    assert _room(10) == 65536 + 160
    assert _room(2**24) == 2**24
    assert from_json(tokenizer_json(a=0, b=65536 + 31), {}).vocab_size == 65536 + 32
    for wrong in (65536 + 32, -1):
        with pytest.raises(ConfigError, match=rf"model\.vocab\.b: the number {wrong} is no id from 0 to 65567"):
            from_json(tokenizer_json(a=0, b=wrong), {})
    fields = Fields("a file", {})
    assert [checked_id(fields, "id", i, 3) for i in (0, 2)] == [0, 2]
    for i in (-1, 3):
        with pytest.raises(ConfigError, match="no id from 0 to 2"):
            checked_id(fields, "id", i, 3)


def test_what_a_vocabulary_says_of_its_ids() -> None:
    added = [
        AddedToken(4, "<|im_end|>", special=True),
        AddedToken(1, "<b>", special=False),
        AddedToken(6, "<EOT>", False),
    ]
    vocabulary = Vocabulary("BPE", ["a", "b", ""], added=added)
    assert vocabulary.size == 7
    assert [vocabulary.spelling(i) for i in range(-1, 8)] == [
        None,
        "a",
        "<b>",
        None,
        None,
        "<|im_end|>",
        None,
        "<EOT>",
        None,
    ]
    assert Vocabulary("BPE", ["a"] * 9, added=added).size == 9
    assert end_ids((5, None, 4, 5), added) == (5, 4)  # <EOT> is not special here
    assert end_ids((), added) == (4,)


def stored() -> bytes:
    tokens = [*sorted(byte_alphabet()), "ab", "abc"]
    pipeline = byte_level_pipeline("gpt-2")
    return to_bytes(Vocabulary("BPE", tokens, lefts=["a", "ab"], rights=["b", "c"], pipeline=pipeline))


def test_texts_of_a_stored_tokenizer_are_read_one_by_one_or_all() -> None:
    read, encoder = from_bytes(stored())
    assert encoder is not None
    single = [read.tokens[at] for at in range(len(read.tokens))]
    assert read.tokens._list is None  # type: ignore[attr-defined]
    assert single == list(read.tokens)
    assert (read.tokens[-1], read.tokens[-2:], read.tokens[len(single) - 1]) == ("abc", ["ab", "abc"], "abc")
    for at in (len(single), -len(single) - 1):
        with pytest.raises(IndexError):
            from_bytes(stored())[0].tokens[at]
    assert (list(read.lefts), list(read.rights), read.lefts[1]) == (["a", "ab"], ["b", "c"], "ab")
    assert [len(part) for part in (read.tokens, read.lefts, read.scores)] == [258, 2, 0]


@pytest.mark.parametrize("change", [
    lambda data: data + b"x",
    lambda data: data[:-1],
    lambda data: b"RLTOK1\n" + data[7:],
    lambda data: data.replace(b'"counts": [258, 2, 2]', b'"counts": [258, 2, 3]'),
    lambda data: data.replace(b'"counts": [258, 2, 2]', b'"counts": [257, 2, 2]'),
    lambda data: data.replace(b'"counts": [258, 2, 2]', b'"counts": [258, 2,-2]'),
    lambda data: data.replace(b'"model": "BPE"', b'"model": "PBE"'),
])  # fmt: skip
def test_stored_tokenizers_whose_parts_do_not_fit_are_refused(change: Callable[[bytes], bytes]) -> None:
    changed = change(stored())
    assert changed != stored()
    with pytest.raises(ConfigError, match="stored tokenizer"):
        Tokenizer.from_bytes(changed).complete()


def test_lists_that_belong_together_are_of_one_length() -> None:
    merges = Vocabulary("BPE", ["a", "b", "ab"], lefts=["a"], rights=["b", "b"])
    scores = Vocabulary("Unigram", ["a", "b"], scores=[0.0], options={"unk_id": 0})
    for vocabulary in (merges, scores):
        with pytest.raises(ConfigError, match="do not fit together"):
            vocabulary.build_model()
    with pytest.raises(ValueError, match="longer"):
        tables(replace(merges, pipeline=byte_level_pipeline("gpt-2")))


def test_short_texts_end_where_they_are_long() -> None:
    def encoder() -> Any:
        return from_bytes(stored())[1]

    assert encoder().encode("abc")[-1:] == [257]
    assert len(encoder().encode("b" * 2000)) == 2000
    assert encoder().encode("b" * 2001) is None
    one = encoder()
    for _ in range(10):
        assert one.encode("b" * 2000) is not None
    assert one.encode("") == []
    assert one.encode("b") is None  # 20,000 characters have been
    for text in ("\x7f", "\x1f", "\x0b", "é"):
        assert encoder().encode(text) is None
    assert encoder().encode("\n\r\t ~") is not None


def test_digits_of_short_texts_are_split_as_the_library_splits_them() -> None:
    for individual, pieces in ((True, list("a12b34")), (False, ["a", "12", "b", "34"])):
        steps = [{"type": "Digits", "individual_digits": individual}, {**BYTE_LEVEL, "use_regex": False}]
        pipeline = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        tokens = [*sorted(byte_alphabet()), "12", "34"]
        vocabulary = Vocabulary("BPE", tokens, lefts=["1", "3"], rights=["2", "4"], pipeline=pipeline)
        _, encoder = from_bytes(to_bytes(vocabulary))
        assert encoder is not None
        ids = encoder.encode("a12b34")
        assert ids == Tokenizer(vocabulary).encode("a12b34", add_special=False)
        assert [tokens[i] for i in ids or ()] == pieces


OUT = [["for", "m", [["out", [["item", ["name", "m"], "content"]]]]]]


def test_simple_templates_have_limits_of_their_own() -> None:
    def render(content: int, body: list[Any] = OUT) -> list[tuple[str, bool]] | None:
        return simple_template.render(body, [{"role": "user", "content": "x" * content}], {}, True)

    most = 65536 - 16 - len("user")
    assert render(most) == [("x" * most, False)]
    assert render(most + 1) is None
    assert render(1, [["out", [["text", "y" * 2**20]]]]) == [("y" * 2**20, True)]
    assert render(1, [["out", [["text", "y" * (2**20 + 1)]]]]) is None
    assert make_outline("a" * 8192) == [["out", [["text", "a" * 8192]]]]
    assert make_outline("a" * 8193) is None

    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    outlines = [make_outline("{{ " + "not " * times + "bos_token }}") for times in range(60)]
    deepest = max(times for times, outline in enumerate(outlines) if outline is not None)
    assert depth(outlines[deepest]) == 40
    assert all(outline is None for outline in outlines[deepest + 1 :])
    assert deepest == 40 - 4
