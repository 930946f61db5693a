"""Tools and reasoning in chats: what the model reads, and how its answers are told, all at once and in a stream."""

import json
from random import Random

import openai
import pytest

from roofline import Constraint
from roofline.common.errors import RequestError
from roofline.engine.constraints import library
from roofline.server.call_grammars import MOST_CALLS, forced_calls, optional_calls
from roofline.server.complete_text import complete_text
from roofline.server.options import ServeOptions
from roofline.server.text_side import TextSide
from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.parser import Reply
from roofline.text.replies.reply_format import ReplyFormat, reply_format
from roofline.text.templates.template import ChatTemplate
from roofline.text.templates.tools import with_tools_as_text

PATH = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": {"type": "object"}}}
    for name in ("weather", "add")
]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
CALLS = (
    '<think>Hm.</think>I look. <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


def streamed(call, engine, text: str, **fields) -> tuple[dict, list]:
    """(the message that the deltas of a stream make, its finish reasons)"""
    engine.answer = text.encode()
    lines = call("POST", PATH, json={**CHAT, "stream": True, **fields}).text.split("\n\n")
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for line in lines[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
        reasons.append(choice["finish_reason"])
    return message, reasons


def test_an_answer_with_reasoning_text_and_two_calls(call, engine):
    engine.answer = CALLS.encode()
    (choice,) = call("POST", PATH, json=CHAT).json()["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    functions = [each["function"] for each in message["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Köln"}'}, {"name": "add", "arguments": "{}"}]
    assert choice["finish_reason"] == "tool_calls"
    ids = [each["id"] for each in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids)  # which Mistral's templates ask for


def test_a_stream_tells_the_same(call, engine):
    message, reasons = streamed(call, engine, CALLS)
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    told = [(each["name"], each["arguments"]) for each in message["tool_calls"]]
    assert told == [("weather", '{"city": "Köln"}'), ("add", "{}")]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_an_answer_that_is_cut_within_a_call_says_so(call, engine):
    engine.answer = CALLS.encode()
    body = {**CHAT, "max_tokens": len(CALLS.encode()) - 5}
    assert call("POST", PATH, json=body).json()["choices"][0]["finish_reason"] == "length"
    assert streamed(call, engine, CALLS, max_tokens=len(CALLS.encode()) - 5)[1][-1] == "length"


@pytest.mark.parametrize("answer", ["Hi <tool", "Hi <", "<think>Hm.</think>Hi <tool_call"])
def test_an_answer_that_ends_like_a_mark_is_all_there(call, engine, answer):
    """What may become a mark is kept back while it may, and no longer."""
    engine.answer = answer.encode()
    message = call("POST", PATH, json=CHAT).json()["choices"][0]["message"]
    assert message["content"] == answer[answer.find("Hi") :]
    assert streamed(call, engine, answer)[0]["content"] == message["content"]


def test_a_call_alone_has_no_content(call, engine):
    engine.answer = b'<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert call("POST", PATH, json=CHAT).json()["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
def test_without_tools_marks_are_text(call, engine, fields):
    engine.answer = b'<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    (choice,) = call("POST", PATH, json={**CHAT, **fields}).json()["choices"]
    assert choice["message"]["content"] == engine.answer.decode()
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    assert b"[weather]" not in bytes(engine.submitted[0][0])


def test_one_call_is_enough_where_parallel_ones_are_not_wanted(call, engine):
    engine.answer = CALLS.encode()
    message = call("POST", PATH, json={**CHAT, "parallel_tool_calls": False}).json()["choices"][0]["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["weather"]
    assert [each["name"] for each in streamed(call, engine, CALLS, parallel_tool_calls=False)[0]["tool_calls"]] == [
        "weather"
    ]


def test_log_probabilities_stay_complete_while_a_call_is_kept_back(call, engine):
    engine.answer = CALLS.encode()
    lines = call("POST", PATH, json={**CHAT, "stream": True, "logprobs": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    tokens = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in tokens) == CALLS.encode()


def test_the_openai_client_goes_round_with_what_it_got(live, engine):
    client = openai.OpenAI(base_url=f"{live()}/v1", api_key="x")
    engine.answer = CALLS.encode()
    first = client.chat.completions.create(**CHAT).choices[0].message
    answers = [{"role": "tool", "tool_call_id": each.id, "content": "7"} for each in first.tool_calls]
    engine.answer = b"Done."
    messages = [*CHAT["messages"], first, *answers]
    again = client.chat.completions.create(model="tiny", tools=TOOLS, messages=messages)
    assert again.choices[0].message.content == "Done."
    with client.chat.completions.create(**CHAT, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Done."


class Tokens:
    """A tokenizer of characters."""

    eos_ids = ()
    density = None

    def complete(self):
        """Nothing is left for later."""

    def encode_marked(self, text, mask):
        assert len(text) == len(mask)
        return [ord(character) for character in text]

    def decode(self, ids, skip_special):
        return "".join(map(chr, ids))


NATIVE = """{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }};{% endfor -%}
{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] -%}
[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</>{% endfor -%}
{% if add_generation_prompt %}<assistant>{% if thinking %}<think>\n{% endif %}{% endif %}"""
PLAIN = """{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor -%}
{% if add_generation_prompt %}<assistant>{% endif %}"""
TURNS = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "1", "tool_call_id": "a"},
]


def prompt(template: str, messages=TURNS, **options) -> str:
    text = TextSide(Tokens(), ChatTemplate(template))
    return "".join(map(chr, text.encode_chat(messages, **options)))


def test_a_template_that_knows_tools_gets_them():
    expected = 'weather;add;<user>Hi</><assistant>[add {"x": 1}]</><tool>1</><assistant>'
    assert prompt(NATIVE, tools=TOOLS) == expected


def test_tools_of_a_template_with_an_unknown_format_are_refused():
    """They are told to the model in a form that would come as text; what has no tools is answered."""
    template = NATIVE.replace("<tool_call>", "")
    assert prompt(template).endswith("<assistant>")
    with pytest.raises(RequestError, match=r"^tools: .*--tool-call-parser NAME") as caught:
        prompt(template, tools=TOOLS)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    named = TextSide(Tokens(), ChatTemplate(template), ServeOptions(tool_call_parser="hermes").reply_format)
    assert named.encode_chat(TURNS, tools=TOOLS)
    assert named.tools_notice == ""


def test_an_unknown_format_is_told_at_load(caplog):
    complete_text(TextSide(Tokens(), ChatTemplate(NATIVE)), False)
    assert caplog.text == ""
    complete_text(TextSide(Tokens(), ChatTemplate(NATIVE.replace("<tool_call>", ""))), False)
    assert caplog.text.count("tools of requests are refused: the model's chat template describes tools") == 1


def test_for_others_tools_are_text():
    text = prompt(PLAIN, tools=TOOLS)
    assert text.startswith("<system>You can call these functions")
    assert json.dumps(TOOLS[0]["function"]) in text
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    answer = "<tool_response>\n1\n</tool_response>"
    assert text.endswith(f"<user>Hi</><assistant>{call}</><user>{answer}</><assistant>")
    assert "You can call" not in prompt(PLAIN)
    system = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert prompt(PLAIN, system, tools=TOOLS).startswith("<system>Be brief.\n\nYou can call")
    assert with_tools_as_text(TURNS[:1], [], reply_format(PLAIN)) == TURNS[:1]


# Gemma's and old Mistral's manner: turns of user and model in alternation, and no tools.
ALTERNATING = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


def test_results_in_a_row_are_one_turn_where_tools_are_text():
    calls = [{"id": i, "type": "function", "function": {"name": "add", "arguments": {"x": 1}}} for i in "ab"]
    turns = [TURNS[0], {**TURNS[1], "tool_calls": calls}, TURNS[2], {**TURNS[2], "content": "2", "tool_call_id": "b"}]
    results = "<user><tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert prompt(ALTERNATING, turns).endswith(results)
    assert prompt(ALTERNATING, [*turns, TURNS[0]]).endswith(f"{results}\nHi")
    again = [*turns, {"role": "assistant", "content": "3"}, TURNS[0]]
    assert prompt(ALTERNATING, again).endswith(f"{results}<assistant>3<user>Hi")
    with pytest.raises(RequestError, match="must alternate"):
        prompt(ALTERNATING, [TURNS[0], *turns])


def test_an_answer_goes_on_from_its_beginning():
    begun = [*TURNS[:1], {"role": "assistant", "content": "Once upon "}]
    assert prompt(PLAIN, begun, continues=True) == "<user>Hi</><assistant>Once upon "
    with pytest.raises(Exception, match="does not write the last message"):
        prompt("{% for m in messages %}{{ m.content | upper }}{% endfor %}", begun, continues=True)


STOPPED = (
    "<think>One.\n\nTwo.</think>I look.\n<tool_call>\n" + '{"name": "add", "arguments": {"a": {"b": 1}}}\n</tool_call>'
)
APIS = {
    PATH: CHAT,
    "/v1/messages": {
        **{"model": "tiny", "max_tokens": 200, "messages": CHAT["messages"]},
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {
        **{"model": "tiny", "input": "Hi"},
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    },
    "/api/chat": {"model": "tiny", "messages": CHAT["messages"], "tools": TOOLS},
}


def stop_fields(path, stop):
    if path == "/api/chat":
        return {"options": {"stop": stop}}
    return {"stop_sequences" if path == "/v1/messages" else "stop": stop}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["\n\n", "Two", "}", '"', "name", "<tool_call>", "add"])
def test_stop_strings_are_not_looked_for_in_reasoning_and_calls(call, engine, path, stream, stop):
    engine.answer = STOPPED.encode()
    plain = call("POST", path, json={**APIS[path], "stream": stream})
    cut = call("POST", path, json={**APIS[path], "stream": stream, **stop_fields(path, [stop])})
    assert plain.status_code == cut.status_code == 200, cut.text
    told = told_of(path, plain.text, stream)
    assert (*told[:2], json.loads(told[2])) == ("I look.", "One.\n\nTwo.", {"a": {"b": 1}})
    assert told_of(path, cut.text, stream) == told


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_that_is_told(call, engine, path, stream):
    engine.answer = STOPPED.encode()
    body = {**APIS[path], "stream": stream, **stop_fields(path, [" look"])}
    text, reasoning, arguments, reason = told_of(path, call("POST", path, json=body).text, stream)
    assert (text, reasoning, arguments) == ("I", "One.\n\nTwo.", "")
    assert reason in ("stop", "stop_sequence", "completed")


def told_of(path, body, stream):
    """Text, reasoning, arguments of calls, and why it ended, of an answer of any API."""
    if not stream:
        parts = [json.loads(body)]
    elif path == "/api/chat":
        parts = [json.loads(line) for line in body.splitlines()]
    else:
        lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line) for line in lines]
    text = reasoning = arguments = ""
    reason = None
    for part in parts:
        if path == PATH:
            choice = part["choices"][0]
            message = choice.get("message") or choice.get("delta")
            reason = choice["finish_reason"] or reason
            text += message.get("content") or ""
            reasoning += message.get("reasoning_content") or ""
            arguments += "".join(each["function"]["arguments"] for each in message.get("tool_calls") or ())
        elif path == "/api/chat":
            message, reason = part["message"], part.get("done_reason")
            text += message["content"]
            reasoning += message.get("thinking", "")
            arguments += "".join(json.dumps(each["function"]["arguments"]) for each in message.get("tool_calls", ()))
        elif path == "/v1/messages":
            blocks = part.get("content", [part.get("delta", {})])
            reason = part.get("stop_reason") or part.get("delta", {}).get("stop_reason") or reason
            text += "".join(block.get("text", "") for block in blocks)
            reasoning += "".join(block.get("thinking", "") for block in blocks)
            arguments += "".join(json.dumps(block["input"]) for block in blocks if block.get("input"))
            arguments += part.get("delta", {}).get("partial_json", "")
        else:
            response = part.get("response", part)
            reason = response.get("status", reason)
            if part.get("type", "response.completed") not in ("response.completed", "response.incomplete"):
                continue
            for item in response["output"]:
                texts = "".join(each["text"] for each in item.get("content", ()))
                text += texts if item["type"] == "message" else ""
                reasoning += texts if item["type"] == "reasoning" else ""
                arguments += item.get("arguments", "")
    return text, reasoning, arguments, reason


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_cut_before_its_name_is_no_text(call, engine, path, stream):
    engine.answer = STOPPED.partition("</think>")[2].partition("\n")[2].encode()
    field = {PATH: "max_tokens", "/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}.get(path)
    for most in (1, 5, 11, 12, 20, 24):
        limit = {"options": {"num_predict": most}} if field is None else {field: most}
        response = call("POST", path, json={**APIS[path], "stream": stream, **limit})
        text, _, arguments, reason = told_of(path, response.text, stream)
        assert (text, arguments) == ("", "")
        assert reason in ("length", "max_tokens", "incomplete")


def test_a_prompt_that_opens_the_reasoning_is_noticed():
    text = TextSide(Tokens(), ChatTemplate(NATIVE))
    assert text.ends_thinking(text.encode_chat(TURNS, variables={"thinking": True}))
    assert not text.ends_thinking(text.encode_chat(TURNS))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NATIVE, ReplyFormat("hermes", True, True)),
        (PLAIN, ReplyFormat("hermes", False, False)),
        ("{{ tools }} <tool_call>", ReplyFormat("hermes", False, True)),
        ("{{ tools }} [TOOL_CALLS] <tool_call>", ReplyFormat("mistral", False, True)),
        ('{{ tools }} {"name": n, "parameters": p}', ReplyFormat("llama3", False, True)),
        ("{{ tools }} <|python_tag|>", ReplyFormat("llama3", False, True)),
        ("[TOOL_CALLS]", ReplyFormat("mistral", False, False)),
        ("[TOOL_CALLS] {{ m.tool_calls }}", ReplyFormat("mistral", False, False, takes_calls=True)),
        ("{{ tools }} <a_call>", ReplyFormat("hermes", False, True, is_unknown=True)),
    ],
)
def test_the_format_is_told_from_the_template(template, expected):
    assert reply_format(template) == expected
    assert reply_format(template, "json", thinks=True) == ReplyFormat("json", True, expected.takes_tools)
    named = reply_format(template, expected.calls)
    assert (named.takes_calls, named.is_unknown) == (expected.takes_calls, False)


