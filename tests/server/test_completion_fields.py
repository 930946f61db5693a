"""Fields of OpenAI's and vLLM's that change what is told: echo, best_of, ids, stop strings, truncation, usage."""

import json

import msgspec
import pytest

from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.server.limits import Limits
from roofline.server.routes.openai import read

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "tiny", "prompt": "Say"}
TURN = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def events(response) -> list[dict]:
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_an_echoed_prompt_begins_every_choice_once(call):
    body = {**PROMPT, "prompt": ["A", "B"], "n": 2, "echo": True}
    texts = [choice["text"] for choice in call("POST", TEXT, json=body).json()["choices"]]
    assert texts == ["AHello, world."] * 2 + ["BHello, world."] * 2
    streamed = [""] * 4
    for event in events(call("POST", TEXT, json={**body, "stream": True})):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts
    ids = call("POST", TEXT, json={**PROMPT, "prompt": [65, 66], "echo": True}).json()["choices"][0]["text"]
    assert ids == "ABHello, world."


def test_of_a_prompt_that_is_cut_the_text_is_echoed_that_the_model_sees(call):
    def texts(prompt: object) -> list[str]:
        body = {**PROMPT, "prompt": prompt, "truncate_prompt_tokens": 2, "echo": True}
        return [choice["text"] for choice in call("POST", TEXT, json=body).json()["choices"]]

    assert texts(["ABC", "DE"]) == ["BCHello, world.", "DEHello, world."]
    assert texts([65, 66, 67]) == ["BCHello, world."]


@pytest.fixture
def scores_prompts(engine, monkeypatch):
    """The engine tells log-probabilities of prompts: of the token at i -i, and above it an id of probability 1."""
    events = engine._events

    async def scored(ids, params, request_id):
        if params.prompt_logprobs is not None:
            top = ((90, 0.0), (91, -9.0))[: params.prompt_logprobs]
            for start in (1, 2):
                told = [TokenLogprob(ids[i], -float(i), top) for i in range(start, len(ids) if start == 2 else 2)]
                yield Event(request_id, 0, [], prompt_logprobs=told)
        async for event in events(ids, params, request_id):
            yield event

    monkeypatch.setattr(engine, "_events", scored)


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_log_probabilities_begin_with_those_of_the_prompt(call, scores_prompts, stream):
    body = {**PROMPT, "prompt": ["ABC", "DE"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
    response = call("POST", TEXT, json=body)
    told = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(4)]
    for each in events(response) if stream else [response.json()]:
        for choice in each["choices"]:
            for name, values in told[choice["index"]].items():
                values += choice["logprobs"][name]
    top = {"Z": 0.0}
    for index, prompt in enumerate(["ABC", "ABC", "DE", "DE"]):
        assert told[index] == {
            "tokens": [*prompt, "H", "e"],
            "token_logprobs": [None, *(-float(i) for i in range(1, len(prompt))), -0.5, -0.5],
            "top_logprobs": [None, *([top] * (len(prompt) - 1)), {"\0": -1.0}, {"\0": -1.0}],
            "text_offset": list(range(len(prompt) + 2)),
        }


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_told_without_an_answer(call, engine, scores_prompts, stream):
    """As harnesses ask for the log-probabilities of a text."""
    body = {**PROMPT, "prompt": ["ABC", "DE"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    response = call("POST", TEXT, json={**body, "stream_options": {"include_usage": True}} if stream else body)
    assert response.status_code == 200
    told = [["", [], None] for _ in range(4)]
    parts = events(response) if stream else [response.json()]
    for each in parts:
        for choice in each["choices"]:
            told[choice["index"]][0] += choice["text"]
            told[choice["index"]][1] += choice["logprobs"]["token_logprobs"]
            told[choice["index"]][2] = choice["finish_reason"]
    assert told == [
        [text, [None, *(-float(i) for i in range(1, len(text)))], "length"] for text in ("ABC", "ABC", "DE", "DE")
    ]
    assert parts[-1]["usage"]["completion_tokens"] == 0
    assert call("POST", TEXT, json={**PROMPT, "max_tokens": 0}).json()["choices"][0]["text"] == ""
    receipt = call("POST", TEXT, json={**PROMPT, "max_tokens": 0, "receipt": True})
    assert (receipt.status_code, receipt.json()["error"]["param"]) == (400, "receipt")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**TURN, "max_tokens": 0}),
        (CHAT, {**TURN, "max_completion_tokens": 0}),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 0}}),
        ("/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 0}),
        ("/v1/messages", {"model": "tiny", "messages": TURN["messages"], "max_tokens": 0}),
        (TEXT, {**PROMPT, "max_tokens": 0, "use_beam_search": True, "temperature": 0}),
    ],
)
def test_other_answers_have_a_token_at_least(call, engine, path, body):
    assert call("POST", path, json=body).status_code == 400
    assert not engine.submitted


