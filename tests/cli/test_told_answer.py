"""The texts of an answer beside its receipt: what a server may tell of the ids, and what was changed."""

import json
from dataclasses import replace

import msgspec
import pytest

from roofline.cli.run.answer_layout import NoTextError
from roofline.cli.run.told_answer import changed_text, ends_as_said
from roofline.engine.params import SamplingParams
from roofline.engine.receipts.receipt import DIGEST, Receipt, ReceiptChoice, ReceiptSampling, prompt_of
from roofline.server.generation import Generation
from roofline.text.streaming.stops import TextStream

THOUGHT = "<think>hm</think>\nYes, two"
CALL = 'Look:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STOPPED = "one, END"


class Letters:
    """A tokenizer whose ids are characters; 1 is a special token."""

    special_ids, strip_space = frozenset({1}), True

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


class Text:
    """As much of a TextSide as there is to compare with."""

    def special_ids(self, contents=None) -> frozenset[int]:
        return frozenset() if contents else Letters.special_ids

    def stream(self, stop, **options) -> TextStream:
        return TextStream(Letters(), stop, **options)


def receipt_of(*texts: str, stop: str | None = None) -> Receipt:
    choices = [
        ReceiptChoice(
            prompt=0, sample=sample, finish_reason="stop", stop=stop or 0,
            ids=[*map(ord, text), *(() if stop else (0,))], digests=[],
        )
        for sample, text in enumerate(texts)
    ]  # fmt: skip
    return Receipt(
        version=1, id="a", created=5, model="toy", fingerprint="f", weights="w", adapter=None, digest=DIGEST,
        end_ids=[0], sampling=ReceiptSampling.of(SamplingParams(seed=1, n=len(texts), stop=(stop,) if stop else ())),
        prompts=[prompt_of([65], False)], choices=choices,
    )  # fmt: skip


def chat(*messages):
    return {"choices": [{"index": index, "message": message} for index, message in enumerate(messages)]}


def completion(*texts):
    return {"choices": [{"index": index, "text": text} for index, text in enumerate(texts)]}


def called(name="add", arguments='{"a": 1}', content="Look:"):
    return {"content": content, "tool_calls": [{"id": "c", "function": {"name": name, "arguments": arguments}}]}


def item(kind, text):
    return {"type": kind, "content": [{"text": text}]}


TRUE = [
    (receipt_of("Hello", "Bye"), completion("Hello", "Bye")),
    (receipt_of(" Hello\1"), completion("Hello")),
    (receipt_of(" Hello\1"), completion(" Hello\1")),
    (receipt_of(STOPPED, stop="END"), completion("one, ")),
    (receipt_of(STOPPED, stop="END"), completion("one, END")),
    (receipt_of(THOUGHT), chat({"content": "Yes, two", "reasoning_content": "hm"})),
    (receipt_of(THOUGHT), chat({"content": THOUGHT})),  # of a server with --reasoning-parser none
    (receipt_of(CALL), chat(called())),
    (receipt_of(CALL), chat({"content": CALL})),
    (receipt_of(THOUGHT), {"output": [item("reasoning", "hm"), item("message", "Yes, two")]}),
    (receipt_of(CALL), {"output": [item("message", "Look:"),
                                   {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}]}),
]  # fmt: skip


@pytest.mark.parametrize(("receipt", "answer"), TRUE)
def test_a_true_text_is_that_of_its_ids_and_any_other_is_not(receipt, answer):
    assert changed_text(answer, receipt, Text(), None) is None
    written = json.dumps(answer)
    for word, forged in (("Hel", "hel"), ("Bye", "bye"), ("one", "two"), ("Yes", "No "), ("hm", "mh"), ("Look", "look"),
                         ('"add"', '"sub"'), ("1}", "2}")):  # fmt: skip
        if word in written:
            assert "it was changed" in changed_text(json.loads(written.replace(word, forged)), receipt, Text(), None)


