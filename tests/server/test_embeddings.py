"""POST /v1/embeddings, by OpenAI's own package and by hand."""

import asyncio
import base64
import math
import struct
from dataclasses import replace

import httpx
import msgspec
import openai
import pytest

from roofline.engine.pooling import Pooling
from roofline.server.app import create_app


def unit(*numbers):
    length = math.sqrt(sum(x * x for x in numbers))
    return pytest.approx([x / length for x in numbers], rel=1e-6)


def test_openais_package_gets_vectors_in_both_encodings(live, engine):
    client = openai.OpenAI(base_url=live(pooling=Pooling("mean")) + "/v1", api_key="none")
    by_default = client.embeddings.create(model="tiny", input=["ab", "c"])  # it asks for base64 and decodes it
    numbers = client.embeddings.create(model="tiny", input=["ab", "c"], encoding_format="float")
    assert [each.embedding for each in by_default.data] == [each.embedding for each in numbers.data]
    assert [each.index for each in numbers.data] == [0, 1]
    assert numbers.data[0].embedding == unit(2, ord("a"), 3)
    assert (numbers.usage.prompt_tokens, numbers.usage.total_tokens) == (3, 3)
    assert numbers.model == "tiny"
    raw = client.embeddings.create(model="tiny", input="ab", encoding_format="base64").data[0].embedding
    assert list(struct.unpack("<3f", base64.b64decode(raw))) == numbers.data[0].embedding
    cut = client.embeddings.create(model="tiny", input=[97, 98], dimensions=2, encoding_format="float", user="me")
    assert cut.data[0].embedding == unit(2, ord("a"))
    assert len(client.embeddings.create(model="tiny", input=[[1, 2], [3]]).data) == 2
    assert {params.pooling.kind for _, params in engine.submitted} == {"mean"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": "a" * 1001}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"user": "x" * 257}, "user"),
        ({"messages": []}, "messages"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(call, make_context, limits, change, param):
    context = make_context(limits=replace(limits, inputs=8))
    answer = call("POST", "/v1/embeddings", json={"model": "tiny", "input": "ab"} | change, context=context)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    neutral = {"truncate_prompt_tokens": None, "normalize": True, "encoding_format": None, "dimensions": None}
    assert call("POST", "/v1/embeddings", json={"model": "tiny", "input": "ab"} | neutral).status_code == 200


@pytest.mark.parametrize(("dimensions", "status"), [(-1, 400), (0, 400), (1, 200), (3, 200)])
def test_dimensions_below_one_are_refused_before_anything_is_computed(call, engine, dimensions, status):
    answer = call("POST", "/v1/embeddings", json={"model": "tiny", "input": "ab", "dimensions": dimensions})
    assert (answer.status_code, len(engine.submitted)) == (status, status == 200)
    if status == 200:
        assert len(answer.json()["data"][0]["embedding"]) == dimensions
    else:
        assert answer.json()["error"]["message"] == f"dimensions: {dimensions} is not at least 1."


def test_where_the_engine_gives_no_hidden_states_it_says_what_does(call, engine):
    engine.description = msgspec.structs.replace(engine.description, gives_hidden=False)
    answer = call("POST", "/v1/embeddings", json={"model": "tiny", "input": "ab"})
    assert answer.status_code == 400
    assert "backend=cpu" in answer.json()["error"]["message"]
    assert engine.submitted == []


def test_an_engine_that_fails_is_no_vector(call, engine):
    engine.error = "it broke"
    answer = call("POST", "/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
    assert engine.open == set()


def test_of_many_inputs_a_few_are_with_the_engine_and_a_client_that_leaves_ends_all(make_context, engine):
    engine.gate.clear()

    async def program():
        transport = httpx.ASGITransport(create_app(make_context()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = asyncio.create_task(client.post("/v1/embeddings", json={"model": "tiny", "input": ["a"] * 50}))
            while len(engine.open) < 16:
                await asyncio.sleep(0.001)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(engine.open) == 16
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        assert engine.open == set()

    asyncio.run(program())
    assert len(engine.submitted) == 16
    assert len(engine.aborted) >= 16
