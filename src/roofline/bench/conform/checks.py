"""The checks: each is a function of a server that returns what it saw, and raises Violation or Missing."""

import json
import time
from collections.abc import Callable

import httpx

from roofline.bench.conform.client import (
    CHAT,
    RESPONSES,
    TEXT,
    ConformAnswer,
    Missing,
    Server,
    Violation,
    json_of,
    output_of,
    response_text,
)
from roofline.common.json_types import JsonObject

Check = Callable[[Server], str]
GREEDY: JsonObject = {"temperature": 0, "seed": 1}
STORY = [{"role": "user", "content": "Tell a short story about a fox and a well."}]
UNICODE = [{"role": "user", "content": "Repeat exactly: 😀 naïve 東京 🏳️‍🌈 Straße"}]
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False,
}  # fmt: skip
LONGEST_WAIT = 10.0  # seconds within which a cancelled request has ended


def lists_models(server: Server) -> str:
    """GET /models lists the models, and each has a card of its own."""
    name = server.find_model()
    response = server.http.get(f"{server.url}/models/{name}")
    if response.status_code == 404:
        raise Missing("GET /models/NAME is not there")
    card = json_of(response)
    expect(card.get("id") == name, f"the card of {name!r} is of {card.get('id')!r}")
    return name


def streams_a_chat_as_it_answers(server: Server) -> str:
    """The events of a greedy chat put together are the complete answer: text, finish reason, tokens."""
    return _same(server, CHAT, {"messages": STORY, "max_tokens": 48})


def streams_a_completion_as_it_answers(server: Server) -> str:
    """The same for a completion."""
    return _same(server, TEXT, {"prompt": "Once upon a time", "max_tokens": 48})


def never_cuts_a_character(server: Server) -> str:
    """Every event is UTF-8 by itself, and no stream has a replacement character that the complete answer lacks."""
    body = {"messages": UNICODE, "max_tokens": 64, **GREEDY}
    text, streamed = server.complete(CHAT, body).first.text, server.stream(CHAT, body).first.text
    expect(text == streamed, f"{streamed!r} is streamed, where {text!r} is the answer")
    return f"{len(text.encode()) - len(text)} bytes beyond ASCII"