def test_an_echoed_prompt_is_that_of_the_request():
    receipt, answer = receipt_of("Hello"), completion("A: Hello")
    with pytest.raises(NoTextError, match="--request"):
        changed_text(answer, receipt, Text(), None)
    request = Generation(prompts=((65,),), params=SamplingParams(), model="toy", fingerprint="f", echo=("A: ",))
    assert changed_text(answer, receipt, Text(), request) is None
    assert changed_text(answer, receipt, Text(), replace(request, echo=("B: ",))) is not None


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": 3},
        {"choices": [{"index": 0}]},
        {"choices": [{"index": 0, "message": "Hello"}]},
        {"choices": [{"index": 0, "text": "Hello", "message": {"content": "Hello"}}]},
        {"output": [item("message", "Hello")], **completion("forged")},
        {"output": [{"type": "image"}]},
    ],
)
def test_what_is_laid_out_otherwise_is_not_compared(answer):
    with pytest.raises(NoTextError):
        changed_text(answer, receipt_of("Hello"), Text(), None)


def test_fewer_answers_than_were_computed_are_those_of_best_of_and_of_nothing_else():
    receipt, bye, forged = receipt_of("Hello", "Bye", "Ho"), completion("Bye"), completion("By")
    request = Generation(prompts=((65,),), params=SamplingParams(n=3), model="toy", fingerprint="f")
    with pytest.raises(NoTextError, match="1 of 3 answers are told; whether by best_of, --request says"):
        changed_text(bye, receipt, Text(), None)
    assert changed_text(bye, receipt, Text(), replace(request, best=1)) is None
    assert changed_text(completion("Ho", "Hello"), receipt, Text(), replace(request, best=2)) is None
    assert "it was changed" in changed_text(completion("Ho", "Ho"), receipt, Text(), replace(request, best=2))
    assert "1 choices, and 3 were asked for" in changed_text(bye, receipt, Text(), request)
    assert "4 choices, and 3" in changed_text(completion("Hello", "Bye", "Ho", "x"), receipt, Text(), None)
    for asked in (None, replace(request, best=1)):
        assert "it was changed" in changed_text(forged, receipt, Text(), asked)


def test_with_the_request_a_text_is_told_as_that_says():
    stopped, special = receipt_of(STOPPED, stop="END"), receipt_of(" Hello\1")
    request = Generation(prompts=((65,),), params=SamplingParams(stop=("END",)), model="toy", fingerprint="f")
    for answer, receipt, ways in (
        (completion("one, "), stopped, {}),
        (completion("one, END"), stopped, {"include_stop": True}),
        (completion(" Hello"), special, {}),
        (completion("Hello"), special, {"at_start": True}),
        (completion(" Hello\1"), special, {"shown": frozenset({1})}),
        (completion("A: Hello"), special, {"at_start": True, "echo": ("A: ",)}),
    ):
        assert changed_text(answer, receipt, Text(), replace(request, **ways)) is None
        for other in ({}, {"include_stop": True}, {"at_start": True}, {"shown": frozenset({1})}, {"echo": ("A: ",)}):
            if other != ways and (receipt is special or "include_stop" in other or "include_stop" in ways):
                told = changed_text(answer, receipt, Text(), replace(request, **other))
                same = receipt is special and {**other, "include_stop": 0} == {**ways, "include_stop": 0}
                assert told is None if same else "it was changed" in told, (answer, other)


STRAY = [
    lambda answer: answer["choices"][0].update(text=""),
    lambda answer: answer["choices"][0].pop("index"),
    lambda answer: answer["choices"][0].update(index=False),
    lambda answer: answer["choices"][0].update(index=1),
    lambda answer: answer["choices"][0].update(answer="No "),
    lambda answer: answer["choices"][0]["message"].update(refusal="No "),
    lambda answer: answer["choices"][0]["message"].update(role="user"),
    lambda answer: answer["choices"][0]["message"].update(content=["No "]),
    lambda answer: answer.update(output=[]),
    lambda answer: answer.update(answers=answer.pop("choices")),
    lambda answer: answer.update(text="No "),
    lambda answer: answer.update(object="response"),
    lambda answer: answer.update(choices=[]),
]


@pytest.mark.parametrize("stray", STRAY)
@pytest.mark.parametrize("content", ["Yes", "No "])
def test_no_field_more_or_less_makes_a_text_pass(stray, content):
    answer = chat({"role": "assistant", "content": content, "refusal": None})
    stray(answer)
    with pytest.raises(NoTextError):
        changed_text(answer, receipt_of("Yes"), Text(), None)


