"""The texts of an answer beside its receipt: what a server may tell of the ids, and what was changed."""

import json
from dataclasses import replace

import pytest

from roofline.cli.run.told_answer import NoTextError, changed_text
from roofline.engine.params import SamplingParams
from roofline.engine.receipts.receipt import DIGEST, Choice, Receipt, Sampling, prompt_of
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
        Choice(
            prompt=0, sample=sample, finish_reason="stop", stop=stop or 0,
            ids=[*map(ord, text), *(() if stop else (0,))], digests=[],
        )
        for sample, text in enumerate(texts)
    ]  # fmt: skip
    return Receipt(
        version=1, id="a", created=5, model="toy", fingerprint="f", weights="w", adapter=None, digest=DIGEST,
        end_ids=[0], sampling=Sampling.of(SamplingParams(seed=1, n=len(texts), stop=(stop,) if stop else ())),
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
    (receipt_of("Hello", "Bye", "Ho"), completion("Bye")),  # of best_of
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
