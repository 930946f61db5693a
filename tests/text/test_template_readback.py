"""Real chat templates of models, read back: an assistant's calls that a template writes are the calls that are read."""

import json

import pytest
from reply_cases import SCHEMAS

from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.parser import Reply
from roofline.text.replies.reply_format import reply_format
from roofline.text.templates.template import ChatTemplate
from tools import llama_cpp_source

TEMPLATES = llama_cpp_source.FOLDER / "models" / "templates"
# Of each template the format that it is taken for.
FAMILIES = {
    "Qwen3.5-4B": "xml",
    "Qwen3-Coder": "xml",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "xml",
    "StepFun3.5-Flash": "xml",
    "ByteDance-Seed-OSS": "seed_xml",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "tencent-Hy3": "hy_v3",
    "upstage-Solar-Open-100B": "solar",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "MiniMax-M2": "minimax",
    "deepseek-ai-DeepSeek-V3.2": "dsml",
    "deepseek-ai-DeepSeek-V4": "dsml_v4",
    "moonshotai-Kimi-K2": "kimi",
    "google-gemma-4-31B-it": "gemma",
    "google-gemma-4-31B-it-interleaved": "gemma",
    "openai-gpt-oss-120b": "harmony",
    "LFM2.5-8B-A1B": "lfm2",
    "Spark2.5": "glm",
    "inclusionai-ling-3.0-flash": "glm",
    "poolside-Laguna-XS-2.1": "glm",
    "poolside-Laguna-S-2.1": "glm",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
    "unsloth-mistral-Devstral-Small-2507": "mistral_args",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_args",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
}
ONE_CALL = ("meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b")  # a turn of theirs has no more
NO_QUOTES = ("LFM2.5-8B-A1B",)  # within texts, which it does not escape
NO_TEXT = (  # beside calls, or not before them
    *("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"),
    *("upstage-Solar-Open-100B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ARGUMENTS = {
    "city": "Köln\n  & \"Bonn\" <b> 'x' 🙂",
    "days": 3,
    "hot": True,
    "limit": None,
    "places": ["a", 2.5, {"b": False}],
    "more": {"k": [1, None]},
}


def calls_of(name: str, calls: list[tuple[str, dict]], content: str) -> Reply:
    path = TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
    template = ChatTemplate(path.read_text(), bos_token="<s>", eos_token="</s>")
    user = {"role": "user", "content": "What now?"}
    functions = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for number, (tool, arguments) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": functions}
    before = template.marked([user], TOOLS, True)[0]
    entire = template.marked([user, turn], TOOLS, False)[0]
    start = next(at for at in range(len(entire) + 1) if entire[at : at + 1] != before[at : at + 1])
    start = len(entire[:start].rstrip("<|"))  # of a mark
    form = reply_format(template.source)
    assert form.calls == FAMILIES[name]
    thoughts = form.thoughts
    begun = entire[:start]
    thinking = begun.rstrip().endswith(thoughts.open) or begun.endswith(thoughts.open + thoughts.label)
    written = entire[start:].split("<|im_end|>")[0].removesuffix("</s>")
    reply, parser = Reply(), form.parser(SCHEMAS, thinking=form.thinks and thinking)
    for character in written:
        reply.add(parser.push(character))
    reply.add(parser.finish())
    return reply


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_that_a_template_writes_are_read_back(name):
    arguments = {**ARGUMENTS, "city": "Köln"} if name in NO_QUOTES else ARGUMENTS
    calls = [("weather", arguments), ("now", {})][: 1 if name in ONE_CALL else 2]
    reply = calls_of(name, calls, "")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls
    assert not any(mark in reply.text for mark in CALL_FORMATS[FAMILIES[name]].marks)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*ONE_CALL, *NO_TEXT)])
def test_the_text_before_calls_is_read_back(name):
    reply = calls_of(name, [("now", {})], "I look.")
    assert [call.name for call in reply.calls] == ["now"]
    assert reply.text.strip().startswith("I look.")


@pytest.mark.parametrize(
    ("signs", "name"), [(signs, name) for name, form in CALL_FORMATS.items() for signs in form.signs]
)
def test_a_template_with_the_signs_of_a_format_is_taken_for_it(signs, name):
    assert reply_format(f"{{{{ tools }}}} {' '.join(signs)}").calls == name


# Templates of our own with the signs of a format: what stands before the calls of a turn, each value, behind them.
TEXT = "{{ v if v is string else v | tojson }}"
SMALL = {
    "xml": (
        "<tool_call>\n<function={{ c.name }}>\n",
        f"<parameter={{{{ k }}}}>\n{TEXT}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "glm": (
        "<tool_call>{{ c.name }}\n",
        f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{TEXT}</arg_value>\n",
        "</tool_call>",
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="{{ c.name }}">\n',
        f'<parameter name="{{{{ k }}}}">{TEXT}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "mistral_args": ("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}", "", ""),
    "kimi": (
        "<|tool_call_begin|>functions.{{ c.name }}:0<|tool_call_argument_begin|>{{ c.arguments | tojson }}",
        "",
        "<|tool_call_end|>",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_calls_of_a_small_template_are_read_back(name):
    begin, value, end = SMALL[name]
    source = (
        "{{ tools }}{% for m in messages %}|{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        f"{begin}{{% for k, v in c.arguments.items() %}}{value}{{% endfor %}}{end}{{% endfor %}}{{% endfor %}}"
    )
    calls = [("weather", ARGUMENTS), ("now", {})]
    functions = [{"type": "function", "function": {"name": tool, "arguments": parts}} for tool, parts in calls]
    text = ChatTemplate(source).marked([{"role": "assistant", "content": "", "tool_calls": functions}], [], False)[0]
    form, reply = reply_format(source), Reply()
    assert form.calls == name
    parser = form.parser(SCHEMAS, thinking=False)
    reply.add([*parser.push(text.partition("|")[2]), *parser.finish()])
    assert (reply.text, [(call.name, json.loads(call.arguments)) for call in reply.calls]) == ("", calls)


@pytest.mark.parametrize(
    ("name", "variables"),
    [("tencent-Hy3", {"reasoning_effort": "high"}), ("upstage-Solar-Open-100B", {"default_system_prompt": False})],
)
def test_reasoning_of_an_earlier_turn_and_of_the_answer_is_read_back(name, variables):
    path = TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
    template = ChatTemplate(path.read_text(), bos_token="<s>", eos_token="</s>")
    form = reply_format(template.source)
    turn = {"role": "assistant", "content": "It is hot.", "reasoning_content": "I think."}
    before = template.marked([{"role": "user", "content": "Hot?"}], None, True, variables)[0]
    entire = template.marked([{"role": "user", "content": "Hot?"}, turn], None, False, variables)[0]
    assert entire.startswith(before)
    reply, parser = Reply(), form.parser({}, thinking=before.endswith(form.thoughts.open))
    for character in entire.removeprefix(before):
        reply.add(parser.push(character))
    reply.add(parser.finish())
    assert (reply.reasoning, reply.text) == ("I think.", "It is hot.")
