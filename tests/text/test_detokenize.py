"""Text from ids as they arrive: no half characters, no leaked stop strings, however the ids are portioned."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import AWKWARD

from roofline.text.streaming.stops import Detokenizer, StopStrings, TextStream
from roofline.text.tokenizers.tokenizer import Tokenizer

NAMES = ["byte_bpe", "sentencepiece"]


def portions(items: list[int], cuts: list[int]) -> list[list[int]]:
    """`items` cut into runs of the given lengths, over and over."""
    parts = []
    at = turn = 0
    while at < len(items):
        size = cuts[turn % len(cuts)]
        parts.append(items[at : at + size])
        at, turn = at + size, turn + 1
    return parts


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(-2, 700), max_size=40), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_pushes_join_to_decode(request: Any, name: str, ids: list[int], cuts: list[int]) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    stream = Detokenizer(tokenizer)
    pushed = [stream.push(part) for part in portions(ids, cuts)]
    assert "".join(pushed) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("text", AWKWARD)
def test_valid_text_never_shows_a_replacement(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, add_special=False)
    stream = Detokenizer(smollm2)
    shown = ""
    for token_id in ids:
        shown += stream.push([token_id])
        assert text.startswith(shown)
    assert stream.flush() == ""
    assert shown == text


def test_half_a_character_waits_and_ends_as_replacement(byte_bpe: Tokenizer) -> None:
    first, *rest = (byte_bpe.token_id(c) for c in "ðŁĳĭ")  # the bytes of a waving hand in GPT-2's alphabet
    assert first is not None
    stream = Detokenizer(byte_bpe)
    assert stream.push([first]) == ""
    assert stream.push([i for i in rest if i is not None]) == "👋"
    assert stream.push([first]) == ""
    assert stream.flush() == "\ufffd"


def test_the_first_space_of_sentencepiece(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a b", add_special=True)
    assert Detokenizer(sentencepiece).push(ids) == "a b"
    assert Detokenizer(sentencepiece, at_start=False).push(ids) == " a b"
    assert TextStream(sentencepiece).push(ids).text == TextStream(sentencepiece, ["c"]).push(ids).text == "a b"
    assert TextStream(sentencepiece, at_start=False).push(ids).text == " a b"
    assert TextStream(sentencepiece, ["b"]).push(ids).text == "a "
    assert TextStream(sentencepiece, ["b"], include_stop=True).push(ids).text == "a b"


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The earliest complete stop string, looked for in every prefix."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


stop_lists = st.lists(st.text(alphabet="ab<|", min_size=1, max_size=4), max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="ab<|", max_size=30), stop_lists, st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_stop_strings_never_leak(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, stop = naive_cut(text, stops)
    finder = StopStrings(stops)
    shown = ""
    for part in portions(list(text), cuts):  # type: ignore[arg-type]
        shown += finder.push("".join(part))  # type: ignore[arg-type]
        assert expected.startswith(shown)
    if finder.stopped is None:
        shown += finder.finish()
    assert (shown, finder.stopped) == (expected, stop)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 599), max_size=30),
    texts=st.lists(st.sampled_from(["ab", "the", "\n", "e", "é", "👋", "\ufffd", " "]), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    include=st.booleans(),
)
def test_streams_do_not_depend_on_portions(
    byte_bpe: Tokenizer, ids: list[int], texts: list[str], cuts: list[int], include: bool
) -> None:
    expected, stop = naive_cut(byte_bpe.decode(ids), texts)
    stream = TextStream(byte_bpe, texts, include_stop=include)
    shown, used = "", 0
    for part in portions(ids, cuts):
        delta = stream.push(part)
        shown, used = shown + delta.text, used + delta.used
        if delta.stopped is not None:
            break
        assert delta.used == len(part)
    shown += stream.finish()
    assert stream.stopped == stop
    assert shown == expected + (stop if include and stop else "")
    if stop is None:
        assert used == len(ids)
    elif not byte_bpe.decode(ids[:used]).endswith("\ufffd"):
        # the token that completed the stop string is the last one used
        assert stop in byte_bpe.decode(ids[:used])


def test_surplus_tokens_are_not_used(byte_bpe: Tokenizer) -> None:
    ids = [i for c in "abcdef" if (i := byte_bpe.token_id(c)) is not None]
    delta = TextStream(byte_bpe, ["cd"]).push(ids)
    assert (delta.text, delta.stopped, delta.used) == ("ab", "cd", 4)
    stream = TextStream(byte_bpe, ["cd"])
    stream.push(ids)
    assert stream.push(ids).used == 0
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
