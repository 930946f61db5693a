"""What clients send by default is answered: their fields change an answer, or mean nothing here."""

import json

import anthropic
import openai
import pytest

from roofline.common.errors import RequestError
from roofline.server.routes.anthropic import read as anthropic_read
from roofline.server.routes.ollama import read as ollama_read
from roofline.server.routes.openai import read as openai_read
from roofline.server.routes.responses import read as responses_read
from roofline.server.text_side import TextSide
from roofline.text.templates.template import CHATML, ChatTemplate
from tests.server.text_sides import chatml

USER = {"role": "user", "content": "Hi"}
LOOK = {
    "properties": {"city": {"title": "City", "type": "string"}}, "required": ["city"], "title": "look_args",
    "type": "object", "additionalProperties": False,
}  # fmt: skip
# The requests of Claude Code 2, of Codex and of the Agents SDK 0.24, with short texts.
CLAUDE_CODE = {
    "model": "tiny", "max_tokens": 300, "stream": True, "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ],
    "messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
    ]}],
    "tools": [{"name": "look", "description": "Looks.", "eager_input_streaming": True,
               "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **LOOK}}],
    "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": "1" * 36})},
    "thinking": {"type": "enabled", "budget_tokens": 299},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}  # fmt: skip
CODEX = {
    "model": "tiny", "instructions": "You code.", "tool_choice": "auto", "parallel_tool_calls": True, "store": False,
    "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199",
    "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}, "service_tier": None,
    "client_metadata": {"x-codex-installation-id": "a"},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "phase": "commentary",
         "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "look", "arguments": '{"city": "Ulm"}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ],
    "tools": [{"type": "function", "name": "look", "description": "Looks.", "strict": False, "parameters": LOOK}],
}  # fmt: skip
AGENTS_TOOL = {"name": "look", "parameters": LOOK, "strict": True, "description": "Looks."}
AGENTS = {
    "model": "tiny", "include": [], "input": [USER], "instructions": "Be brief.", "reasoning": {"effort": "none"},
    "text": {"verbosity": "low"}, "tools": [{"type": "function", **AGENTS_TOOL}],
}  # fmt: skip
AGENTS_CHAT = {
    "model": "tiny", "messages": [{"content": "Be brief.", "role": "system"}, USER], "stream": True,
    "tools": [{"type": "function", "function": AGENTS_TOOL}],
}  # fmt: skip
OTHERS = {
    "model": "tiny", "messages": [USER], "metadata": {"chat_id": "a", "features": {"web": False}}, "store": False,
    "prompt_cache_key": "a", "prompt_cache_retention": "24h", "verbosity": "high", "reasoning_effort": "minimal",
    "safety_identifier": "me", "service_tier": "auto",
}  # fmt: skip
OPEN_WEBUI = {
    "model": "tiny",
    "messages": [USER],
    "stream": False,
    "metadata": {"a": 1},
    "truncate": False,
    "tools": [],
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages?beta=true", CLAUDE_CODE),
        ("/v1/responses", CODEX),
        ("/v1/responses", AGENTS),
        ("/v1/chat/completions", AGENTS_CHAT),
        ("/v1/chat/completions", OTHERS),
        ("/api/chat", OPEN_WEBUI),
    ],
    ids=["claude-code", "codex", "agents", "agents-chat", "others", "open-webui"],
)
def test_a_clients_own_request_is_answered(call, make_context, engine, path, body):
    headers = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}
    response = call("POST", path, json=body, headers=headers, context=make_context(text=chatml()))
    assert response.status_code == 200, response.text
    assert len(engine.submitted) == 1


def text_side(template: str) -> TextSide:
    return TextSide(chatml().tokenizer, ChatTemplate(template + CHATML))


THINKS = "{{ 'on' if enable_thinking else 'off' }}"
DEGREES = "{{ reasoning_effort }}"


def beginning(make_context, read, body: dict, template: str) -> str:
    """What the template writes before its messages."""
    context = make_context(text=text_side(template))
    generation = read(json.dumps({"model": "tiny", **body}).encode(), context)
    return context.text.decode(generation.prompts[0]).partition("<|im_start|>")[0]


def response(raw: bytes, context):
    return responses_read.generation_of(responses_read.body_of(raw, context), (), context)


