"""DeepSeek V3, V3.1 and R1 with their own templates, which write calls and results but not the tools."""

import json

import pytest
from reply_cases import SCHEMAS

from roofline.bundle.text_side import text_of_folder
from roofline.text.replies.parser import Reply
from roofline.text.replies.reply_format import reply_format
from roofline.text.templates.template import ChatTemplate
from roofline.text.templates.tools import with_tools_as_text
from tools import llama_cpp_source, real_tokenizers

FOLDER = real_tokenizers.FOLDER / "deepseek_v3"
TEMPLATES = llama_cpp_source.FOLDER / "models" / "templates"
OTHERS = ("deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
FORMATS = {"V3": "deepseek_v3", OTHERS[0]: "deepseek_v31", OTHERS[1]: "deepseek_v3"}
BEGIN, CALL = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # a special token, which the marks of calls are not
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {END} it.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def call(name: str, arguments: object, number: int) -> dict:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def history(*, as_text: bool, content: str | None) -> list[dict]:
    arguments: object = {"city": "K\u00f6ln", "days": 3}
    arguments = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    calls = [call("weather", arguments, 0), call("now", "{}" if as_text else {}, 1)]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "abcdefgh0", "content": "sunny"},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "noon"},
    ]


@pytest.fixture(scope="module", params=FORMATS)
def model(request):
    """The name of a model, its tokenizer as transformers reads it and as we do, and its template."""
    transformers = pytest.importorskip("transformers")
    if not (FOLDER / "tokenizer.json").is_file():
        pytest.skip(f"{FOLDER} is not here: python -m tools.real_tokenizers")
    theirs = transformers.AutoTokenizer.from_pretrained(FOLDER)
    if request.param in OTHERS:
        path = TEMPLATES / f"{request.param}.jinja"
        if not path.is_file():
            pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
        theirs.chat_template = path.read_text()
    template = ChatTemplate(theirs.chat_template, bos_token=theirs.bos_token, eos_token=theirs.eos_token)
    return request.param, theirs, text_of_folder(FOLDER)[0], template


def test_the_format_is_told_from_the_marks_of_calls(model):
    name, _, _, template = model
    form = reply_format(template.source)
    assert (form.calls, form.takes_tools, form.takes_calls, form.is_unknown) == (FORMATS[name], False, True, False)


@pytest.mark.parametrize("content", [None, ""])
def test_a_history_is_rendered_as_transformers_does(model, content):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    name, theirs, tokenizer, template = model
    form = reply_format(template.source)
    as_text = name == "V3"  # whose template adds them to a text
    # apply_chat_template leaves a content of None out, on which all but V3.1's templates fail.
    compiled = chat_template_utils._compile_jinja_template(theirs.chat_template)
    expected = compiled.render(
        messages=history(as_text=as_text, content=None),
        add_generation_prompt=True,
        bos_token=theirs.bos_token,
        eos_token=theirs.eos_token,
    )
    if form.calls == "deepseek_v31":
        turns = history(as_text=False, content=None)
        assert expected == theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    turns = with_tools_as_text(history(as_text=False, content=content), [], form)
    text, mask = template.marked(turns)
    assert text == expected
    assert CALL in text
    assert tokenizer.encode_marked(text, mask) == theirs.encode(expected, add_special_tokens=False)


def test_tools_are_told_in_the_format_of_the_model(model):
    _, theirs, tokenizer, template = model
    form = reply_format(template.source)
    turns = with_tools_as_text(history(as_text=False, content=None)[:2], TOOLS, form)
    text, mask = template.marked(turns)
    assert text.startswith(f"{theirs.bos_token}Be brief.\n\n")
    assert "<tool_call>" not in text
    head = f"{BEGIN}{CALL}"
    assert text.count(head) == 1
    if form.calls == "deepseek_v31":
        assert "\n\n### weather\nDescription: Does " in text
        assert f"\n\nParameters: {json.dumps(SCHEMAS['weather'])}\n" in text
    ids = tokenizer.encode_marked(text, mask)
    assert [ids.count(theirs.convert_tokens_to_ids(mark)) for mark in (BEGIN, CALL, END)] == [1, 1, 0]
    assert text.count(END) == len(TOOLS)


def test_the_calls_that_the_instructions_show_are_read(model):
    _, _, _, template = model
    form = reply_format(template.source)
    turns = with_tools_as_text([{"role": "user", "content": "a"}], TOOLS[:1], form)
    example = BEGIN + template.marked(turns)[0].rpartition(BEGIN)[2]
    example = example.replace("tool_call_name", "NAME").replace("tool_call_arguments", '{"ARGUMENT": "VALUE"}')
    reply, parser = Reply(), form.parser({"NAME": {}}, thinking=False)
    for character in example.replace("{{additional_tool_calls}}", ""):
        reply.add(parser.push(character))
    reply.add(parser.finish())
    assert [(each.name, json.loads(each.arguments)) for each in reply.calls] == [("NAME", {"ARGUMENT": "VALUE"})]


def test_a_format_that_was_named_teaches_its_own_calls(model):
    _, _, _, template = model
    for named, mark in (("hermes", "<tool_call>\n{"), ("kimi", "<|tool_call_begin|>functions.NAME:0")):
        form = reply_format(template.source, named)
        turns = with_tools_as_text(history(as_text=False, content=None), TOOLS, form)
        text = template.marked(turns)[0]
        assert mark in text
        assert f"{BEGIN}{CALL}" not in text
        assert "<tool_response>\nsunny\n</tool_response>" in text
