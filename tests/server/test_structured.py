"""Forms of answers over HTTP: what each API writes becomes a constraint; what cannot be is refused by its name."""

import pytest

from roofline import Constraint
from roofline.common.errors import RequestError

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "tiny", "messages": [USER]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

FORMS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, Constraint.of_json()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Constraint.of_json_schema(SCHEMA),
    ),
    ({"guided_json": SCHEMA}, Constraint.of_json_schema(SCHEMA)),
    ({"guided_regex": "a+"}, Constraint.of_regex("a+")),
    ({"guided_choice": ["a", "b"]}, Constraint.of_choice(["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Constraint.of_lark('start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint.of_json_schema(SCHEMA)),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(("fields", "constraint"), FORMS)
def test_a_form_becomes_a_constraint(call, engine, path, body, fields, constraint):
    assert call("POST", path, json=body | fields).status_code == 200
    assert engine.submitted[0][1].constraint == constraint


REFUSED = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": SCHEMA}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "lenient": True}}},
        "response_format.json_schema.lenient",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [SCHEMA]}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"description": "x" * 70_000}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a" * 5000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
def test_a_form_that_cannot_be_is_refused_by_its_name(call, engine, fields, param):
    for path, body in ROUTES:
        error = call("POST", path, json=body | fields)
        assert (error.status_code, error.json()["error"]["param"]) == (400, param)
        assert param.partition(".")[0] in error.json()["error"]["message"]
        assert len(error.content) < 1000
    assert not engine.submitted


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}}, {"guided_regex": "a"}])
def test_an_answer_with_a_form_calls_no_tools(call, make_context, fields):
    from roofline.text.replies.reply_format import ReplyFormat

    context = make_context()
    context.text.reply_format = ReplyFormat("hermes", thinks=False, takes_tools=True)
    error = call("POST", "/v1/chat/completions", context=context, json=CHAT | fields | {"tools": [TOOL]})
    assert (error.status_code, error.json()["error"]["param"]) == (400, next(iter(fields)))
    assert "calls no tools" in error.json()["error"]["message"]
    none = CHAT | fields | {"tools": [TOOL], "tool_choice": "none"}
    assert call("POST", "/v1/chat/completions", context=context, json=none).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_cannot_compile_is_400_before_anything_is_streamed(call, engine, stream):
    inner = engine.submit

    async def submit(ids, params, **options):
        if params.constraint is not None:
            raise RequestError(400, "invalid_value", "constraint: the regex cannot be compiled: x", param="constraint")
        return await inner(ids, params, **options)

    engine.submit = submit
    for path, body in ROUTES:
        error = call("POST", path, json=body | {"guided_regex": "(a", "stream": stream})
        assert error.status_code == 400
        assert error.headers["content-type"] == "application/json"
        assert error.json()["error"]["param"] == "guided_regex"
        assert error.json()["error"]["message"] == "guided_regex: the regex cannot be compiled: x"
        assert call("POST", path, json=body).status_code == 200


def test_ollamas_format(call, engine):
    body = {"model": "tiny", "stream": False}
    for value, constraint in (("json", Constraint.of_json()), (SCHEMA, Constraint.of_json_schema(SCHEMA)), ("", None)):
        assert call("POST", "/api/generate", json=body | {"prompt": "Hi", "format": value}).status_code == 200
        assert call("POST", "/api/chat", json=body | {"messages": [USER], "format": value}).status_code == 200
        assert [params.constraint for _, params in engine.submitted[-2:]] == [constraint, constraint]
    for value in ("yaml", {"a": {"description": "x" * 70_000}}):
        error = call("POST", "/api/generate", json=body | {"prompt": "Hi", "format": value})
        assert error.status_code == 400
        assert "format" in error.json()["error"]


def test_a_second_form_is_refused_by_the_names_that_the_client_sent(call):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "guided_regex": "a"}
    error = call("POST", "/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "guided_regex")
    assert "response_format gives another" in error.json()["error"]["message"]
    assert "constraint" not in error.text
