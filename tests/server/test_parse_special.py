"""Rendered prompts, sent back as texts: special tokens in them are such where the request says so."""

import json
from pathlib import Path

import ollama
import pytest

from roofline.server.routes.ollama import read as ollama_read
from roofline.server.routes.openai import read
from roofline.server.text_side import TextSide, load_text
from tests.server.text_sides import BOS, END, START, chatml

MESSAGES = [
    {"role": "system", "content": "Be brief.  "},
    {"role": "user", "content": "hé\n\n x"},
    {"role": "assistant", "content": " a"},
    {"role": "user", "content": "12 34"},
]
TEXT = "<|im_start|>a<|im_end|><s>"


@pytest.fixture
def ask(call, make_context):
    return lambda path, **body: call("POST", path, context=make_context(text=chatml()), json=body)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> TextSide:
    return load_text(str(smollm2_path))


def test_what_a_template_wrote_is_encoded_as_the_chat_is(smollm2: TextSide) -> None:
    for messages in (MESSAGES, MESSAGES[1:2], MESSAGES[1:]):
        text, _ = smollm2.render(messages, tools=(), variables={}, continues=False)
        ids = smollm2.encode_chat(messages)
        assert smollm2.encode(text, add_special=False, parse_special=True) == ids
        assert len(smollm2.encode(text, add_special=False)) > len(ids)


@pytest.mark.parametrize(("special", "first"), [({}, [BOS]), ({"add_special_tokens": False}, [])])
def test_the_routes_take_it(ask, make_context, special, first) -> None:
    parsed, plain = [*first, START, 97, END, BOS], [*first, *TEXT.encode()]
    for fields, ids in (({"parse_special": True}, parsed), ({"parse_special": False}, plain), ({}, plain)):
        assert ask("/tokenize", prompt=TEXT, **special, **fields).json()["tokens"] == ids
        body = {"model": "tiny", "prompt": TEXT, **special, **fields}
        generation = read.completion(json.dumps(body).encode(), make_context(text=chatml()))
        assert list(generation.prompts[0]) == ids
        explained = ask("/v1/explain", **body).json()["prompts"][0]
        assert [token["id"] for token in explained["tokens"]] == ids
        assert [token["special"] for token in explained["tokens"]] == [token >= BOS for token in ids]
        escaped = [] if fields.get("parse_special") else ["<|im_start|>", "<|im_end|>", "<s>"]
        assert [each["text"] for each in explained["escaped"]] == escaped


def test_a_prompt_of_ids_has_no_text_to_parse(ask) -> None:
    response = ask("/v1/completions", model="tiny", prompt=[1, 2], parse_special=True)
    assert response.json()["error"]["param"] == "parse_special"


def test_it_is_for_prompts(ask) -> None:
    user = [{"role": "user", "content": "a"}]
    for path, fields, name in (
        ("/tokenize", {"messages": user, "parse_special": True}, "parse_special"),
        ("/v1/chat/completions", {"model": "tiny", "messages": user, "parse_special": True}, "parse_special"),
        ("/api/chat", {"model": "tiny", "messages": user, "options": {"parse_special": True}}, "options.parse_special"),
        (
            "/api/generate",
            {"model": "tiny", "prompt": "a", "options": {"parse_special": True}},
            "options.parse_special",
        ),
    ):
        response = ask(path, **fields)
        assert response.status_code == 400
        assert name in response.text


@pytest.mark.parametrize(("options", "ids"), [({"parse_special": True}, [START, 97, END, BOS]), ({}, None)])
def test_ollamas_raw_prompts_take_it_too(make_context, options, ids) -> None:
    body = {"model": "tiny", "prompt": TEXT, "raw": True, "options": options}
    generation = ollama_read.generate(json.dumps(body).encode(), make_context(text=chatml()))
    assert list(generation.prompts[0]) == ([BOS, *TEXT.encode()] if ids is None else ids)


def test_ollamas_package_can_ask_for_it(live, engine) -> None:
    client = ollama.Client(host=live(text=chatml()))
    client.generate(model="tiny", prompt=TEXT, raw=True, options={"parse_special": True})
    assert engine.submitted[0][0] == [START, 97, END, BOS]