def test_chat_completions_go_on_from_an_answer_too(call, engine):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert call("POST", PATH, json=body).status_code == 200
    assert bytes(engine.submitted[0][0]) == b"<user>Hi<assistant>Once"


def grammar(engine) -> str:
    """What the last request's answers are held to."""
    constraint = engine.submitted[-1][1].constraint
    assert constraint.kind == "lark"
    return constraint.text


def test_a_required_call_is_held_to_the_tools(call, engine):
    assert call("POST", PATH, json={**CHAT, "tool_choice": "auto"}).status_code == 200
    assert engine.submitted[-1][1].constraint is None
    assert call("POST", PATH, json={**CHAT, "tool_choice": "required"}).status_code == 200
    required = grammar(engine)
    assert "call: call_0 | call_1\n" in required
    assert f"call){{0,{MOST_CALLS - 1}}}" in required
    call("POST", PATH, json={**CHAT, "tool_choice": "required", "parallel_tool_calls": False})
    assert "call)" not in grammar(engine)
    call("POST", PATH, json={**CHAT, "tool_choice": {"type": "function", "function": {"name": "add"}}})
    named = grammar(engine)
    assert "call: call_0\n" in named
    assert '\\"add\\"' in named
    assert "weather" not in named
    assert b"[weather]" in bytes(engine.submitted[-1][0])  # the prompt tells all of them


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("thinking", [False, True])
def test_what_the_grammar_allows_is_what_the_parser_reads(form, thinking):
    """Any text that the grammar takes, written by a matcher that chooses bytes at random, is calls and nothing else."""
    llguidance = pytest.importorskip("llguidance")
    functions = [{"function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "add")]
    calls = CALL_FORMATS[form]
    constraint = forced_calls(form, functions, several=True, thinking=thinking, thoughts=calls.thoughts)
    begin = f"Hm.{calls.thoughts.close}" if thinking else calls.frame.before if calls.tells_reasoning else ""
    words = llguidance.LLTokenizer("byte")
    for seed in range(5):
        matcher = llguidance.LLMatcher(words, llguidance.LLMatcher.grammar_from_lark(constraint.text))
        text = written(matcher, Random(seed), begin.encode())
        reply, parser = (
            Reply(),
            ReplyFormat(form, thinking, True, calls.thoughts).parser({"weather", "add"}, thinking=thinking),
        )
        reply.add([*parser.push(text), *parser.finish()])
        assert reply.text == ""
        assert reply.calls
        for each in reply.calls:
            assert list(json.loads(each.arguments)) == ["x"]


def written(matcher, random: Random, begin: bytes) -> str:
    """A text of the grammar: its beginning, then random bytes that are allowed, with a liking for what ends soon."""
    text = bytearray(begin)
    assert matcher.consume_tokens(list(begin))
    while not matcher.is_stopped():
        assert len(text) < 4000
        mask = matcher.compute_logit_bias()
        allowed = [token for token in range(len(mask)) if mask[token] and token < 256]
        if matcher.is_accepting() and (not allowed or random.random() < 0.3):
            break
        closing = [token for token in allowed if token in b'"}]0x']
        token = random.choice(closing or allowed)
        assert matcher.consume_token(token)
        text.append(token)
    assert not matcher.get_error()
    return text.decode("utf-8", "replace")


NAMED = {"type": "function", "function": {"name": "add"}}


def strict(tools):
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_strict_tools_are_those_of_answers_that_must_call_them(call, engine, choice):
    """Their calls are held to the schemas, as without it."""
    plain = {**CHAT, "tool_choice": choice}
    assert call("POST", PATH, json=plain).status_code == 200
    assert call("POST", PATH, json={**plain, "tools": strict(CHAT["tools"])}).status_code == 200
    (_, first), (_, second) = engine.submitted
    assert first.constraint == second.constraint
    assert first.constraint is not None


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_strict_tool_holds_its_calls_in_free_text_too(call, engine, choice):
    tools = [CHAT["tools"][0], *strict(CHAT["tools"][1:])]
    assert call("POST", PATH, json={**CHAT, "tools": tools, **choice}).status_code == 200
    rules = dict(line.split(": ", 1) for line in grammar(engine).splitlines())
    assert rules["call_0_arguments"] == '%json {"type": "object"}', "the first tool is not strict"
    assert json.loads(rules["call_1_arguments"].removeprefix("%json ")) == CHAT["tools"][1]["function"]["parameters"]
    assert "strict" not in bytes(engine.submitted[-1][0]).decode()


OTHER_APIS = {
    "/v1/responses": ({"input": "a"}, {"type": "function", "name": "f", "parameters": {"type": "object", "x-a": 1}}),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
        {"name": "f", "input_schema": {"type": "object", "x-a": 1}},
    ),
    "/api/chat": (
        {"messages": [{"role": "user", "content": "a"}]},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x-a": 1}}},
    ),
}


@pytest.mark.parametrize("path", OTHER_APIS)
def test_other_apis_have_strict_tools_too(call, engine, path):
    body, tool = OTHER_APIS[path]
    for value, count in ((True, 1), (False, 0), (None, 0)):
        if "function" in tool:
            tool_now = {**tool, "function": {**tool["function"], "strict": value}}
        else:
            tool_now = {**tool, "strict": value}
        body_now = {"model": "tiny", **body, "tools": [tool_now]}
        response = call("POST", path, json=body_now)
        assert response.status_code == 200, response.text
        constraint = engine.submitted[-1][1].constraint
        assert (constraint is not None) == bool(count)
        if constraint is not None:
            assert constraint.text.count('"x-a"') == 1


def test_the_special_token_that_is_mistrals_mark_begins_a_strict_call(call, engine, make_context):
    context = make_context()
    context.text.reply_format = ReplyFormat("mistral", False, True)
    context.text.special_ids = lambda contents=None: frozenset({270} if contents == {"[TOOL_CALLS]"} else ())
    response = call("POST", PATH, json={**CHAT, "tools": strict(CHAT["tools"])}, context=context)
    assert response.status_code == 200, response.text
    assert "<[270]>" in engine.submitted[0][1].constraint.text


def allowed(grammar: str, text: str) -> bool:
    """Whether an answer may be this text."""
    llguidance = pytest.importorskip("llguidance")
    matcher = library.compiled(llguidance.LLTokenizer("byte"), library.notation(Constraint.of_lark(grammar)))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


FORMS_OF_CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {%s}}\n</tool_call>',
    "json": '{"name": "add", "arguments": {%s}}',
    "llama3": '{"name": "add", "parameters": {%s}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {%s}}]',
}
GOOD, BAD = '"x": 1', '"y": 1'


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_with_strict_tools_text_is_free_and_calls_are_not(form, thinking, several):
    functions = [{"function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "add")]
    rules = optional_calls(form, functions, {"add"}, several=several, thinking=thinking).text
    before, one, other = "Hm {.</think>" if thinking else "", FORMS_OF_CALLS[form] % GOOD, FORMS_OF_CALLS[form] % BAD
    for text in ("", "Hello {", "a < b, <tool_ca", "1 + 1 = 2", one, other.replace("add", "weather")):
        assert allowed(rules, before + text), text
    assert not allowed(rules, before + other)
    assert not allowed(rules, before + one.replace("add", "subtract"))
    assert not allowed(rules, before + one[:-5])
    if form == "hermes":
        assert allowed(rules, f"{before}Let me see. {one}\n{one} Done.")
        assert not allowed(rules, f"{before}Let me see. {one}\n{other}")
    elif form == "mistral":
        assert allowed(rules, f"{before}Let me see. {one}")
        assert not allowed(rules, f"{before}Let me see. {other}")
        assert allowed(rules, before + one[:-1] + f", {one.removeprefix('[TOOL_CALLS][')}") == several
    else:
        assert allowed(rules, f"{before}{one}; {one}") == several
        assert allowed(rules, f"<think>Hm {{</think>\n{one}")
        assert not allowed(rules, f"{before}{{")


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
@pytest.mark.parametrize(
    "function",
    [
        {},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"type": "object", "properties": {}, "required": []}},
    ],
)
def test_a_forced_call_of_a_function_without_parameters_has_none(form, function):
    grammar = forced_calls(form, [{"function": {"name": "add", **function}}], several=False, thinking=False).text
    texts = [FORMS_OF_CALLS[form] % arguments for arguments in ("", '"ARGUMENT": "Paris"')]
    assert [allowed(grammar, text) for text in texts] == [True, False]
    tools = [{"function": {"name": "add", **function}}]
    strict_too = optional_calls(form, tools, {"add"}, several=False, thinking=False).text
    assert [allowed(strict_too, text) for text in texts] == [True, False]


