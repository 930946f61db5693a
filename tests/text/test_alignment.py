"""Tokens by the characters that they stand for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from roofline.text.tokenizers.alignment import align
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet


def tokenizer(**changes: Any) -> Tokenizer:
    """Tokens are bytes, merges "ab" and "é", and <s>."""
    alphabet = byte_alphabet()
    words = sorted(alphabet, key=lambda character: alphabet[character])
    written = {byte: character for character, byte in byte_alphabet().items()}
    merges = [(written[97], written[98]), (written[0xC3], written[0xA9])]
    fields = {
        "tokens": [*words, *("".join(pair) for pair in merges)],
        "lefts": [left for left, _ in merges],
        "rights": [right for _, right in merges],
        "pipeline": byte_level_pipeline("gpt-2"),
        "added": [AddedToken(258, "<s>", True, **changes.pop("special", {}))],
        **changes,
    }
    return Tokenizer(Vocabulary("BPE", **fields))


PLAIN = tokenizer()


@given(st.text(alphabet="ab é€😀<s>\n"))
def test_the_spans_of_plain_text_cover_it(text: str) -> None:
    ids = PLAIN.encode(text, add_special=False)
    spans = align(PLAIN, text, ids)
    assert len(spans) == len(ids)
    at = 0
    for token, span in zip(ids, spans, strict=True):
        assert span is not None
        assert span[0] in (at - 1, at)  # a character of several tokens
        assert PLAIN.token_bytes(token) in text[span[0] : span[1]].encode()
        at = span[1]
    assert at == len(text)


def test_merged_and_shared_characters() -> None:
    assert align(PLAIN, "abé€", PLAIN.encode("abé€", add_special=False)) == [(0, 2), (2, 3), (3, 4), (3, 4), (3, 4)]
    assert align(PLAIN, "a<s>b", [97, 258, 98]) == [(0, 1), (1, 4), (4, 5)]


def test_white_space_that_a_special_token_swallows_is_passed_over() -> None:
    wide = tokenizer(special={"lstrip": True, "rstrip": True})
    ids = wide.encode_marked("a <s>  b", bytes([1] * 8))
    assert ids == [97, 258, 98]
    assert align(wide, "a <s>  b", ids) == [(0, 1), (2, 5), (7, 8)]


def test_what_stands_behind_white_space_is_only_taken_for_its_own_token() -> None:
    assert align(PLAIN, "  ab", [256]) == [(2, 4)]
    assert align(PLAIN, "  ab", [98, 97]) == [None, None]


def test_a_text_that_is_rewritten_before_is_not_guessed_at() -> None:
    assert normalizers.NFC().normalize_str("e\N{COMBINING ACUTE ACCENT}") == "é"
    composed = tokenizer(pipeline={**byte_level_pipeline("gpt-2"), "normalizer": {"type": "NFC"}})
    text = "ae\N{COMBINING ACUTE ACCENT}b"
    ids = composed.encode(text, add_special=False)
    assert ids == [97, 257, 98]
    assert align(composed, text, ids) == [(0, 1), None, None]


def test_sentencepieces_first_space_is_nobodys(sentencepiece_like: Tokenizer) -> None:
    def spans(text: str) -> list[tuple[int, int] | None]:
        return align(sentencepiece_like, text, sentencepiece_like.encode(text, add_special=False))

    assert spans("ab a") == [(0, 2), (2, 4)]
    assert spans("b") == [(0, 0), (0, 1)]


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    words = ["▁", "a", "b", "▁a", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    pipeline = {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
    }  # fmt: skip
    return Tokenizer(
        Vocabulary(
            "BPE",
            words,
            lefts=[left for left, _ in merges],
            rights=[right for _, right in merges],
            pipeline=pipeline,
            byte_level=False,
            strip_space=True,
        )
    )


def test_the_library_agrees_on_offsets() -> None:
    """Offsets of the library's own encoding, where nothing is special."""
    text = "ab b é€ \n a"
    encoding = PLAIN._plain.encode(text, add_special_tokens=False)
    assert align(PLAIN, text, encoding.ids) == [tuple(span) for span in encoding.offsets]
