"""Text from ids as they arrive: no half characters, no leaked stop strings, however the ids are portioned."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import AWKWARD

from roofline.text.replies.formats.hermes import HermesCalls
from roofline.text.replies.parser import Reply
from roofline.text.replies.reasoning import ThinkingReply
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


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab<", max_size=20),
    stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_stop_strings_wait_for_the_least_number_of_tokens(
    byte_bpe: Tokenizer, text: str, stops: list[str], least: int, cuts: list[int]
) -> None:
    """As in vLLM since its pull request 22014: of its texts after each token, those after the least number of tokens
    are searched for a stop string that ends in what is new since then."""
    expected, used = text, len(text)
    for count in range(least + 1, len(text) + 1):
        ends = [(len(stop), stop) for stop in stops if text[:count].endswith(stop)]
        if ends:
            expected, used = text[: count - max(ends)[0]], count
            break
    ids = [token for letter in text if (token := byte_bpe.token_id(letter)) is not None]
    stream = TextStream(byte_bpe, stops, min_tokens=least)
    shown, taken = "", 0
    for part in portions(ids, cuts):
        delta = stream.push(part)
        shown, taken = shown + delta.text, taken + delta.used
    assert (shown + stream.finish(), taken) == (expected, used)


ANSWER = '<think>a b\n\nab</think>\n\nb a<tool_call>\n{"name": "f", "arguments": {"x": "ab"}}\n</tool_call>\nab b'


@settings(max_examples=200, deadline=None)
@given(
    stop=st.sampled_from(["ab", "\n\n", "b", "}", "<", '"', "a<tool", "aab", " b", "x", "b\n", "think"]),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    include=st.booleans(),
)
def test_stop_strings_end_what_is_told_and_not_reasoning_or_calls(
    byte_bpe: Tokenizer, stop: str, cuts: list[int], include: bool
) -> None:
    texts, before = ["b a", "ab b"], ""  # what is told before the call and after it
    ends = next((number for number, text in enumerate(texts) if stop in text), None)
    if ends is not None:
        before = texts[ends][: texts[ends].index(stop)] + (stop if include else "")
        texts = [*texts[:ends], before]
    ids = [token for letter in ANSWER if (token := byte_bpe.token_id(letter.replace(" ", "Ġ").replace("\n", "Ċ")))]
    assert byte_bpe.decode(ids) == ANSWER
    reply = ThinkingReply(lambda: HermesCalls(["f"]), open=False)
    stream = TextStream(byte_bpe, [stop], include_stop=include, reply=reply)
    told, text = Reply(), ""
    for part in portions(ids, cuts):
        delta = stream.push(part)
        told.add(delta.parts)
        text += delta.text
    end = stream.end()
    told.add(end.parts)
    assert stream.stopped == (stop if ends is not None else None)
    assert text + end.text == told.text == "".join(texts)
    assert told.reasoning == "a b\n\nab"
    assert [call.arguments for call in told.calls] == ([] if ends == 0 else ['{"x": "ab"}'])


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
