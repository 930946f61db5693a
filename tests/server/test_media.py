"""Pictures and sound are refused by name in every API: as parts of messages, and as ids that stand for them."""

from typing import Any

import msgspec
import pytest

MARK = "~"  # whose id stands for a picture in the model here
MEDIA = {ord(MARK): "image_token_id", 280: "video_token_id"}
SAYS = "id 126 is the model's image_token_id, which is for pictures or sound, and text alone is read here"
USER = {"role": "user", "content": f"What is {MARK}"}
CHAT = {"model": "tiny", "messages": [USER], "max_tokens": 5}
# What each API calls the field with the prompt that a body has.
PROMPTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, "messages"),
    ("/v1/completions", {"model": "tiny", "prompt": f"a{MARK}"}, "prompt"),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2], [3, ord(MARK)]]}, "prompt"),
    ("/v1/responses", {"model": "tiny", "input": f"a{MARK}", "store": False}, "input"),
    ("/v1/messages", CHAT, "messages"),
    ("/v1/embeddings", {"model": "tiny", "input": [[1, ord(MARK)]]}, "input"),
    ("/rerank", {"model": "tiny", "query": "a", "documents": ["b", MARK]}, "documents"),
    ("/api/chat", {"model": "tiny", "messages": [USER]}, "messages"),
    ("/api/generate", {"model": "tiny", "prompt": MARK, "raw": True}, "prompt"),
    ("/api/embed", {"model": "tiny", "input": MARK}, "input"),
    ("/generate", {"inputs": MARK}, "inputs"),
    ("/v2/models/tiny/generate", {"text_input": MARK}, "text_input"),
    ("/invocations", CHAT, "messages"),
]


@pytest.mark.parametrize(("path", "body", "field"), PROMPTS, ids=[f"{path} {field}" for path, _, field in PROMPTS])
def test_a_prompt_with_the_id_of_a_picture_is_refused(call, engine, path, body, field):
    assert call("POST", path, json=body).status_code == 200  # of a model that has no such id
    engine.submitted.clear()
    engine.description = msgspec.structs.replace(engine.description, media_ids=MEDIA)
    response = call("POST", path, json=body)
    assert response.status_code == 400, response.text
    assert SAYS in response.text
    assert field in response.text
    assert engine.submitted == []


PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
KINDS = ["image_url", "input_audio", "audio_url", "video_url", "image", "video", "audio", "input_video", "image_embeds"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/invocations"])
def test_a_part_that_is_no_text_is_named(call, kind, path):
    content = [{"type": "text", "text": "a"}, {**PART, "type": kind}]
    response = call("POST", path, json={"model": "tiny", "messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == f"messages.0.content.1.type: the model reads text, and no parts of type {kind}."


OTHERS = [
    (
        "/v1/responses",
        {"model": "tiny", "input": [{"role": "user", "content": [{"type": kind, "image_url": "x"}]}]},
        kind,
    )
    for kind in ("input_image", "input_audio", "input_video", "input_file")
]
OTHERS += [
    ("/v1/messages", {**CHAT, "messages": [{"role": "user", "content": [{"type": kind, "source": {}}]}]}, kind)
    for kind in ("image", "document")
]
OTHERS += [
    ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "images"),
    ("/api/generate", {"model": "tiny", "prompt": "a", "images": ["AAAA"]}, "images"),
]


@pytest.mark.parametrize(("path", "body", "name"), OTHERS, ids=[f"{path} {name}" for path, _, name in OTHERS])
def test_pictures_of_other_apis_are_named(call, path, body, name):
    response = call("POST", path, json=body)
    assert response.status_code == 400
    assert name in response.text


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_picture_in_the_text_of_tgi_is_refused_where_the_model_reads_pictures(call, engine, path):
    """As in TGI it is text for a model that reads text alone."""
    body = {"inputs": "![](data:image/png;base64,AAAA)What is this?"}
    assert call("POST", path, json=body).status_code == 200
    assert bytes(engine.submitted.pop()[0]).decode() == body["inputs"]
    engine.description = msgspec.structs.replace(engine.description, media_ids=MEDIA)
    response = call("POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith("inputs: the model reads text, and no pictures, as ![](URL)")
    assert engine.submitted == []
    assert call("POST", path, json={"inputs": "a ![b] (c)"}).status_code == 200


def test_an_answer_may_have_such_an_id(call, engine):
    engine.description = msgspec.structs.replace(engine.description, media_ids=MEDIA)
    engine.answer = f"a{MARK}".encode()
    body = {**CHAT, "messages": [{"role": "user", "content": "a"}]}
    assert call("POST", "/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == f"a{MARK}"