def test_a_strict_call_may_begin_with_the_token_that_is_mistrals_mark():
    words = library.Words([*(bytes([i]) for i in range(256)), b"[TOOL_CALLS]", b"</s>"], [256, 257], [257])
    tools = [{"function": {"name": "add", "parameters": SCHEMA}}]
    rules = optional_calls("mistral", tools, {"add"}, several=False, thinking=False, special_ids={"[TOOL_CALLS]": 256})
    matcher = library.compiled(library.library_tokenizer(words), library.notation(rules))
    for arguments, fits in ((GOOD, True), (BAD, False)):
        call = (FORMS_OF_CALLS["mistral"] % arguments).removeprefix("[TOOL_CALLS]")
        for before in ("", "Let me see. "):
            ids, trial = [*before.encode(), 256, *call.encode()], matcher.deep_copy()
            assert (trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()) == fits
    assert matcher.deep_copy().try_consume_tokens([*b"text", 257]) == 5, "an answer may be text"


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
def test_an_answer_that_must_be_calls_has_so_many_at_most(form):
    before, between, after, _ = CALL_FORMATS[form].frame
    made = FORMS_OF_CALLS[form].removeprefix(before).removesuffix(after) % GOOD
    tools = [{"function": {"name": "add", "parameters": SCHEMA}}]
    for several, most in ((True, MOST_CALLS), (False, 1)):
        grammar = forced_calls(form, tools, several=several, thinking=False).text
        counts = [
            count for count in range(MOST_CALLS + 2) if allowed(grammar, before + between.join([made] * count) + after)
        ]
        assert counts == list(range(1, most + 1))


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
def test_white_space_in_calls_is_bounded_as_in_other_json(form):
    tools = [{"function": {"name": "add", "parameters": SCHEMA}}]
    grammar = forced_calls(form, tools, several=False, thinking=False).text
    texts = [FORMS_OF_CALLS[form] % f'"x":{" " * count}1' for count in (0, 64, 65)]
    assert [allowed(grammar, text) for text in texts] == [True, True, False]


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
def test_arguments_have_integers_that_no_float_holds(form):
    parameters = {"type": "object", "properties": {"id": {"enum": [2**60 + 1]}}, "required": ["id"]}
    grammar = forced_calls(
        form, [{"function": {"name": "add", "parameters": parameters}}], several=False, thinking=False
    ).text
    texts = [FORMS_OF_CALLS[form] % f'"id": {number}' for number in (2**60 + 1, 2**60)]
    assert [allowed(grammar, text) for text in texts] == [True, False]


