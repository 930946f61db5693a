"""Halves of surrogate pairs in JSON: one U+FFFD each, and nothing else of a text changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.common.json_escapes import certain_escapes, parsed, whole_escapes

PIECES = ["\\ud83d", "\\ude00", "\\uDBFF", "\\uDFFF", "\\u0041", "\\\\", '\\"', "\\n", "a", "é", "u", "d83d", "😀"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_a_text_has_the_characters_that_python_replaces(inner: str) -> None:
    """UTF-16 with `replace` is the judge: pairs are joined, each half alone becomes U+FFFD."""
    value = json.loads(f'"{inner}"')
    expected = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert json.loads(whole_escapes(f'"{inner}"')) == expected
    if expected == value:
        assert whole_escapes(inner) == inner


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.lists(st.integers(0, 80), max_size=4))
def test_a_text_in_pieces_is_the_whole_one(inner: str, cuts: list[int]) -> None:
    text, told, held = f'"{inner}"', "", ""
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        certain, held = certain_escapes(held + text[start:end])
        assert len(held) < 12, "no more than a pair is kept back"
        told += certain
    assert told + held == whole_escapes(text)


@pytest.mark.parametrize("end", ["\\", "\\u", "\\ud83", "\\u00"])
def test_an_escape_that_was_cut_off_stays_as_it_is(end: str) -> None:
    assert whole_escapes(f"a{end}") == f"a{end}"
    assert certain_escapes(f"a{end}") == ("a", end)


def test_what_is_no_json_is_refused_as_the_parser_does() -> None:
    assert parsed(b'{"a": "\\ud83d \xc3\xa9"}', json.loads) == {"a": "\ud83d é"}, "this parser takes it as it is"
    for raw in (b'{"a": \\ud83d}', b'{"\xff": "\\ude00"}', b"{"):
        with pytest.raises(ValueError):
            parsed(raw, lambda raw: json.loads(raw.decode()))