def test_the_longest_answer_that_nobody_gave_is_what_fits(call, engine, make_context):
    engine.description = msgspec.structs.replace(engine.description, max_model_len=20)
    for length, fields, longest in (
        (3, {}, 16), (10, {}, 10), (19, {}, 1), (30, {"truncate_prompt_tokens": 18}, 2), (3, {"min_tokens": 17}, 17),
    ):  # fmt: skip
        body = {**PROMPT, "prompt": ["a", "x" * length], **fields}
        assert call("POST", TEXT, json=body).status_code == 200
        assert engine.submitted[-1][1].max_tokens == longest
    for fields in ({"max_tokens": 2}, {"min_tokens": 2}):
        refused = call("POST", TEXT, json={**PROMPT, "prompt": "x" * 19, **fields})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    searched = read.completion(
        json.dumps({**PROMPT, "prompt": "x" * 17, "use_beam_search": True}).encode(), make_context()
    )
    assert searched.beams.max_tokens == 3


def test_prompt_logprobs_have_vllms_form(call, scores_prompts):
    def entry(logprob, rank, text):
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    expected = [
        None,
        {"97": entry(-1.0, None, "a"), "90": entry(0.0, 1, "Z")},
        {"121": entry(-2.0, None, "y"), "90": entry(0.0, 1, "Z")},
    ]
    choices = call("POST", TEXT, json={**PROMPT, "prompt_logprobs": 1, "n": 2, "max_tokens": 1}).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected] * 2
    assert [choice["logprobs"] for choice in choices] == [None] * 2
    both = {"prompt_logprobs": 1, "echo": True, "logprobs": 2, "max_tokens": 1}
    (choice,) = call("POST", TEXT, json={**PROMPT, **both}).json()["choices"]
    assert choice["prompt_logprobs"] == expected
    assert choice["logprobs"]["top_logprobs"][1] == {"Z": 0.0, "[": -9.0}
    chat = call("POST", CHAT, json={**TURN, "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert [each and list(each) for each in chat["prompt_logprobs"][:3]] == [None, ["117"], ["115"]]  # of <user>Hi
    assert "prompt_logprobs" not in call("POST", CHAT, json={**TURN, "max_tokens": 1}).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x" * 6, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x" * 6, "echo": True, "logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 1, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ],
)
def test_log_probabilities_of_prompts_are_bounded(call, make_context, fields, param):
    context = make_context(limits=Limits(prompt_logprobs=10))
    response = call("POST", TEXT, context=context, json={**PROMPT, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("prompt", "alternatives", "entries"),
    [
        ("x" * 10, 0, 10),
        ("x" * 11, 0, 11),
        ("x" * 5, 1, 10),
        ("x" * 6, 1, 12),
        (["xx", "xxx"], 1, 10),
        (["xx", "xx"], 2, 12),
    ],
)
def test_log_probabilities_of_prompts_are_counted_as_tokens_times_alternatives_and_one(
    call, make_context, scores_prompts, prompt, alternatives, entries
):
    body = {**PROMPT, "prompt": prompt, "prompt_logprobs": alternatives}
    response = call("POST", TEXT, context=make_context(limits=Limits(prompt_logprobs=10)), json=body)
    assert response.status_code == (200 if entries <= 10 else 400)
    if entries > 10:
        assert f"{entries} log-probabilities" in response.json()["error"]["message"]


def test_the_best_of_several_answers_are_told(call, engine, monkeypatch):
    """The likelier of an answer's tokens, the better it is: here the third is, then the second."""
    event = engine._event

    def graded(request_id, index, step, limit, params, prompt):
        made = event(request_id, index, step, limit, params, prompt)
        return made._replace(ids=[65 + index] if made.stop_id is None else made.ids, logprobs=[
            TokenLogprob(made.ids[0], (-3.0, -2.0, -1.0)[index])
        ])  # fmt: skip

    monkeypatch.setattr(engine, "_event", graded)
    body = {**PROMPT, "prompt": ["x", "y"], "max_tokens": 2}
    answer = call("POST", TEXT, json={**body, "best_of": 3, "n": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["CC", "BB"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 2  # all of them were computed
    one = call("POST", TEXT, json={**body, "prompt": "x", "best_of": 3, "logprobs": 0, "echo": False}).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in one] == [[-1.0, -1.0]]
    echoed = call("POST", TEXT, json={**body, "best_of": 3, "n": 1, "echo": True}).json()["choices"]
    assert [choice["text"] for choice in echoed] == ["xCC", "yCC"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_refusals(call, fields, param):
    response = call("POST", TEXT, json={**PROMPT, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_best_of_n_is_n(call, engine):
    assert len(call("POST", TEXT, json={**PROMPT, "best_of": 2, "n": 2, "stream": True}).text) > 0
    assert engine.submitted[0][1].logprobs is None


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_ids_of_prompt_and_answer(call, path):
    body = {**(PROMPT if path == TEXT else TURN), "return_token_ids": True, "max_tokens": 3}
    (choice,) = call("POST", path, json=body).json()["choices"]
    prompt = "Say" if path == TEXT else "<user>Hi"
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (list(b"Hel"), list(prompt.encode()))
    choices = [event["choices"][0] for event in events(call("POST", path, json={**body, "stream": True}))]
    assert [token for each in choices for token in each.get("token_ids", [])] == list(b"Hel")
    assert [each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each] == [list(prompt.encode())]
    assert "token_ids" not in call("POST", path, json={**body, "return_token_ids": False}).text


@pytest.mark.parametrize(("wanted", "text"), [(True, "Hello,"), (False, "Hello"), (None, "Hello")])
def test_the_stop_string_is_told_where_it_is_wanted(call, wanted, text):
    body = {**PROMPT, "stop": ",", "include_stop_str_in_output": wanted}
    assert call("POST", TEXT, json=body).json()["choices"][0]["text"] == text


def test_special_tokens_are_text_where_they_are_wanted(call, make_context):
    context, shown = make_context(), []
    stream = context.text.stream
    context.text.stream = lambda *args, **options: (shown.append(options["shown"]), stream(*args, **options))[1]
    for wanted in (None, True, False):
        call("POST", TEXT, json={**PROMPT, "skip_special_tokens": wanted}, context=context)
    assert shown == [frozenset(), frozenset(), frozenset([256])]


def test_a_prompt_without_the_model_s_own_beginning(make_context, call):
    context, seen = make_context(), []
    context.text.encode = lambda text, most, *, add_special, parse_special: (seen.append((most, add_special)), [1])[1]
    for wanted in (None, True, False):
        call("POST", TEXT, json={**PROMPT, "add_special_tokens": wanted}, context=context)
    assert seen == [(1000, True), (1000, True), (1000, False)]


def test_a_prompt_is_cut_where_the_request_says_so_and_the_usage_tells(call, engine):
    usage = call("POST", TEXT, json={**PROMPT, "prompt": ["abcdef", "gh"], "truncate_prompt_tokens": 3}).json()["usage"]
    assert [bytes(ids) for ids, _ in engine.submitted] == [b"def", b"gh"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "truncated_tokens": 3}
    usage = call("POST", TEXT, json={**PROMPT, "truncate_prompt_tokens": 3}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    long = {**TURN, "messages": [{"role": "user", "content": "x" * 5000}], "truncate_prompt_tokens": 10}
    assert call("POST", CHAT, json=long).status_code == 200
    assert bytes(engine.submitted[-1][0]) == b"x" * 10


def test_every_event_tells_the_usage_where_it_is_wanted(call):
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = events(call("POST", TEXT, json={**PROMPT, "max_tokens": 3, "stream": True, "stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in told] == [1, 2, 3, 3]
    options["continuous_usage_stats"] = False
    told = events(call("POST", TEXT, json={**PROMPT, "max_tokens": 3, "stream": True, "stream_options": options}))
    assert [event["usage"] for event in told[:-1]] == [None] * 3


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_ids_whose_text_is_kept_back_are_told_with_the_next(call, engine, path):
    """Bytes of one character come a token at a time, and only the last of them makes text."""
    engine.answer = "a😀b".encode()
    body = {**(PROMPT if path == TEXT else TURN), "return_token_ids": True, "max_tokens": 6, "stream": True}
    choices = [event["choices"][0] for event in events(call("POST", path, json=body))]
    assert [token for each in choices for token in each.get("token_ids", [])] == list(engine.answer)


@pytest.fixture
def ranks_ids(engine, monkeypatch):
    """After any prompt id 97 + its length is the likeliest, then 65, then the end."""

    async def events(ids, params, request_id):
        engine.submitted.append((list(ids), params))
        top = ((97 + len(ids), -0.5), (65, -1.2), (256, -1.5))
        logprobs = [TokenLogprob(top[0][0], -0.5, top[: params.logprobs])]
        yield Event(request_id, 0, [top[0][0]], logprobs, "length", None, None, Usage(len(ids), 1, 0, 0))

    async def submit(ids, params, *, eos_ids, request_id, salt=""):
        return events(ids, params, request_id)

    monkeypatch.setattr(engine, "submit", submit)


def test_a_beam_search_tells_the_best_of_its_beams(call, engine, ranks_ids):
    body = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 2, "length_penalty": 0, "temperature": 0}
    answer = call("POST", TEXT, json={**PROMPT, **body, "prompt": "", "echo": True, "logprobs": 0})
    assert answer.json()["error"]["param"] in ("prompt", "prompt_logprobs")
    answer = call("POST", TEXT, json={**PROMPT, **body, "logprobs": 1, "stop_token_ids": [65]}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["de", ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"d": -0.5}, {"e": -0.5}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert {(params.max_tokens, params.logprobs) for _, params in engine.submitted} == {(1, 5)}
    chat = call("POST", CHAT, json={**TURN, "use_beam_search": True, "n": 2, "max_tokens": 1}).json()
    assert [choice["message"]["content"] for choice in chat["choices"]] == [chr(97 + len("<user>Hi")), "A"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"stop": "x"}, "stop"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"receipt": True}, "receipt"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 16, "stop_token_ids": [1, 2, 3, 4]}, "best_of"),
        ({"n": 16, "stop_token_ids": [1, 2, 3, 4]}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_a_beam_search_cannot_honour_is_refused(call, fields, param):
    response = call("POST", TEXT, json={**PROMPT, "use_beam_search": True, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