EXACT = {"type": "object", "properties": {"id": {"allOf": [{"const": 2**60 + 1}]}}}
FORCED = {
    PATH: {"tools": [{"type": "function", "function": {"name": "f", "parameters": EXACT}}], "tool_choice": "required"},
    "/v1/messages": {"tools": [{"name": "f", "input_schema": EXACT}], "tool_choice": {"type": "any"}},
    "/v1/responses": {
        "tools": [{"type": "function", "name": "f", "parameters": EXACT}],
        "tool_choice": "required",
    },
    "/api/chat": {"tools": [{"type": "function", "function": {"name": "f", "parameters": EXACT, "strict": True}}]},
}


PARAMETERS = {"/v1/messages": "tools.0.input_schema", "/v1/responses": "tools.0.parameters"}


@pytest.mark.parametrize("path", FORCED)
def test_a_schema_that_calls_cannot_be_held_to_is_refused_by_fields_that_the_api_has(call, engine, path):
    error = call("POST", path, json={**APIS[path], **FORCED[path]})
    assert error.status_code == 400
    field = PARAMETERS.get(path, "tools.0.function.parameters")
    problem = f"{field}: calls of 'f' cannot be kept to it: properties.id.allOf.0.const: 1152921504606846977"
    assert problem in error.text
    detail = error.json()["error"]
    assert not isinstance(detail, dict) or detail.get("param", field) == field
    assert not engine.submitted

    async def submit(ids, params, **options):
        raise RequestError(400, "invalid_value", "constraint: the grammar cannot be compiled: x", param="constraint")

    engine.submit = submit
    fine = json.loads(json.dumps(FORCED[path]).replace(str(2**60 + 1), "1"))
    error = call("POST", path, json={**APIS[path], **fine, "stream": False})
    assert error.status_code == 400
    assert "tools: the grammar cannot be compiled: x" in error.text
    assert "constraint" not in error.text


