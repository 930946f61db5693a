"""Answers built from events, and the models and texts that an LLM makes them with."""

from pathlib import Path

import pytest
from engine_fakes import FakeExecutable, loaded_text

from roofline import LLM, SamplingParams, bundle
from roofline.engine.answers import AnswerBuilder, LocalAnswers
from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.engine.local import LocalEngine
from roofline.engine.pooling import Pooling
from roofline.text.replies.parser import TextDelta
from roofline.text.streaming import stops
from roofline.text.streaming.stops import Delta

GREEDY = SamplingParams(temperature=0, max_tokens=3)
CHAT = [{"role": "user", "content": "hi"}]


class Letters:
    """A text stream whose ids are characters; `stop` ends it."""

    stopped = None

    def __init__(self, stop=None):
        self._stop = stop

    def push(self, ids):
        text = "".join(map(chr, ids))
        if self._stop is not None and self._stop in text:
            self.stopped = self._stop
            return Delta(text.split(self._stop)[0], self._stop, text.index(self._stop) + 1)
        return Delta(text, None, len(ids), [TextDelta(text)])

    def end(self, *, cut):
        return Delta("!" if cut else ".", None, 0, [TextDelta("!" if cut else ".")])


def event(text, reason=None, stop_id=None):
    logprobs = [TokenLogprob(ord(letter), -0.5, ()) for letter in text]
    return Event("a", 0, [ord(letter) for letter in text], logprobs, reason, stop_id, None, Usage(2, 9, 1, 7))


def test_text_is_read_once_and_nothing_is_billed_behind_the_end():
    builder = AnswerBuilder(Letters(), logprobs=True)
    piece = builder.push(event("ab"))
    assert (piece.text, piece.tokens, len(piece.logprobs), piece.finish_reason) == ("ab", 2, 2, None)
    assert (builder.read(), builder.read(), builder.running) == ("ab", "", True)
    piece = builder.push(event("cd", "stop", ord("d")))
    assert (piece.text, piece.tokens, len(piece.logprobs), piece.finish_reason) == ("c.", 2, 1, "stop")
    assert piece.parts == [TextDelta("c"), TextDelta(".")]
    assert (builder.read(), builder.text, builder.running) == ("c.", "abc.", False)
    piece = builder.push(event("e"))
    assert (piece.text, piece.tokens, len(piece.logprobs), piece.finish_reason) == ("", 0, 0, None)
    answer = builder.result()
    assert (answer.text, answer.ids, answer.stop, len(answer.logprobs)) == ("abc.", [*b"abcd"], ord("d"), 4)
    assert answer.usage == Usage(2, 4, 1, 7)


def test_a_stop_string_ends_an_answer_that_the_engine_goes_on_with():
    builder = AnswerBuilder(Letters("c"), logprobs=False)
    piece = builder.push(event("abcd"))
    assert (piece.text, piece.tokens, len(piece.logprobs), piece.finish_reason) == ("ab", 3, 3, "stop")
    assert (builder.running, builder.stop, builder.ids, builder.logprobs) == (True, "c", [*b"abc"], None)
    assert builder.push(event("e", "length")).tokens == 0
    assert (builder.running, builder.result().finish_reason) == (False, "stop")


def test_an_answer_that_was_cut_ends_as_one():
    assert AnswerBuilder(Letters(), logprobs=False).push(event("ab", "length")).text == "ab!"


def test_a_stop_string_waits_for_the_least_number_of_tokens():
    """Also for one that began before."""
    llm = LLM(loaded_text())
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
    (free,) = llm.generate("abc", SamplingParams(**params))
    letters = [llm.tokenizer.decode([token]) for token in free.ids]  # "" of a special token
    for at in range(len(free.text) - 1):
        stop = free.text[at : at + 2]
        ends = [n for n in range(1, 13) if letters[n - 1] and "".join(letters[:n]).endswith(stop)]
        for least in (0, 3, 12):
            (answer,) = llm.generate("abc", SamplingParams(**params, stop=stop, min_tokens=least))
            end = next((end for end in ends if end > least), None)
            assert answer.text == (free.text if end is None else "".join(letters[:end])[: -len(stop)])
            assert (answer.finish_reason, len(answer.ids)) == (("length", 12) if end is None else ("stop", end))


