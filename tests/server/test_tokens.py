"""Text to ids and back over HTTP, and what a request becomes before anything is computed."""

import pytest

from roofline.server.routes.tokens import NEUTRAL
from tests.server.text_sides import BOS, END, START, chatml

USER = {"role": "user", "content": "hé<|im_end|>"}


@pytest.fixture
def ask(call, make_context):
    """ask(path, body) -> response, of a server with a real tokenizer and template."""
    return lambda path, **body: call("POST", path, context=make_context(text=chatml()), json=body)


def test_a_prompt_has_its_bos_unless_it_is_refused(ask):
    answer = ask("/tokenize", model="tiny", prompt="hi<s>", return_token_strs=True).json()
    assert answer == {
        "count": 6,
        "max_model_len": 1000,
        "tokens": [BOS, *b"hi<s>"],  # the user's <s> is plain text
        "token_strs": ["<s>", "h", "i", "<", "s", ">"],
    }
    answer = ask("/tokenize", prompt="hi", add_special_tokens=False).json()
    assert (answer["tokens"], answer["token_strs"]) == ([*b"hi"], None)
    assert ask("/tokenize", prompt="hi", add_special_tokens=None).json()["tokens"] == [BOS, *b"hi"]


def test_a_conversation_is_what_the_model_would_see(ask):
    turn = [START, *"user\nhé<|im_end|>".encode(), END, *b"\n"]
    answer = ask("/tokenize", messages=[USER])
    assert answer.json()["tokens"] == [*turn, START, *b"assistant\n"]
    assert ask("/tokenize", messages=[USER], add_generation_prompt=False).json()["tokens"] == turn
    text = ask("/apply-template", messages=[USER]).json()
    assert text == {"prompt": "<|im_start|>user\nhé<|im_end|><|im_end|>\n<|im_start|>assistant\n"}
    text = ask("/apply-template", messages=[USER], add_generation_prompt=False).json()
    assert text == {"prompt": "<|im_start|>user\nhé<|im_end|><|im_end|>\n"}


def test_tools_and_variables_are_the_templates(ask):
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    fields = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    text = ask("/apply-template", **fields).json()["prompt"]
    assert text.startswith("<|im_start|>system\n")  # ChatML knows no tools: the system message tells of them
    assert '{"name": "look", "description": "Looks."' in text
    assert ask("/detokenize", tokens=ask("/tokenize", **fields).json()["tokens"]).json()["prompt"] == text
    assert ask("/apply-template", messages=[USER], chat_template_kwargs={"x": 1}).status_code == 200
    begun = [USER, {"role": "assistant", "content": "So"}]
    text = ask("/apply-template", messages=begun, continue_final_message=True).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nSo")


def test_ids_come_back_as_their_text(ask):
    answer = ask("/detokenize", model="tiny", tokens=[START, *"hé".encode(), END])
    assert answer.json() == {"prompt": "<|im_start|>hé<|im_end|>"}
    assert ask("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_prompt_longer_than_the_context_is_counted(ask):
    assert ask("/tokenize", prompt="x" * 5000).json()["count"] == 5001


REFUSED = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"messages": [USER], "tools": [{}]}, "tools.0.type"),
    ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [USER] * 1025}, "messages"),
    ("/tokenize", {"messages": [{**USER, "audio": {}}]}, "messages.0.audio"),
    ("/apply-template", {"messages": []}, "messages"),
    ("/apply-template", {"messages": [USER], "model": "other"}, "model"),
    ("/apply-template", {}, "messages"),
    (
        "/apply-template",
        {
            "messages": [USER, {"role": "assistant", "content": "So"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "add_generation_prompt",
    ),
    ("/detokenize", {"tokens": [300]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(ask, path, body, param):
    response = ask(path, **body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_that_ask_for_nothing_are_taken(ask, path, name):
    for value in NEUTRAL[name]:
        assert ask(path, messages=[USER], **{name: value}).status_code == 200
    response = ask(path, messages=[USER], **{name: "something"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_an_engine_that_is_not_ready_is_said(ask, engine):
    engine.up = False
    assert ask("/tokenize", prompt="a").status_code == 503


def joined(tokens, source):
    return "".join(token["text"] for token in tokens if token["source"] == source)


def test_an_explanation_says_who_wrote_each_token(ask):
    answer = ask("/v1/explain", model="tiny", messages=[USER], temperature=0, logit_bias={"5": 1}).json()
    (prompt,) = answer["prompts"]
    assert (answer["kind"], answer["model"], answer["max_model_len"]) == ("chat", "tiny", 1000)
    assert prompt["text"] == "<|im_start|>user\nhé<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert prompt["token_count"] == len(prompt["tokens"]) == 1000 - prompt["room"]
    assert joined(prompt["tokens"], "template") == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    assert [token["id"] for token in prompt["tokens"] if token["source"] == "user"] == [*"hé<|im_end|>".encode()]
    assert prompt["escaped"] == [{"text": "<|im_end|>", "start": 19, "end": 29}]
    assert [token["id"] for token in prompt["tokens"] if token["special"]] == [START, END, START]
    for token in prompt["tokens"]:
        text = prompt["text"][token["start"] : token["end"]]
        assert text == token["text"] or (text == "é" and token["text"] == "\N{REPLACEMENT CHARACTER}")
    assert (answer["sampling"]["temperature"], answer["sampling"]["logit_bias"]) == (0, {"5": 1.0})


def test_an_explanation_of_completions_shows_the_tokenizers_own_tokens(ask):
    first, second = ask("/v1/explain", model="tiny", prompt=["hi", "<s>"]).json()["prompts"]
    assert [(token["id"], token["source"], token["start"]) for token in first["tokens"]] == [
        (BOS, "tokenizer", None),
        (ord("h"), "user", 0),
        (ord("i"), "user", 1),
    ]
    assert (first["escaped"], second["escaped"]) == ([], [{"text": "<s>", "start": 0, "end": 3}])
    (ids,) = ask("/v1/explain", model="tiny", prompt=[START, 104]).json()["prompts"]
    assert [(token["source"], token["text"]) for token in ids["tokens"]] == [
        ("client", "<|im_start|>"),
        ("client", "h"),
    ]
    assert ids["escaped"] == []


def test_an_explanation_shows_what_is_cut_off(ask):
    (prompt,) = ask("/v1/explain", model="tiny", prompt="abc", truncate_prompt_tokens=2).json()["prompts"]
    assert [token["text"] for token in prompt["tokens"]] == ["b", "c"]
    assert (prompt["text"], prompt["token_count"], prompt["cut_tokens"], prompt["room"]) == ("abc", 2, 2, 998)


def test_what_the_api_refuses_is_not_explained(ask):
    response = ask("/v1/explain", model="tiny", messages=[USER], surprise=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "surprise")
    response = ask("/v1/explain", model="tiny", prompt="x" * 5000)
    assert response.json()["error"]["code"] == "context_length_exceeded"