NO_OBJECTS = [
    {"type": "array", "items": {"type": "string"}},
    {"type": "string", "enum": ["a"]},
    {"enum": [1]},
    {"const": "a"},
    {"type": "integer"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/list"}], "$defs": {"list": {"type": "array"}}},
    {"type": "object", "allOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"oneOf": [{"type": "null"}]}}},
]


@pytest.mark.parametrize("path", FORCED)
def test_parameters_that_are_no_object_are_refused_with_their_place(call, engine, path):
    """A call could not have them: what the model wrote would be lost."""
    for schema in NO_OBJECTS:
        for choice in (FORCED[path], {"tools": FORCED[path]["tools"]}):
            body = json.loads(json.dumps({**APIS[path], **choice}).replace(json.dumps(EXACT), json.dumps(schema)))
            error = call("POST", path, json=body)
            assert error.status_code == 400, schema
            assert f"{PARAMETERS.get(path, 'tools.0.function.parameters')}: must describe an object" in error.text
    assert not engine.submitted


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": {"b": {"const": 1}}}}},
        {"enum": [1, {"a": 2}]},
        {"description": "Anything."},
    ],
    ids=str,
)
def test_a_forced_call_has_an_object_where_its_schema_leaves_that_open(schema):
    grammar = forced_calls("json", [{"function": {"name": "f", "parameters": schema}}], several=False, thinking=False)
    calls = (('{"a":2}', True), ("1", False), ("null", False), ('"a"', False))
    for arguments, fits in calls:
        text = f'{{"name": "f", "arguments": {arguments}}}'
        assert allowed(grammar.text, text) == fits, text