def ends_at_stop_strings(server: Server) -> str:
    """An answer ends before its stop string, no part of which is told, wherever tokens cut it."""
    body = {"messages": STORY, "max_tokens": 48, **GREEDY}
    text = server.complete(CHAT, body).first.text
    expect(len(text) >= 16, f"the answer is too short to be stopped: {text!r}")
    tried = 0
    for start in (len(text) // 4, len(text) // 2):
        for length in (1, 3, 7):
            stop = text[start : start + length]
            expected = text[: text.index(stop)]
            for answer in (
                server.complete(CHAT, {**body, "stop": [stop]}),
                server.stream(CHAT, {**body, "stop": stop}),
            ):
                _expect_text(answer, expected, f"with stop {stop!r}")
                reason = answer.first.finish_reason
                expect(reason == "stop", f"with stop {stop!r} the finish reason is {reason!r}")
            tried += 1
    return f"{tried} stop strings"


def counts_tokens(server: Server) -> str:
    """max_tokens is the most; the usage counts prompt, answer and their sum, in a stream with include_usage too."""
    body = {"messages": STORY, "max_tokens": 5, **GREEDY}
    answer = server.complete(CHAT, body)
    expect(answer.first.finish_reason == "length", f"the finish reason is {answer.first.finish_reason!r}, not 'length'")
    usage = answer.usage or {}
    expect(usage.get("completion_tokens") == 5, f"of 5 tokens {usage.get('completion_tokens')} are counted")
    total = usage.get("prompt_tokens", 0) + 5
    expect(usage.get("total_tokens") == total, f"the total is {usage.get('total_tokens')}, not {total}")
    streamed = server.stream(CHAT, {**body, "stream_options": {"include_usage": True}}).usage
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    expect(streamed is not None, "a stream with include_usage has no usage")
    assert streamed is not None
    expect(all(streamed.get(name) == usage.get(name) for name in names), f"a stream counts {streamed}, not {usage}")
    return f"{usage.get('prompt_tokens')} + 5 tokens"


def gives_n_answers(server: Server) -> str:
    """n: 2 gives two choices, all at once and in a stream."""
    body = {"messages": STORY, "max_tokens": 8, "n": 2, "seed": 3, "temperature": 1}
    for answer in (server.complete(CHAT, body), server.stream(CHAT, body)):
        expect(sorted(answer.choices) == [0, 1], f"the choices are {sorted(answer.choices)}, not 0 and 1")
    return "2 choices"


def repeats_with_a_seed(server: Server) -> str:
    """The same seed gives the same answer at temperature 1, another seed another one."""
    body = {"messages": STORY, "max_tokens": 32, "temperature": 1}
    texts = [server.complete(CHAT, {**body, "seed": seed}).first.text for seed in (7, 7, 8, 9)]
    expect(texts[0] == texts[1], "two answers with one seed differ")
    expect(len(set(texts)) > 1, "the seed changes nothing")
    return "4 answers"


def tells_log_probabilities(server: Server) -> str:
    """The tokens of the log-probabilities spell the answer, all at once and in a stream."""
    body = {"messages": UNICODE, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, **GREEDY}
    for answer in (server.complete(CHAT, body), server.stream(CHAT, body)):
        spelled, text = answer.first.tokens.decode("utf-8", "replace"), answer.first.text
        expect(spelled.strip() == text.strip(), f"the tokens spell {spelled!r}, the text is {text!r}")
    return "16 tokens"


def assembles_tool_calls(server: Server) -> str:
    """A call that is required comes with an id, a name and JSON; the deltas of a stream make the same call."""
    body = {"messages": [{"role": "user", "content": "What is the weather in Ulm?"}], "max_tokens": 96, **GREEDY}
    body |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    calls = []
    for answer in (server.complete(CHAT, body), server.stream(CHAT, body)):
        expect(bool(answer.first.calls), f"no tool is called: {answer.first.text!r}")
        call = answer.first.calls[0]
        expect(
            bool(call["id"]) and call["name"] == "weather", f"the call has id {call['id']!r} and name {call['name']!r}"
        )
        arguments = _json(call["arguments"])
        expect(isinstance(arguments, dict), f"the arguments are no JSON object: {call['arguments']!r}")
        calls.append(call["arguments"])
    expect(calls[0] == calls[1], f"the stream calls with {calls[1]!r}, the answer with {calls[0]!r}")
    return calls[0]


def holds_to_a_schema(server: Server) -> str:
    """response_format json_schema gives JSON of that schema."""
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": "How old is Ann?"}], "max_tokens": 64, **GREEDY}
    text = server.complete(CHAT, {**body, "response_format": form}).first.text
    value = _json(text)
    expect(
        isinstance(value, dict) and set(value) == {"age"} and isinstance(value["age"], int), f"the answer is {text!r}"
    )
    return text.strip()


def goes_on_from_a_response(server: Server) -> str:
    """POST /responses: the events of a stream put together are the complete response, a kept one is there by its id,
    and going on from it by previous_response_id is answered as the whole conversation sent at once."""
    body = {"input": STORY[0]["content"], "max_output_tokens": 24, "temperature": 0}
    first = server.response(body)
    text = response_text(first)
    expect(bool(text), "the response has no text")
    stored = server.http.get(f"{server.url}{RESPONSES}/{first.get('id')}")
    expect(stored.status_code == 200, f"the response is not there by its id: status {stored.status_code}")
    stored_text = response_text(json_of(stored))
    expect(stored_text == text, f"by its id the text is {stored_text!r}, not {text!r}")
    streamed = server.streamed_response(body)
    expect(streamed == text, f"in the stream the text is {streamed!r}, not {text!r}")
    question = {"role": "user", "content": "And then?"}
    chained = server.response({**body, "input": [question], "previous_response_id": first.get("id")})
    conversation = [STORY[0], *output_of(first), question]
    at_once = server.response({**body, "input": conversation, "store": False})
    counts = [(answer.get("usage") or {}).get("input_tokens") for answer in (chained, at_once)]
    expect(counts[0] == counts[1], f"the prompt has {counts[0]} tokens where it goes on, and {counts[1]} at once")
    texts = response_text(chained), response_text(at_once)
    expect(texts[0] == texts[1], f"going on gives {texts[0]!r}, all at once {texts[1]!r}")
    return f"{counts[0]} tokens of prompt"


def refuses_what_is_wrong(server: Server) -> str:
    """Wrong values are answered with a 4xx and a message, and the server goes on."""
    wrong: list[tuple[str, JsonObject]] = [
        (CHAT, {"messages": "Hi"}),
        (CHAT, {}),
        (CHAT, {"messages": STORY, "max_tokens": -1}),
        (CHAT, {"messages": STORY, "max_tokens": "many"}),
        (CHAT, {"messages": STORY, "temperature": -1}),
        (CHAT, {"messages": STORY, "top_p": 7}),
        (CHAT, {"messages": STORY, "n": 100_000}),
        (CHAT, {"messages": STORY, "logit_bias": {"99999999": 1}}),
        (CHAT, {"messages": [{"role": "robot", "content": "Hi"}]}),
        (TEXT, {"prompt": {"a": 1}}),
        (TEXT, {"prompt": "x " * 500_000}),
    ]
    faults = []
    for path, body in wrong:
        try:
            server.refused(path, body)
        except (Violation, httpx.TransportError) as error:
            changed = {name: value for name, value in body.items() if value is not STORY}
            faults.append(f"{path} {json.dumps(changed)[:60]}: {error}")
    response = server.http.post(
        f"{server.url}{CHAT}", content=b'{"model": ', headers={"Content-Type": "application/json"}
    )
    if not 400 <= response.status_code < 500:
        faults.append(f"a body that is no JSON: status {response.status_code}")
    server.complete(CHAT, {"messages": STORY, "max_tokens": 1})
    expect(not faults, "; ".join(faults))
    return f"{len(wrong) + 1} wrong requests"


def refuses_an_unknown_model(server: Server) -> str:
    """A model that is not there is a 404, and never answered by another one."""
    error = server.refused(CHAT, {"model": "no-such-model", "messages": STORY, "max_tokens": 1})
    expect(error["status"] == 404, f"status {error['status']}, where 404 is due")
    return str(error["message"])[:80]


def frees_what_is_cancelled(server: Server) -> str:
    """A stream whose client leaves is ended: the next answer does not wait for it."""
    started = time.monotonic()
    server.complete(CHAT, {"messages": STORY, "max_tokens": 2, **GREEDY})
    alone = time.monotonic() - started
    for _ in range(8):
        with server.events(CHAT, {"messages": STORY, "max_tokens": 500, "temperature": 1}) as events:
            next(events, None)
    started = time.monotonic()
    server.complete(CHAT, {"messages": STORY, "max_tokens": 2, **GREEDY})
    after = time.monotonic() - started
    expect(
        after < alone + LONGEST_WAIT,
        f"after eight streams that were left an answer takes {after:.1f} s, {alone:.1f} alone",
    )
    return f"{after:.2f} s, {alone:.2f} s before"


def expect(holds: bool, problem: str) -> None:
    """Raise Violation unless a promise holds."""
    if not holds:
        raise Violation(problem)


def _same(server: Server, path: str, body: JsonObject) -> str:
    body = {**body, **GREEDY}
    answer, streamed = server.complete(path, body), server.stream(path, body)
    _expect_text(streamed, answer.first.text, "in the stream")
    reasons = answer.first.finish_reason, streamed.first.finish_reason
    expect(
        reasons[0] == reasons[1] is not None,
        f"the finish reasons are {reasons[0]!r} and, in the stream, {reasons[1]!r}",
    )
    return f"{len(answer.first.text)} characters"


def _expect_text(answer: ConformAnswer, text: str, where: str) -> None:
    expect(answer.first.text == text, f"{where} the text is {answer.first.text!r}, not {text!r}")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


CHECKS: tuple[Check, ...] = (
    lists_models, streams_a_chat_as_it_answers, streams_a_completion_as_it_answers, never_cuts_a_character,
    ends_at_stop_strings, counts_tokens, gives_n_answers, repeats_with_a_seed, tells_log_probabilities,
    assembles_tool_calls, holds_to_a_schema, goes_on_from_a_response, refuses_what_is_wrong, refuses_an_unknown_model,
    frees_what_is_cancelled,
)  # fmt: skip
