"""Log-probabilities of completions: every token has an entry of its own, and its place in the text."""

import json

import pytest

from roofline.engine.events import TokenLogprob
from roofline.server.routes.openai.completions import TokenPlaces
from tests.server.conftest import BytesText
from tests.server.text_sides import BOS, END, chatml

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "Say", "logprobs": 3, "max_tokens": 900}
TEXT = "今a😀é 天"


@pytest.fixture
def likeliest(engine, monkeypatch):
    """Beside each token stand two of the same byte's kind, which are likelier, and itself."""
    event = engine._event

    def changed(*args):
        made = event(*args)
        token = made.ids[0]
        if made.logprobs is not None:
            others = [192, 193] if token > 127 else [255, 254]
            top = ((others[0], -0.1), (others[1], -0.2), (token, -0.5))
            made.logprobs[0] = TokenLogprob(token, -0.5, top)
        return made

    monkeypatch.setattr(engine, "_event", changed)


def test_every_token_of_the_likeliest_is_told(call, engine, likeliest):
    engine.answer = TEXT.encode()
    (choice,) = call("POST", PATH, json=BODY).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"] == TEXT
    assert told["tokens"][:4] == ["bytes:\\xe4", "bytes:\\xbb", "bytes:\\x8a", "a"]
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[token] == logprob == -0.5
        assert sorted(top.values()) == [-0.5, -0.2, -0.1]
    bytes_told = [t.removeprefix("bytes:\\x") if t.startswith("bytes:") else t.encode().hex() for t in told["tokens"]]
    assert bytes.fromhex("".join(bytes_told)).decode() == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_begins_where_its_character_does(call, engine, stream):
    engine.answer = TEXT.encode()
    response = call("POST", PATH, json={**BODY, "stream": stream})
    lines = response.text.split("\n\n")[:-2]
    answers = [json.loads(line.removeprefix("data: ")) for line in lines] if stream else [response.json()]
    offsets = [at for answer in answers for at in answer["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [at for at, character in enumerate(TEXT) for _ in character.encode()]


def test_tokens_of_one_text_are_told_by_their_ids(call, engine, likeliest, monkeypatch):
    """Two ids with the text of the one that was taken, and one with another's."""
    engine.answer = b"ab"
    same = {255: b"a", 254: b"b"}
    monkeypatch.setattr(BytesText, "token_bytes", lambda self, i: same.get(i, bytes([i]) if i < 256 else b""))
    (choice,) = call("POST", PATH, json=BODY).json()["choices"]
    first, second = choice["logprobs"]["top_logprobs"]
    assert first == {"token_id:255": -0.1, "b": -0.2, "a": -0.5}
    assert second == {"a": -0.1, "token_id:254": -0.2, "b": -0.5}


def test_a_bos_is_no_part_of_an_echoed_text():
    places = TokenPlaces(chatml(), "é?", ())
    assert [places.add(token) for token in (BOS, *"é?!".encode(), END)] == [0, 0, 0, 1, 2, 3]


def test_special_tokens_have_a_place_where_they_are_text():
    text, mark = chatml(), len("<|im_end|>")
    for shown, offsets in (((), [0, 1, 1]), ((END,), [0, 1, 1 + mark])):
        places = TokenPlaces(text, "", shown)
        assert [places.add(token) for token in (97, END, 98)] == offsets
    places = TokenPlaces(text, "<s>a<|im_end|>", ())
    assert [places.add(token) for token in (BOS, 97, END, 98)] == [0, 3, 4, 4 + mark]


def test_the_space_that_a_tokenizer_puts_first_is_none_of_the_clients():
    text = chatml()
    places = TokenPlaces(text, "ab", ())
    pieces = {300: b" a", 301: b"b", 302: b" c"}
    text.token_bytes = pieces.__getitem__  # type: ignore[method-assign]
    assert [places.add(token) for token in (300, 301, 302, 301)] == [0, 1, 2, 4]