def test_tools_that_are_left_out_may_be_strict(call):
    assert call("POST", PATH, json={**CHAT, "tools": strict(CHAT["tools"]), "tool_choice": "none"}).status_code == 200


TYPED = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
OWN_FORMATS = {
    "xml": "<tool_call>\n<function=add>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>days</arg_key><arg_value>5"
    "</arg_value></tool_call>",
    "gemma": '<|tool_call>call:add{city:<|"|>5<|"|>,days:5}<tool_call|>',
    "harmony": '<|start|>assistant<|channel|>commentary to=functions.add json<|message|>{"city": "5", "days": 5}',
}
REASONED = {"gemma": "<|channel>thought\nHm.\n<channel|>", "harmony": "<|channel|>analysis<|message|>Hm.<|end|>"}


@pytest.mark.parametrize("form", OWN_FORMATS)
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_answers_with_calls_of_any_format(call, engine, make_context, form, path, stream):
    """Arguments have the types of the request's schema."""
    engine.answer = (REASONED.get(form, "<think>Hm.</think>") + OWN_FORMATS[form]).encode()
    context = make_context()
    context.text.reply_format = ReplyFormat(form, True, True, CALL_FORMATS[form].thoughts)
    body = json.loads(json.dumps(APIS[path]).replace('{"type": "object"}', json.dumps(TYPED)))
    response = call("POST", path, json={**body, "stream": stream}, context=context)
    assert response.status_code == 200, response.text
    text, reasoning, arguments, _ = told_of(path, response.text, stream)
    assert (text, reasoning, json.loads(arguments)) == ("", "Hm.", {"city": "5", "days": 5})
