"""roofline verify: whatever is altered in a receipt, in the answer around it or in the request is noticed."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roofline.cli.run.verify import CHANGED, DIFFERENT, NOT_COMPARED, SAME, judge
from roofline.common.errors import RooflineError
from roofline.engine.llm import LLM
from roofline.engine.receipts.receipt import Receipt, read_answer
from roofline.engine.receipts.signing import broken_seal, damage_of, seal
from tests.bundle.bundle_models import write_model
from tests.bundle.receipt_server import ask_server

REFUSED = 1
FREE = {"model": "small", "temperature": 0.8, "seed": 4, "receipt": "with_prompt"}
COMPLETION = FREE | {"prompt": ["a quick brown", "b"], "max_tokens": 6, "n": 2, "return_token_ids": True}
CHAT = FREE | {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "logprobs": True}
RESPONSE = FREE | {"input": "b", "max_output_tokens": 5, "top_p": 0.9, "store": False, "instructions": "Be brief."}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BEGUN_CALL = '{"name": "weather", "arguments": {"city": "Ro'
# What a request could have asked for beside: each was answered as if it had not been.
OTHERWISE: list[dict[str, Any]] = [
    {"temperature": 0.5}, {"seed": 5}, {"max_tokens": 7}, {"logit_bias": {"5": 1}}, {"stop": "x"}, {"n": 1},
    {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"presence_penalty": 1},
    {"frequency_penalty": 1}, {"min_tokens": 2}, {"stop_token_ids": [5]}, {"ignore_eos": True},
    {"response_format": {"type": "json_object"}}, {"guided_regex": "a+"}, {"prompt": ["a quick brown", "c"]},
    {"prompt": ["a quick brown"]}, {"model": "large"}, {"temperature": None}, {"n": None}, {"max_tokens": None},
    {"best_of": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def llm(small: Path) -> Iterator[LLM]:
    with LLM(str(small), cache_tokens=512, threads=1, check_weights="off") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def asked(small: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Requests with their answers, one of which a stop string ended, by name."""
    plain, chat, response = ask_server(small, COMPLETION, CHAT, RESPONSE)
    text = chat["choices"][0]["message"]["content"]
    stopped = CHAT | {
        "stop": [next(text[at : at + 2] for at in range(1, len(text)) if text.find(text[at : at + 2]) == at)]
    }
    biased = COMPLETION | {"logit_bias": {"5": 100}}
    cut, forced = ask_server(small, stopped, biased)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["receipt"]["choices"][0]["stop"] == stopped["stop"][0]
    assert forced["receipt"]["choices"][0]["ids"] == [5] * 6
    pairs = {"completion": (COMPLETION, plain), "chat": (CHAT, chat), "response": (RESPONSE, response)}
    return pairs | {"stopped": (stopped, cut), "biased": (biased, forced)}


@pytest.fixture
def outcome(llm: LLM, tmp_path: Path) -> Any:
    """outcome(request, answer) -> the status of verifying it, after the receipt was sealed again, as who has no key for
    its signature can."""

    def run(request: dict[str, Any] | None, answer: dict[str, Any]) -> tuple[int, str]:
        answer = copy.deepcopy(answer)
        path, body = tmp_path / "answer.json", tmp_path / "request.json"
        receipt = answer.get("receipt", answer)
        try:
            sealed = seal(msgspec.convert(receipt, Receipt), None).as_json()
            path.write_text(json.dumps(sealed if "receipt" not in answer else answer | {"receipt": sealed}))
            read, told = read_answer(path)
            if (damage := damage_of(read)) is not None:
                return CHANGED, damage
            assert broken_seal(read) is None
            if request is not None:
                body.write_text(json.dumps(request))
            verdict = judge(read, told, body if request is not None else None, llm)
        except (RooflineError, msgspec.ValidationError) as error:
            return REFUSED, str(error)
        return verdict.status, verdict.message

    return run


