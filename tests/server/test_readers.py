"""Readers of bodies, of every API: whatever stands in a field, a body is honoured or refused by our own error."""

import json
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roofline.common.errors import RequestError
from roofline.server.routes import explain, tokens
from roofline.server.routes.anthropic import read as anthropic
from roofline.server.routes.anthropic import schema as anthropic_schema
from roofline.server.routes.ollama import read as ollama
from roofline.server.routes.ollama import schema as ollama_schema
from roofline.server.routes.openai import read as openai
from roofline.server.routes.openai import schema as openai_schema
from roofline.server.routes.responses import read as responses
from roofline.server.routes.responses import schema as responses_schema
from roofline.server.routes.tgi import read as tgi
from roofline.server.routes.tgi import schema as tgi_schema
from roofline.server.routes.triton import read as triton
from roofline.server.routes.triton import schema as triton_schema
from tests.server.text_sides import chatml

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
ANTHROPIC_TURNS = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]
ANTHROPIC_TOOL = {"name": "look", "input_schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OLLAMA_TURNS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
    {"role": "tool", "content": "b", "tool_name": "look"},
]
ITEMS = [
    USER,
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "b"}]},
]
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
READERS = {
    "chat": (openai.chat, openai_schema.ChatBody, {"model": "tiny", "messages": [USER], "tools": [TOOL]}),
    "completion": (openai.completion, openai_schema.CompletionBody, {"model": "tiny", "prompt": "Hi"}),
    "explain": (explain.explanation, openai_schema.ChatBody, {"model": "tiny", "messages": [USER]}),
    "tokenize": (tokens._tokenize, tokens.TokenizeBody, {"messages": [USER], "tools": [TOOL]}),
    "anthropic": (
        anthropic.messages,
        anthropic_schema.MessagesBody,
        {"model": "tiny", "max_tokens": 5, "messages": ANTHROPIC_TURNS, "tools": [ANTHROPIC_TOOL], "system": "Be."},
    ),
    "ollama chat": (
        ollama.chat,
        ollama_schema.ChatRequest,
        {"model": "tiny", "messages": OLLAMA_TURNS, "tools": [TOOL], "options": {"num_predict": 5}},
    ),
    "ollama generate": (ollama.generate, ollama_schema.GenerateRequest, {"model": "tiny", "prompt": "Hi"}),
    "responses": (
        lambda raw, context: responses.generation_of(responses.body_of(raw, context), [], context),
        responses_schema.ResponseBody,
        {"model": "tiny", "input": ITEMS, "tools": [FUNCTION], "text": {"format": {"type": "text"}}},
    ),
    "tgi": (tgi.generate, tgi_schema.GenerateBody, {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}),
    "triton": (partial(triton.generate, model="tiny", stream=False), triton_schema.GenerateBody, {"text_input": "Hi"}),
}
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(["json", "auto", "none", "any", "tool", "text", "regex", "assistant", "tool_result", "look"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=4), st.sampled_from(["type", "name", "content", "value", "schema", "stop"])),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of everything in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, each in inner for place in places(each, (*path, name)))]


def changed(value: object, path: tuple, new: object) -> object:
    """The body with another value at a path, which may be a new field of an object."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    name, *rest = path
    copy[name] = changed(copy[name] if rest else None, tuple(rest), new)
    return copy


@pytest.fixture
def context(make_context):
    return make_context(text=chatml())


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_value_anywhere_is_honoured_or_refused(context, name, data):
    read, kind, body = READERS[name]
    read(json.dumps(body).encode(), context)  # as it stands it is honoured
    fields = [(field.alias or each,) for each, field in kind.model_fields.items()]
    path = data.draw(st.sampled_from([*places(body), *fields]))
    raw = json.dumps(changed(body, path, data.draw(VALUES))).encode()
    refusal = None
    try:
        read(raw, context)
    except RequestError as error:
        refusal = error
    assert refusal is None or (refusal.status in (400, 404) and str(refusal))
