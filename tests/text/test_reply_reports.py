"""Replies that other servers are reported to have misread, in every cut, and what they are here."""

import json

import pytest
from reply_cases import DSML, WRITERS

from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.parser import Reply
from roofline.text.replies.reply_format import ReplyFormat

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "body": {"type": "object"}},
    },
    "now": {},
}
LONG = "x" * 20_000
ULM, NOW = ("weather", {"city": "Ulm"}), ("now", {})
GEMMA = '<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>'
GLM = "<arg_value>Ulm</arg_value></tool_call>"
KIMI_SECTION, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
INVOKE = f'<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Ulm</{DSML}parameter>\n'
INVOKED = f"{INVOKE}</{DSML}invoke>"
HEADER = "<|channel|>"
JSON_CALL = 'to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'

# Format, whether the prompt has opened the reasoning (None: the model has none), reply; reasoning, text, calls.
REPORTS = [
    # Gemma 4: marks that stay in text once reasoning and calls are both looked for.
    ("gemma", False, f"<|channel>thought\nHm.\n<channel|>{GEMMA}", "Hm.", "", [ULM]),
    ("gemma", False, f"<|channel>thought\n<channel|>I look.{GEMMA}<tool_call|>", "", "I look.", [ULM]),
    ("gemma", False, f"<channel|>{GEMMA}<|tool_response>", "", "", [ULM]),
    ("gemma", False, f"<|channel>thought\nLet's go.{GEMMA}", "Let's go.", "", [ULM]),
    # Gemma 4: a call behind the reasoning without the mark before it, or with less of its head.
    ("gemma", False, '<|channel>thought\nHm.\n<channel|>call:weather{city:<|"|>Ulm<|"|>}', "Hm.", "", [ULM]),
    ("gemma", None, '<|tool_call>:weather{city:<|"|>Ulm<|"|>}<tool_call|>', "", "", [ULM]),
    ("gemma", None, "Say call:weather{now} to me", "", "Say call:weather{now} to me", []),
    # Qwen: parameters whose tags are malformed.
    ("xml", None, "<function=weather>\n<parameter=city>\nUlm\n</function>\n</tool_call>", "", "", [ULM]),
    ("xml", None, "<tool_call>\n<function=weather>\n<parameter=\nUlm\n</parameter>\n</function>\n</tool_call>",
     "", "", [("weather", {})]),
    ("xml", None, "<tool_call>\n<function=weather>\n<parameter=ids: [1]\n</parameter>\n<parameter=city>\nUlm\n"
     "</parameter>\n</function>\n</tool_call>", "", "", [ULM]),
    ("xml", None, "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n<parameter=days>\n5\n</parameter>\n"
     "</function>", "", "", [("weather", {"city": "Ulm", "days": 5})]),
    ("xml", None, '<tool_call>\n<function=weather>\n<parameter=body>\n{"a": "B", "c": true}\n</function>\n'
     "</tool_call>", "", "", [("weather", {"body": {"a": "B", "c": True}})]),
    # Qwen3-Coder: parameters that come together, as guessed tokens do.
    ("xml", None, WRITERS["xml"]("weather", {"city": "Ulm", "days": 5, "body": {"a": 1}}), "", "",
     [("weather", {"city": "Ulm", "days": 5, "body": {"a": 1}})]),
    # GLM 4.7: calls without arguments.
    ("glm", None, "<tool_call>now</tool_call><tool_call>now\n</tool_call>", "", "", [NOW, NOW]),
    ("glm", None, "<tool_call>now", "", "", [NOW]),
    # GLM 4.7: tags that are there twice, or missing.
    ("glm", None, f"<tool_call>weather<arg_key>city</arg_key></arg_key>{GLM}", "", "", [ULM]),
    ("glm", None, f"<tool_call>weather<arg_key><arg_key>city</arg_key>{GLM}", "", "", [ULM]),
    ("glm", None, "<tool_call>weather<arg_key>city</arg_key>Ulm</arg_value></tool_call>", "", "", [ULM]),
    # DeepSeek: sections of the other name, none, unfinished ones, and tags without all of their parts.
    ("dsml_v4", None, f"<{DSML}function_calls>\n{INVOKED}\n</{DSML}function_calls>", "", "", [ULM]),
    ("dsml", None, f"<{DSML}tool_calls>\n{INVOKED}\n</{DSML}tool_calls>", "", "", [ULM]),
    ("dsml", None, f"I look.\n{INVOKED}", "", "I look.", [ULM]),
    ("dsml", None, f"<{DSML}function_calls>\n{INVOKED}\n{INVOKED}", "", "", [ULM, ULM]),
    ("dsml", None, f"<{DSML}function_calls>\n{INVOKE}</{DSML}function_calls>", "", "", [ULM]),
    ("dsml", None, f'{INVOKE.partition("<" + DSML + "par")[0]}<parameter name="days">5</{DSML}parameter>\n'
     f"</{DSML}invoke>", "", "", [("weather", {"days": 5})]),
    # Kimi: long arguments, ids with line breaks, a section of another name or none.
    ("kimi", None, WRITERS["kimi"]("weather", {"city": LONG}), "", "", [("weather", {"city": LONG})]),
    ("kimi", None, f'A{KIMI_SECTION}{KIMI[0]}functions.weather:0\n{KIMI[1]}{{"city": "Ulm"}}{KIMI[2]}{KIMI_END}',
     "", "A", [ULM]),
    ("kimi", True, f'Hm.{KIMI[0]}weather{KIMI[1]}{{"city": "Ulm"}}{KIMI[2]}{KIMI[0]}now:1{KIMI[1]}{KIMI[2]}{KIMI_END}',
     "Hm.", "", [ULM, NOW]),
    # gpt-oss: headers that are malformed.
    ("harmony", False, f"{HEADER}analysis<|message|>Hm.<|end|><|start|>assistant{HEADER}commentary {JSON_CALL}",
     "Hm.", "", [ULM]),
    ("harmony", False, f"{HEADER}analysis<|message|>Hm.<|end|><|start|>assistant {JSON_CALL}", "Hm.", "", [ULM]),
    ("harmony", False, f"{HEADER}commentary? {JSON_CALL}", "", "", [ULM]),
    ("harmony", False, f"{HEADER}??<|message|>Done.<|return|>", "", "Done.", []),
    ("harmony", False, f"{HEADER}I need the weather. {JSON_CALL}", "I need the weather.", "", [ULM]),
    ("harmony", False, f"{HEADER}commentary{HEADER}analysis<|message|>Hm.<|end|><|start|>assistant{HEADER}final"
     "<|message|>Done.", "Hm.", "Done.", []),
    ("harmony", False, f"{HEADER}analysis {JSON_CALL}", "", "", [ULM]),
    # Mistral: calls within the reasoning.
    ("mistral_args", False, '[THINK]I look.[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}[/THINK]', "I look.", "", [ULM]),
    ("mistral_args", True, "Hm.[TOOL_CALLS]now[ARGS][TOOL_CALLS]now", "Hm.", "", [NOW, NOW]),
    ("mistral_args", None, '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Ulm"}', "", "", [ULM]),
    # Nemotron: no closing mark before a call.
    ("xml", True, f"Hm.\n{WRITERS['xml']('weather', {'city': 'Ulm'})}", "Hm.", "", [ULM]),
]  # fmt: skip


@pytest.mark.parametrize("case", REPORTS, ids=[f"{number} {case[0]}" for number, case in enumerate(REPORTS)])
def test_a_reply_that_was_reported(case):
    name, thinking, text, reasoning, told, calls = case
    form = ReplyFormat(name, thinking is not None, True, CALL_FORMATS[name].thoughts)
    steps = {len(text), 1, 3, 7} if len(text) < 5000 else {len(text), 4000}
    cuts = [[text[at : at + step] for at in range(0, len(text), step)] for step in sorted(steps)]
    cuts += [[text[:end], text[end:]] for end in range(len(text) if len(text) < 5000 else 0)]
    for pieces in cuts:
        reply, parser = Reply(), form.parser(TOOLS, thinking=bool(thinking))
        for piece in pieces:
            reply.add(parser.push(piece))
        reply.add(parser.finish())
        assert (reply.reasoning, reply.text) == (reasoning, told), pieces
        assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls, pieces