@pytest.mark.parametrize(
    ("effort", "on", "degree"),
    [("none", "off", ""), ("minimal", "on", "low"), ("medium", "on", "medium"), ("xhigh", "on", "high")],
)
def test_effort_is_told_to_templates_that_know_it(make_context, effort, on, degree):
    bodies = [
        (openai_read.chat, {"messages": [USER], "reasoning_effort": effort}),
        (response, {"input": "Hi", "reasoning": {"effort": effort}}),
    ]
    for read, body in bodies:
        assert beginning(make_context, read, body, THINKS) == on
        assert beginning(make_context, read, body, DEGREES) == degree
        assert beginning(make_context, read, body, "") == ""
        said = body | {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "mine"}}
        assert beginning(make_context, read, said, THINKS + DEGREES) == "onmine"


def test_anthropics_effort_turns_nothing_on(make_context):
    body = {"messages": [USER], "max_tokens": 9, "output_config": {"effort": "max"}}
    assert beginning(make_context, anthropic_read.messages, body, DEGREES) == "high"
    assert beginning(make_context, anthropic_read.messages, body, THINKS) == "off"
    thinking = body | {"thinking": {"type": "enabled", "budget_tokens": 5}}
    assert beginning(make_context, anthropic_read.messages, thinking, THINKS + DEGREES) == "onhigh"


def test_ollamas_think_may_be_a_degree(make_context):
    body = {"messages": [USER], "think": "high"}
    assert beginning(make_context, ollama_read.chat, body, "{# <think> #}" + THINKS + DEGREES) == "onhigh"
    with pytest.raises(RequestError, match="the model does not think"):
        beginning(make_context, ollama_read.chat, body, DEGREES)


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_left_out_where_nobody_wants_them(call, engine, display, stream):
    engine.answer = b"<think>Hm.</think>Yes."
    thinking = {"type": "adaptive", "display": display}
    body = {"model": "tiny", "max_tokens": 900, "messages": [USER], "thinking": thinking, "stream": stream}
    text = call("POST", "/v1/messages", json=body).text
    assert '"thinking"' in text, "their block is there"
    assert ('"thinking_delta"' in text) == (stream and display == "summarized")


def test_a_reply_is_what_it_was_without_its_thoughts(call, engine):
    engine.answer = b"<think>Hm.</think>Yes."
    thinking = {"type": "enabled", "budget_tokens": 99, "display": "omitted"}
    body = {"model": "tiny", "max_tokens": 900, "messages": [USER], "thinking": thinking}
    blocks = call("POST", "/v1/messages", json=body).json()["content"]
    assert blocks == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "Yes."}]


def test_anthropics_tool_runner_goes_on_without_a_thread(live, engine):
    """It asks for a thread first, and is told that there are none in the words that it understands."""

    @anthropic.beta_tool
    def look(city: str) -> str:
        """Looks.

        Args:
            city: where.
        """
        engine.answer = f"In {city}: 7.".encode()
        return "7"

    engine.answer = b'<tool_call>{"name": "look", "arguments": {"city": "Ulm"}}</tool_call>'
    client = anthropic.Anthropic(base_url=live(), api_key="x", max_retries=0)
    runner = client.beta.messages.tool_runner(model="tiny", max_tokens=900, tools=[look], messages=[USER])
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[0].text == "In Ulm: 7."


def test_openais_package_may_send_what_means_nothing(live):
    client = openai.OpenAI(base_url=f"{live()}/v1", api_key="x", max_retries=0)
    answer = client.chat.completions.create(
        model="tiny", messages=[USER], metadata={"a": "b"}, prompt_cache_key="a", verbosity="low",
        reasoning_effort="low", service_tier="auto", safety_identifier="me", store=False,
    )  # fmt: skip
    assert answer.choices[0].message.content == "Hello, world."
    made = client.responses.create(
        model="tiny", input="Hi", include=["reasoning.encrypted_content"], max_tool_calls=3,
        reasoning={"effort": "low", "summary": "detailed"}, text={"verbosity": "high"}, metadata={"a": "b"},
    )  # fmt: skip
    assert made.output_text == "Hello, world."
    assert made.reasoning.effort == "low"
