"""Constraint: what no form can be is refused at construction; vLLM's names give the same."""

import json
import time
from types import SimpleNamespace

import msgspec
import pytest

from roofline import Constraint, SamplingParams
from roofline.common.errors import RequestError
from roofline.engine import constraint
from roofline.engine.process.messages import Submit, engine_decoder, frame


def nested(depth):
    """A JSON schema with so many objects and lists inside each other."""
    return '{"a":' * (depth - 1) + '{"b":"}]"}' + "}" * (depth - 1)


BAD = [
    ("xml", "a", "none of json, json_schema, regex, choice, lark"),
    ("regex", "", "the regex is empty"),
    ("regex", " \n", "the regex is empty"),
    ("regex", "a" * (constraint.MAX_REGEX + 1), "has 4,097 bytes; 4,096 are the most"),
    ("regex", "é" * (constraint.MAX_REGEX // 2 + 1), "has 4,098 bytes"),
    ("regex", "\ud800", "half a surrogate pair"),
    ("regex", 3, "the regex is not a text"),
    ("lark", "x" * (constraint.MAX_TEXT + 1), "has 65,537 bytes; 65,536 are the most"),
    ("json", "{}", "any JSON object needs no text"),
    ("json_schema", "{", "nested at most 32 deep"),
    ("json_schema", '{"a" 1}', "is not JSON: Expecting ':'"),
    ("json_schema", "[]", "is not an object"),
    ("json_schema", "true", "is not an object"),
    ("json_schema", nested(33), "nested at most 32 deep"),
    ("json_schema", "[" * 60_000, "nested at most 32 deep"),
    ("choice", "[]", "there are 0 choices; from 1 to 1,024"),
    ("choice", json.dumps(["a"] * 1025), "there are 1,025 choices"),
    ("choice", '["a",""]', "not a list of non-empty texts"),
    ("choice", '["a",1]', "not a list of non-empty texts"),
    ("choice", '{"a":1}', "not a list of non-empty texts"),
]


@pytest.mark.parametrize(("kind", "text", "message"), BAD)
def test_what_no_form_can_be_is_refused(kind, text, message):
    with pytest.raises(RequestError) as caught:
        Constraint(kind, text)
    assert message in str(caught.value)
    assert (caught.value.status, caught.value.param) == (400, "constraint")


def test_the_ends_of_what_is_allowed():
    assert Constraint.of_regex("a" * constraint.MAX_REGEX).name == "regex"
    assert Constraint.of_json_schema(nested(32)).kind == "json_schema"
    assert Constraint.of_choice("abc"[i % 3] * (i + 1) for i in range(300)).choices()[299] == "c" * 300
    assert Constraint.of_lark("start: " + "x" * (constraint.MAX_TEXT - 7)).kind == "lark"
    assert Constraint.of_json().text == ""


SCHEMA = {"type": "object", "properties": {"a": {"const": "é"}}}
SAME = [
    ({"guided_json": SCHEMA}, Constraint.of_json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, Constraint("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": SimpleNamespace(model_json_schema=lambda: SCHEMA)}, Constraint.of_json_schema(SCHEMA)),
    ({"guided_regex": "a+"}, Constraint.of_regex("a+")),
    ({"guided_choice": ["a", "ä"]}, Constraint("choice", '["a","ä"]')),
    ({"guided_grammar": 'start: "a"'}, Constraint.of_lark('start: "a"')),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Constraint.of_regex("a+")),
    ({"structured_outputs": {"json_object": True}}, Constraint.of_json()),
    ({"structured_outputs": {"json_object": False, "choice": ["a"]}}, Constraint.of_choice(["a"])),
    (
        {"guided_decoding": SimpleNamespace(regex=None, grammar="start: x", backend=None)},
        Constraint.of_lark("start: x"),
    ),
    ({"structured_outputs": {}}, None),
    ({"constraint": Constraint.of_json()}, Constraint.of_json()),
    ({}, None),
]


@pytest.mark.parametrize(("names", "expected"), SAME)
def test_vllms_names_give_the_same_constraint_which_travels(names, expected):
    params = SamplingParams(**names)
    assert params.constraint == expected
    assert params == SamplingParams(constraint=expected)
    submitted = Submit("r", [1], params, [2], "", {0: [3]})
    assert engine_decoder.decode(frame(submitted)[4:]) == submitted
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


REFUSED = [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "an answer has one form; guided_json gives another"),
    ({"constraint": Constraint.of_json(), "guided_regex": "a"}, "guided_regex", "constraint gives another"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "an answer has one form"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
    ({"structured_outputs": 3}, "structured_outputs", "neither a mapping nor an object"),
    ({"guided_regex": "a" * 5000}, "guided_regex", "has 5,000 bytes"),
    ({"guided_choice": "ab"}, "guided_choice", "not a list of texts"),
    ({"guided_json": {"a": {1, 2}}}, "guided_json", "is no JSON"),
    ({"guided_json": 3}, "guided_json", "not an object"),
    ({"constraint": {"kind": "json"}}, "constraint", "dict is no Constraint"),
    ({"constraint": "a+"}, "constraint", "str is no Constraint"),
]


@pytest.mark.parametrize(("names", "field", "message"), REFUSED)
def test_a_form_that_cannot_be_is_refused_by_the_name_it_came_by(names, field, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**names)
    assert (caught.value.status, caught.value.param) == (400, field)
    assert str(caught.value).startswith(f"{field}: ")
    assert message in str(caught.value)


def test_an_open_string_with_many_quotes_costs_no_time():
    started = time.process_time()
    with pytest.raises(RequestError, match="is not JSON"):
        Constraint.of_json_schema('{"a": "' + '\\"' * 30_000)
    assert time.process_time() - started < 2
