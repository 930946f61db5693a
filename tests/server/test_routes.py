"""The OpenAI routes over a fake engine."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from fastapi import APIRouter, Request

from roofline.engine.events import Event
from roofline.engine.process.messages import Checked
from roofline.server import app
from roofline.server.keys import LOCAL
from roofline.server.reading import BodyReading
from roofline.server.respond import on_thread_if_large
from roofline.server.response import CancelledWithClient

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Hi", "max_tokens": 100}


def events(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_chat_answers_in_openai_shape(call, engine):
    answer = call("POST", "/v1/chat/completions", json=CHAT).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"] == "feedc0de"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 14, 22)
    assert bytes(engine.submitted[0][0]) == b"<user>Hi"
    assert not engine.open
    assert not engine.aborted


def test_stream_is_role_deltas_finish_usage_done(call):
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = call("POST", "/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_a_stream_has_usage_where_it_is_wanted_alone(call, options):
    chunks = events(call("POST", "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options}))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("extra", [{}, {"stop": "world"}, {"stop": [", w"]}, {"max_tokens": 3}, {"n": 3}])
@pytest.mark.parametrize("answer", [b"Hello, world.", "Grüße 👋🏽 世界, world".encode()])
def test_stream_and_whole_are_equal(call, engine, extra, answer):
    engine.answer = answer
    whole = call("POST", "/v1/chat/completions", json={**CHAT, **extra}).json()["choices"]
    streamed = {}
    for chunk in events(call("POST", "/v1/chat/completions", json={**CHAT, **extra, "stream": True})):
        choice = chunk["choices"][0]
        text, _ = streamed.get(choice["index"], ("", None))
        streamed[choice["index"]] = (text + choice["delta"].get("content", ""), choice["finish_reason"])
    assert streamed == {c["index"]: (c["message"]["content"], c["finish_reason"]) for c in whole}
    assert len(whole) == extra.get("n", 1)


def test_stop_string_ends_bills_and_aborts(call, engine):
    answer = call("POST", "/v1/chat/completions", json={**CHAT, "stop": [", "]}).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 7
    assert engine.aborted == [(f"{answer['id'].removeprefix('chatcmpl-')}-0", 0)]
    assert not engine.open


def test_events_that_end_before_their_answer_are_the_engines_failure(call, engine):
    async def events(ids, params, request_id):
        yield Event(request_id, 0, [72])

    engine._events = events
    response = call("POST", "/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")
    assert len(engine.aborted) == 1


@pytest.mark.parametrize(("error", "status"), [(None, 200), ("out of luck", 503)])
def test_the_engines_stream_is_closed_however_an_answer_ends(call, engine, error, status):
    engine.error, submit, closes = error, engine.submit, []

    class Stream:
        def __init__(self, events):
            self.events = events

        def __aiter__(self):
            return self.events

        async def aclose(self):
            closes.append(self)
            await self.events.aclose()

    async def submit_stream(ids, params, **options):
        return Stream(await submit(ids, params, **options))

    engine.submit = submit_stream
    assert call("POST", "/v1/chat/completions", json=CHAT).status_code == status
    assert len(closes) == 1


def test_a_route_with_typed_parameters_refuses_in_the_one_form(call, monkeypatch):
    async def typed(number: int) -> None:
        """A route as somebody may add it."""

    monkeypatch.setattr(app, "ROUTERS", [router := APIRouter()])
    router.get("/typed")(typed)
    response = call("GET", "/typed?number=x")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


def test_chat_logprobs(call):
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    content = call("POST", "/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert content[0]["bytes"] == [72]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-1.0, -2.0]


def test_completion_logprobs_have_offsets(call):
    body = {**TEXT, "logprobs": 1, "max_tokens": 3}
    logprobs = call("POST", "/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l"]
    assert logprobs["text_offset"] == [0, 1, 2]
    streamed = [
        c["choices"][0]["logprobs"] for c in events(call("POST", "/v1/completions", json={**body, "stream": True}))
    ]
    assert [at for part in streamed for at in part["text_offset"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "count"), [("Hi", 1), (["Hi", "You"], 2), ([72, 105], 1), ([[72], [105, 106], [107]], 3)]
)
def test_completion_prompts_of_every_form(call, prompt, count):
    answer = call("POST", "/v1/completions", json={**TEXT, "prompt": prompt, "n": 2}).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    assert {choice["text"] for choice in answer["choices"]} == {"Hello, world."}


def test_completion_defaults_to_sixteen_tokens(call, engine):
    call("POST", "/v1/completions", json={"model": "tiny", "prompt": "Hi"})
    assert engine.submitted[0][1].max_tokens == 16


def test_fields_reach_the_engine(call, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 2,
    }
    call("POST", "/v1/chat/completions", json={**CHAT, **fields, "logit_bias": {"5": 1.5}, "stop_token_ids": [9]})
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == ((5, 1.5),)
    assert params.stop_token_ids == (9,)


def test_text_parts_and_developer_role(call, engine):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "refusal": None},
    ]
    assert call("POST", "/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == 200
    assert bytes(engine.submitted[0][0]) == b"<system>Be brief.<user>a\nb"


def test_models(call):
    listed = call("GET", "/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert call("GET", "/v1/models/tiny").json()["max_model_len"] == 1000
    assert call("GET", "/v1/models/other").status_code == 404


def test_the_context_of_a_model_is_known_once_an_engine_is_up(call, engine):
    engine.up = False
    assert call("GET", "/v1/models/tiny").json()["max_model_len"] is None
    engine.up, engine.description = True, None
    assert call("GET", "/v1/models/tiny").json()["max_model_len"] is None
    assert call("GET", "/ready").status_code == 503


@pytest.mark.parametrize(("size", "beside"), [(16 << 10, False), ((16 << 10) + 1, True)])
def test_a_large_body_is_encoded_beside_the_event_loop(call, make_context, size, beside):
    context, encodes_in = make_context(), []
    encode = context.text.encode
    context.text.encode = lambda text, most, **_: (encodes_in.append(threading.current_thread()), encode("Hi"))[1]
    head, tail = b'{"model": "tiny", "prompt": "', b'"}'
    body = head + b"x" * (size - len(head) - len(tail)) + tail
    headers = {"content-type": "application/json"}
    assert call("POST", "/v1/completions", content=body, headers=headers, context=context).status_code == 200
    assert [thread is not threading.main_thread() for thread in encodes_in] == [beside]


@pytest.mark.parametrize(("size", "beside"), [(1 << 10, False), ((1 << 10) + 1, True)])
def test_a_body_of_many_short_texts_is_read_beside_the_event_loop(call, make_context, size, beside):
    context, encodes_in = make_context(), []
    encode = context.text.encode
    context.text.encode = lambda text, most, **_: (encodes_in.append(threading.current_thread()), encode("Hi"))[1]
    head, tail = b'{"model": "tiny", "input": "', b'"}'
    body = head + b"x" * (size - len(head) - len(tail)) + tail
    headers = {"content-type": "application/json"}
    assert call("POST", "/v1/embeddings", content=body, headers=headers, context=context).status_code == 200
    assert [thread is not threading.main_thread() for thread in encodes_in] == [beside]


@pytest.mark.parametrize(("size", "together"), [(1 << 20, True), ((1 << 20) + 1, False), ((2 << 20) + 1, False)])
@pytest.mark.parametrize("more", [0, 7])
def test_bodies_beyond_a_mebibyte_are_read_one_at_a_time(make_context, size, together, more):
    """more: bytes that are read beside the body."""
    both = threading.Barrier(2)

    def read(raw, served):
        try:
            return both.wait(20.0 if together else 0.2) >= 0
        except threading.BrokenBarrierError:
            return False

    async def run():
        state = SimpleNamespace(context=make_context(), principal=LOCAL)
        app = SimpleNamespace(state=SimpleNamespace(reading=BodyReading(64 << 20)))
        request = SimpleNamespace(app=app, state=state)
        reads = (on_thread_if_large(request, b"x" * (size - more), read, more) for _ in range(2))
        return await asyncio.gather(*reads)

    assert asyncio.run(run()) == [together] * 2


def test_an_engine_that_computes_nothing_is_not_ready_while_the_server_is_alive(call, engine, make_context):
    context = make_context(stall_seconds=4.0, canary_seconds=30.0)

    def shown():
        up = 'roofline:engine_up{model_name="tiny"} '
        metrics = call("GET", "/metrics", context=context).text
        statuses = [call("GET", path, context=context).status_code for path in ("/health", "/ready")]
        return statuses, float(metrics[metrics.index(up) + len(up) :].split()[0])

    engine.stalled_for = 4.0
    assert shown() == ([200, 200], 1.0)
    engine.stalled_for = 4.5
    assert shown() == ([200, 503], 0.0)
    error = call("GET", "/ready", context=context).json()["error"]
    assert (error["code"], error["message"]) == (
        "engine_stalled",
        "The engine is not ready: the engine has computed nothing.",
    )
    assert engine.proofs == [30.0] * 3, "each look at /ready, and no other, has an idle engine compute a token"


def test_without_canaries_nothing_is_computed_unasked(call, engine, make_context):
    assert call("GET", "/ready", context=make_context(canary_seconds=0.0)).status_code == 200
    assert engine.proofs == []


def test_probes_may_ask_for_the_head_alone(call, engine):
    assert (call("HEAD", "/health").status_code, call("HEAD", "/health").text) == (200, "")
    assert call("HEAD", "/ready").status_code == 200
    engine.up = False
    assert call("HEAD", "/ready").status_code == 503


def test_health_and_ready(call, engine):
    assert call("GET", "/health").status_code == 200
    told = call("GET", "/ready").json()
    assert (told["system_fingerprint"], told["exact"], told["weights_checked"]) == ("feedc0de", False, False)
    engine.checked = Checked(None)
    assert call("GET", "/ready").json()["weights_checked"] is True
    engine.checked = Checked("B is a bundle that cannot be used: weights.bin is not as it was written.")
    changed = call("GET", "/ready")
    assert (changed.status_code, changed.json()["error"]["code"]) == (503, "weights_changed")
    assert "weights.bin is not as it was written" in changed.json()["error"]["message"]
    engine.checked = None
    engine.up = False
    assert call("GET", "/health").status_code == 200
    not_ready = call("GET", "/ready")
    assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "1")
    engine.problem = "the engine process answered nothing for 15 s"
    assert "answered nothing for 15 s." in call("GET", "/ready").json()["error"]["message"]
    assert call("POST", "/v1/chat/completions", json=CHAT).status_code == 503


def test_requests_wait_for_an_engine_where_a_supervisor_has_others(call, make_context, engine):
    engine.up = False
    context = make_context(waits_for_engine=True)
    assert (
        call("POST", "/v1/chat/completions", json=CHAT, context=context).status_code == 200
    )  # the engine was given it
    assert call("GET", "/ready", context=context).status_code == 503
    engine.description = None  # nothing was ever loaded
    assert call("POST", "/v1/chat/completions", json=CHAT, context=context).status_code == 503


def test_engine_error_before_and_within_a_stream(call, engine):
    engine.error = "0xdeadbeef: secret detail"
    whole = call("POST", "/v1/chat/completions", json=CHAT)
    assert whole.status_code == 503
    chunks = events(call("POST", "/v1/chat/completions", json={**CHAT, "stream": True}))
    assert chunks[-1]["error"]["code"] == "engine_failed"
    assert "secret" not in whole.text + json.dumps(chunks)


@pytest.mark.parametrize("error", [None, ValueError("in the middle")])
def test_the_last_message_of_a_stream_alone_ends_it(error):
    sent = []

    async def chunks():
        yield b"one"
        if error is not None:
            raise error

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def answer():
        scope = {"type": "http"}
        await CancelledWithClient(Request(scope, receive), chunks=chunks, failure=lambda error: b"failed")(
            scope, receive, send
        )

    asyncio.run(answer())
    start, *bodies = sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert [body["body"][-8:] for body in bodies] == [b"one", *([b"failed"] if error else []), b""]


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_user_names_the_request_in_the_log(call, engine, caplog, field, route):
    caplog.set_level("DEBUG", "roofline.server")
    body = {**(CHAT if route.startswith("chat") else TEXT), field: "ann\nERROR forged"}
    assert call("POST", f"/v1/{route}", json=body).status_code == 200
    assert "of 'ann\\nERROR forged': prompts 1" in caplog.text
    engine.error = "out of luck"
    assert call("POST", f"/v1/{route}", json=body).status_code == 503
    failures = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(failures) == 1
    assert failures[0].endswith("of 'ann\\nERROR forged': prompt 0 failed in the engine: out of luck")


def test_metrics_use_vllm_names(call, make_context):
    context = make_context()
    call("POST", "/v1/chat/completions", json=CHAT, context=context)
    text = call("GET", "/metrics", context=context).text
    label = '{model_name="tiny"}'
    for line in (
        f"vllm:kv_cache_usage_perc{label} 0.25",
        f"vllm:prompt_tokens_total{label} 8.0",
        f"roofline:engine_up{label} 1.0",
        f"vllm:generation_tokens_total{label} 14.0",
        f"vllm:time_to_first_token_seconds_count{label} 1.0",
        f"vllm:inter_token_latency_seconds_count{label} 13.0",
        f"vllm:e2e_request_latency_seconds_count{label} 1.0",
        f"vllm:num_requests_running{label} 0.0",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:prefix_cache_queries_total{label} 0.0",
        f"vllm:prefix_cache_hits_total{label} 0.0",
        f"vllm:num_preemptions_total{label} 2.0",
        f"vllm:spec_decode_num_drafts_total{label} 4.0",
        f"vllm:spec_decode_num_draft_tokens_total{label} 16.0",
        f"vllm:spec_decode_num_accepted_tokens_total{label} 9.0",
        f"roofline:spec_decode_num_held_total{label} 5.0",
        f"vllm:request_prompt_tokens_sum{label} 8.0",
        f"vllm:request_generation_tokens_sum{label} 14.0",
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
    ):
        assert line in text.splitlines(), line


def test_stats(call):
    stats = call("GET", "/stats").json()
    assert stats["engine"]["pages_used"] == 3
    assert stats["engine"]["acceptance"] == 9 / 16
    assert stats["limits"]["n"] == 16