@pytest.mark.parametrize(
    ("name", "true", "false"),
    [
        ("id", "cmpl-a", "cmpl-b"), ("created", 5, 6), ("model", "toy", "toys"), ("system_fingerprint", "f", "g"),
        ("usage", {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}, {"completion_tokens": 7}),
        ("usage", {"total_tokens": 7}, {"prompt_tokens": True}), ("usage", {}, [7]),
    ],
)  # fmt: skip
def test_what_else_the_receipt_has_is_told_as_it_has_it(name, true, false):
    receipt, answer = receipt_of("Hello"), completion("Hello")
    assert changed_text(answer | {name: true}, receipt, Text(), None) is None
    assert f"The answer's {name} is" in changed_text(answer | {name: false}, receipt, Text(), None)


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({"finish_reason": "stop"}, True), ({"finish_reason": "length"}, False),
        ({"finish_reason": "tool_calls"}, False),
        ({"token_ids": [72, 105, 0]}, True), ({"token_ids": [72, 105]}, False), ({"prompt_token_ids": [65]}, True),
        ({"prompt_token_ids": [66]}, False), ({"prompt_token_ids": "A"}, False), ({"prompt_token_ids": [-1]}, False),
    ],
)  # fmt: skip
def test_why_an_answer_ended_and_its_ids_are_told_as_the_receipt_has_them(change, right):
    answer = completion("Hi")
    answer["choices"][0] |= change
    problem = changed_text(answer, receipt_of("Hi"), Text(), None)
    assert problem is None if right else "told otherwise than the receipt" in problem


def test_items_are_told_in_their_order_and_state():
    receipt = receipt_of(THOUGHT)
    items = [item("reasoning", "hm"), item("message", "Yes, two")]
    assert "it was changed" in changed_text({"output": items[::-1]}, receipt, Text(), None)
    assert changed_text({"output": items, "status": "completed"}, receipt, Text(), None) is None
    assert "told otherwise" in changed_text({"output": items, "status": "incomplete"}, receipt, Text(), None)
    for wrong in (
        {"output": [items[0] | {"status": "incomplete"}, items[1]]},
        {"output": items, "incomplete_details": {"reason": "content_filter"}, "status": "completed"},
        {"output": [items[0], items[1] | {"status": "incomplete"}], "status": "completed"},
        {"output": [items[0] | {"summary": [{"text": "No"}]}, items[1]]},
        {"output": [items[0], {"type": "message", "content": [{"text": "Yes, two", "annotations": ["No"]}]}]},
    ):
        with pytest.raises(NoTextError):
            changed_text(wrong, receipt, Text(), None)


def test_the_last_event_of_a_stream_has_no_text():
    event = {"id": "chatcmpl-a", "object": "chat.completion.chunk", "created": 5, "model": "toy", "choices": []}
    assert changed_text(event, receipt_of("Hi"), Text(), None) is None
    assert "The answer's model" in changed_text(event | {"model": "other"}, receipt_of("Hi"), Text(), None)
    with pytest.raises(NoTextError):
        changed_text(event | {"text": "forged"}, receipt_of("Hi"), Text(), None)


@pytest.mark.parametrize(
    ("text", "ends", "stop", "stops", "right", "late"),  # late: where nothing ends an answer before its eighth token
    [
        ("one, END", "stop", "END", ("END",), True, True),
        ("one, two", "stop", "ZEBRA", ("ZEBRA",), False, False),  # the text does not have it
        ("one END two", "stop", "END", ("END",), False, False),  # or before its end
        ("one END, END", "stop", "END", ("END",), False, True),  # and it went on there
        ("one END two", "length", None, ("END",), False, True),
        ("one, two END", "length", None, ("END",), False, False),
        ("one, two", "length", None, ("END",), True, True),
        ("one, two\0", "stop", 0, ("END",), True, True),
        ("one END\0", "stop", 0, ("END",), False, True),
        ("<think>END</think> two", "length", None, ("END",), True, True),  # a server need not look there
    ],
)
def test_a_text_ends_at_its_stop_string_and_passes_none(text, ends, stop, stops, right, late):
    choice = ReceiptChoice(prompt=0, sample=0, finish_reason=ends, stop=stop, ids=[*map(ord, text)], digests=[])
    for least, expected in ((0, right), (8, late)):
        sampling = ReceiptSampling.of(SamplingParams(seed=1, stop=stops, min_tokens=least))
        changed = msgspec.structs.replace(receipt_of("x"), sampling=sampling, choices=[choice])
        assert ends_as_said(choice, changed, Text(), None) == expected, least