def test_ids_alone_have_no_text():
    builder = AnswerBuilder(None, logprobs=False)
    assert builder.push(event("ab", "length")).tokens == 2
    assert (builder.text, builder.result().ids) == ("", [*b"ab"])


def test_answers_begin_a_text_in_chat_alone(monkeypatch):
    starts = []

    class Recorded(stops.TextStream):
        def __init__(self, tokenizer, stop, *, at_start, **options):
            starts.append(at_start)
            super().__init__(tokenizer, stop, at_start=at_start, **options)

    monkeypatch.setattr(stops, "TextStream", Recorded)
    llm = LLM(loaded_text())
    llm.generate("abc", GREEDY)
    llm.chat(CHAT, GREEDY)
    list(llm.stream("abc", GREEDY))
    list(llm.stream(CHAT, GREEDY))
    assert starts == [False, True, False, True]


def test_special_tokens_in_a_text_are_read_where_it_is_wanted(monkeypatch):
    llm, parses = LLM(loaded_text()), []
    encode = llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **how: (parses.append(how), encode(text, **how))[1])
    llm.encode("abc")
    llm.generate("abc", GREEDY)
    llm.generate("abc", GREEDY, parse_special=True)
    assert parses == [{"add_special": True, "parse_special": special} for special in (False, False, True)]


@pytest.fixture
def loads(monkeypatch):
    """What is loaded, and which pairs are compared."""
    calls = []

    def load(source, options=None, **more):
        calls.append((source, options.changes() if options is not None else more))
        return loaded_text(rows=64)

    def load_with_draft(source, options, draft, draft_options):
        calls.append((source, options, draft, draft_options))
        return loaded_text(rows=64), loaded_text()

    monkeypatch.setattr(bundle, "load", load)
    monkeypatch.setattr(bundle, "load_with_draft", load_with_draft)
    monkeypatch.setattr(bundle, "check_draft", lambda *_: calls.append("compared"))
    return calls


@pytest.mark.parametrize(
    ("model", "draft", "calls"),
    [
        (Path("m"), None, [("m", {"threads": 2})]),
        ("m", Path("d"), [("m", {"threads": 2, "draft_tokens": 4}, "d", {"threads": 2})]),
        ("m", loaded_text(), [("m", {"threads": 2, "draft_tokens": 4}), "compared"]),
    ],
)
def test_sources_are_loaded_with_the_options_and_pairs_compared(loads, model, draft, calls):
    with LLM(model, draft=draft, threads=2, **({"speculate": "draft"} if draft else {})) as llm:
        assert llm.generate("abc", GREEDY)
    assert loads == calls


def test_a_draft_is_loaded_beside_a_loaded_model(loads):
    with LLM(loaded_text(rows=64), draft="d", speculate="draft") as llm:
        assert llm.generate("abc", GREEDY)
    assert loads == [("d", {}), "compared"]


def test_the_same_answer_took_another_time_each_time():
    one, other = Usage(2, 4, 1, 7, 0.5, 0.25, 1.0), Usage(2, 4, 1, 7, 0.75, None, 2.0)
    assert one == other
    assert [one != other, one != one] == [False, False]
    assert len({one, other}) == 1
    assert one != Usage(2, 5, 1, 7, 0.5, 0.25, 1.0)
    assert one != (2, 4, 1, 7)


def test_vectors_come_in_the_order_of_their_prompts():
    answers = LocalAnswers(LocalEngine(FakeExecutable()), None, ())
    prompts = [[1, 2, 3], [4], [5, 6]]
    vectors = answers.vectors(prompts, Pooling("mean"))
    assert vectors == [answers.vectors([ids], Pooling("mean"))[0] for ids in prompts]
    assert len(set(vectors)) == 3


def test_the_first_answer_alone_tells_the_log_probabilities_of_the_prompt():
    (generation,) = LLM(loaded_text(rows=64)).generate("abc", SamplingParams(prompt_logprobs=1, n=2, max_tokens=2))
    first, second = generation.answers
    assert len(first.prompt_logprobs) == len(generation.prompt_ids)
    assert second.prompt_logprobs is None
