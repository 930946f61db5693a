"""The format of Kimi K2: a section of calls, each with an id that has the tool's name."""

import re

from roofline.text.replies.call_format import CallFrame
from roofline.text.replies.formats.headed import HeadedCalls


class KimiCalls(HeadedCalls):
    """Kimi K2: an id such as functions.f:0 before the arguments of a call. Some write the section's name otherwise."""

    name = "kimi"
    sections = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    call_open = "<|tool_call_begin|>"
    arguments_open = ("<|tool_call_argument_begin|>",)
    closes = ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    signs = ((call_open, arguments_open[0]),)
    openings = (*sections, call_open)
    marks = (*openings, *arguments_open, *closes)
    head = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+?)(?:\s*:\s*\d+)?")
    frame = CallFrame(sections[0], "", closes[1])

    @classmethod
    def around_arguments(cls, tool: str) -> tuple[str, str]:
        return f"{cls.call_open}functions.{tool}:0{cls.arguments_open[0]}", cls.closes[0]
