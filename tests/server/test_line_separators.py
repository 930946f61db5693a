"""Characters that readers of lines take for line ends, in answers that are read by lines: each client sees them all."""

import asyncio
import json

import anthropic
import httpx
import msgspec
import ollama
import openai
import pytest

from roofline.server.response import json_line, one_line, sse
from tests.server.batch_client import CHAT, create, ended, line, serve

TEXT = "a\u2028b\u2029c\u0085d\u000be\u000cf\u001cg\u2027h\u202ai\u0084j\u0086k"
ASK = [{"role": "user", "content": "Hi"}]
STREAMS = {
    "/v1/chat/completions": {"model": "tiny", "messages": ASK, "stream": True},
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 99},
    "/v1/responses": {"model": "tiny", "input": "Hi", "stream": True},
    "/v1/messages": {"model": "tiny", "messages": ASK, "stream": True, "max_tokens": 99},
    "/api/chat": {"model": "tiny", "messages": ASK},
    "/api/generate": {"model": "tiny", "prompt": "Hi"},
    "/generate_stream": {"inputs": "Hi", "parameters": {"max_new_tokens": 99}},
    "/v2/models/tiny/generate_stream": {"text_input": "Hi", "max_tokens": 99},
}


@pytest.fixture
def address(live, engine):
    engine.answer = TEXT.encode()
    return live()


@pytest.mark.parametrize("path", STREAMS)
def test_each_line_of_a_stream_is_whole(address, path):
    lines = []
    with httpx.stream("POST", address + path, json=STREAMS[path], timeout=20) as response:
        assert response.status_code == 200
        lines = list(response.iter_lines())
    data = [line.removeprefix("data:").strip() for line in lines if line and not line.startswith("event:")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    assert len(events) >= len(TEXT)
    assert "\u2028" in json.dumps(events, ensure_ascii=False)
    assert not any(end in line for line in lines for end in "\u2028\u2029\u0085")


def test_clients_read_the_text(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
    chunks = client.chat.completions.create(model="tiny", messages=ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    with client.responses.stream(model="tiny", input="Hi") as stream:
        assert stream.get_final_response().output_text == TEXT
    with anthropic.Anthropic(base_url=address, api_key="k", max_retries=0).messages.stream(
        model="tiny", max_tokens=99, messages=ASK
    ) as stream:
        assert stream.get_final_text() == TEXT
    parts = ollama.Client(host=address).chat("tiny", messages=ASK, stream=True)
    assert "".join(part.message.content for part in parts) == TEXT
    parts = ollama.Client(host=address).generate("tiny", "Hi", stream=True)
    assert "".join(part.response for part in parts) == TEXT


@pytest.mark.parametrize("text", [TEXT, "plain", "\\u2028", "\u00e2\u0080\u00a8", "\U0001f600\u2028", "\u4e28\u0085"])
def test_a_line_says_what_its_json_says(text):
    line = json_line({"text": text, text: [text]})
    assert json.loads(line) == {"text": text, text: [text]}
    assert len(line.decode().splitlines()) == 1
    assert len(sse({"text": text}).decode().splitlines()) == 2
    plain = msgspec.json.encode("plain \u2030 text")
    assert one_line(plain) == plain


def test_lines_of_a_batch_are_lines(make_context, engine, tmp_path):
    engine.answer = TEXT.encode()

    async def run() -> str:
        async with serve(make_context, tmp_path / "kept") as (_, client):
            batch = await ended(client, await create(client, line("a", CHAT), endpoint=CHAT))
            return (await client.files.content(batch.output_file_id)).content.decode()

    (told,) = asyncio.run(run()).splitlines()
    assert json.loads(told)["response"]["body"]["choices"][0]["message"]["content"] == TEXT