def altered(value: Any, everywhere: bool = True, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each way to change one value in plain JSON, or to add one to an object or list: (where, the changed whole).
    everywhere: in each element of a list, not in its first and its last one alone."""
    if isinstance(value, dict | list):
        places = range(0, len(value), 1 if everywhere else max(1, len(value) - 1))
        for key in value if isinstance(value, dict) else places:
            for where, changed in altered(value[key], everywhere, (*path, "*" if isinstance(key, int) else str(key))):
                whole = copy.copy(value)
                whole[key] = changed
                yield where, whole
        if isinstance(value, dict):
            yield ".".join((*path, "+")), {**value, "surprise": "forged"}
        else:
            yield ".".join((*path, "+")), [*value, *(value[-1:] or ["forged"])]
        return
    other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 + 0.25}
    words = value or "forged"
    yield ".".join(path), other.get(type(value), lambda: f"{words[:-1]}{'6' if words[-1:] == '5' else '5'}")()


# What may be altered unnoticed, because nothing in the receipt, and nothing that is computed again, says it.
UNPROVEN = {
    "receipt.weights",  # told in words: bits are compared all the same
    *("receipt.public_key", "receipt.checksum", "receipt.signature"),  # of the seal, which this test makes anew
    *("usage.prompt_tokens_details.cached_tokens", "usage.input_tokens_details.cached_tokens"),
    *("usage.input_tokens_details.cache_write_tokens", "usage.output_tokens_details.reasoning_tokens"),
    *("usage.+", "usage.prompt_tokens_details.+", "usage.input_tokens_details.+", "usage.output_tokens_details.+"),
    *("completed_at", "store", "output.*.id", "output.*.content.*.logprobs.+"),
}


def is_unproven(where: str) -> bool:
    return where in UNPROVEN or ".logprobs" in where


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["completion", "chat", "response", "stopped"])
def test_whatever_is_altered_in_an_answer_or_its_receipt_is_noticed(
    asked: Any, outcome: Any, name: str, everywhere: bool
) -> None:
    request, answer = asked[name]
    status, message = outcome(request, answer)
    assert status == SAME, message
    unnoticed, count = set(), 0
    for where, changed in altered(answer, everywhere):
        status, _ = outcome(request, changed)
        assert status in (SAME, REFUSED, DIFFERENT, CHANGED, NOT_COMPARED)
        if status == SAME and not is_unproven(where):
            unnoticed.add(where)
        count += 1
    assert not unnoticed
    assert count > 50


@pytest.mark.parametrize("name", ["completion", "chat", "response", "stopped"])
def test_whatever_is_altered_in_the_request_is_noticed(asked: Any, outcome: Any, name: str) -> None:
    request, answer = asked[name]
    unnoticed = {where for where, changed in altered(request) if outcome(changed, answer)[0] == SAME}
    assert unnoticed <= {"receipt", "return_token_ids", "logprobs", "store"}, "these change no id"


@pytest.mark.parametrize("change", OTHERWISE, ids=str)
def test_a_request_that_asked_for_something_else_is_another(asked: Any, outcome: Any, change: dict[str, Any]) -> None:
    request, answer = asked["completion"]
    sent = {name: value for name, value in (request | change).items() if value is not None}
    status, message = outcome(sent, answer)
    assert status in (CHANGED, REFUSED), message
    if status == CHANGED and "prompt" not in change:
        assert (
            next(iter(change)).split("_")[0] in message
            or "constraint" in message
            or "'n" in message
            or "n is" in message
        )


def test_what_a_server_added_to_a_request_is_found(asked: Any, outcome: Any) -> None:
    request, answer = asked["biased"]
    assert outcome(request, answer)[0] == SAME
    status, message = outcome({name: value for name, value in request.items() if name != "logit_bias"}, answer)
    assert (status, "The request's logit_bias is []" in message) == (CHANGED, True)


def cut_to(answer: dict[str, Any], length: int, llm: LLM, **choice: Any) -> dict[str, Any]:
    """An answer of one choice that a server cut, with its receipt."""
    forged = copy.deepcopy(answer)
    told, sealed = forged["choices"][0], forged["receipt"]["choices"][0]
    sealed |= {"ids": sealed["ids"][:length], "digests": sealed["digests"][:length]} | choice
    told["finish_reason"], told["message"]["content"] = sealed["finish_reason"], llm.tokenizer.decode(sealed["ids"])
    counts = forged["usage"]
    counts["completion_tokens"] = length
    counts["total_tokens"] = counts["prompt_tokens"] + length
    return forged


def test_a_truncated_answer_does_not_verify(asked: Any, outcome: Any, llm: LLM) -> None:
    _, answer = asked["chat"]
    for request in (CHAT, None):
        assert outcome(request, cut_to(answer, 5, llm))[0] == SAME
        for choice in (
            {"finish_reason": "stop", "stop": "ZEBRA"},
            {"finish_reason": "length"},
            {"finish_reason": "stop"},
        ):
            forged = cut_to(answer, 3, llm, **choice)
            assert outcome(request, forged)[0] == CHANGED
            bare = forged["receipt"] | {"prompts": answer["receipt"]["prompts"]}
            status, message = outcome(request, bare)
            assert (status, "The receipt is not whole" in message, "same bits" in message) == (CHANGED, True, True)
            assert not any(word in message for word in ("memory", "kernel", "chip", "weights"))
            forged["receipt"]["sampling"]["stop"] = ["ZEBRA"]
            assert outcome(request, forged)[0] in (DIFFERENT, CHANGED)
            forged["receipt"]["sampling"]["max_tokens"] = None
            assert outcome(None, forged)[0] in (DIFFERENT, CHANGED)
            assert outcome({**CHAT, "max_tokens": None}, forged | {"receipt": forged["receipt"]})[0] in (
                DIFFERENT,
                CHANGED,
            )
        last = answer["receipt"]["choices"][0]["ids"][2]
        ended = cut_to(answer, 3, llm, finish_reason="stop", stop=last)
        for field in ("end_ids", "stop_token_ids"):
            forged = copy.deepcopy(ended)
            (forged["receipt"] if field == "end_ids" else forged["receipt"]["sampling"])[field] = [last]
            if request is not None or field == "end_ids":
                assert outcome(request, forged)[0] == CHANGED


def test_an_id_that_does_not_follow_from_its_logits_is_told_of_the_receipt(asked: Any, outcome: Any) -> None:
    receipt = copy.deepcopy(asked["chat"][1]["receipt"])
    receipt["choices"][0]["ids"][1] ^= 1
    status, message = outcome(None, receipt)
    assert (status, "another id is sampled" in message, "not whole" in message) == (CHANGED, True, True)
    receipt["choices"][0]["digests"][0] = "0" * 32  # here the computation differs, whoever is wrong
    assert outcome(None, receipt)[0] == DIFFERENT


def test_an_answer_that_the_context_ends_is_as_long_as_that(small: Path, outcome: Any, llm: LLM) -> None:
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"} | {"ignore_eos": True}
    (answer,) = ask_server(small, body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert outcome(body, answer)[0] == SAME
    status, message = outcome(body, cut_to(answer, 4, llm))
    assert (status, "--max-model-len" in message) == (CHANGED, True)


def test_a_response_that_goes_on_has_a_prompt_that_is_not_compared(asked: Any, outcome: Any) -> None:
    request, answer = asked["response"]
    after = {**answer, "previous_response_id": "resp_1"}
    status, message = outcome({**request, "previous_response_id": "resp_1"}, after)
    assert (status, "the prompt, since its first items are of a previous response" in message) == (NOT_COMPARED, True)
    status, message = outcome({**request, "previous_response_id": "resp_1", "top_p": 0.8}, after)
    assert (status, "The request's top_p is 0.8" in message) == (CHANGED, True)


STOP = "one of its text"
BEGUN: tuple[tuple[str, dict[str, Any], str | None], ...] = (  # the server of each was told these formats
    ("<think>Let me", {"thinks": True}, STOP),
    (BEGUN_CALL, {"calls": "json"}, None),
    (f"<tool_call>\n{BEGUN_CALL}", {"calls": "hermes"}, STOP),
    (f"<think>Hm</think>{BEGUN_CALL}", {"calls": "json", "thinks": True}, None),
)


@pytest.mark.parametrize(
    ("begun", "server", "stop"),
    [
        *BEGUN,
        *(pytest.param(*case, None if stop else STOP, marks=pytest.mark.slow) for *case, stop in BEGUN),
    ],
)
def test_an_answer_that_goes_on_within_reasoning_or_a_call_is_true_whatever_its_server_was_told(
    small: Path, outcome: Any, begun: str, server: dict[str, Any], stop: str | None
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    body = FREE | {"messages": messages, "max_tokens": 12, "continue_final_message": True, "tools": [WEATHER]}
    body |= {"logit_bias": {str(letter): 100 for letter in b"abcdefgh"}}
    (answer,) = ask_server(small, body, **server)
    message = answer["choices"][0]["message"]
    told = message["tool_calls"][0]["function"] if message.get("tool_calls") else message
    field = "reasoning_content" if server == {"thinks": True} else "arguments"
    assert told[field].removeprefix('{"city": "Ro'), "the answer goes on"
    if stop is not None:  # within reasoning and calls nothing looks for it
        body |= {"stop": told[field].removeprefix('{"city": "Ro')[3:5]}
        (answer,) = ask_server(small, body, **server)
        assert answer["choices"][0]["finish_reason"] == "length"
        message = answer["choices"][0]["message"]
        told = message["tool_calls"][0]["function"] if message.get("tool_calls") else message
    status, sentence = outcome(body, answer)
    assert status == SAME, sentence
    status, sentence = outcome(None, answer)
    assert status in (SAME, NOT_COMPARED), sentence
    told[field] += "!"
    assert outcome(body, answer)[0] == CHANGED
