"""The formats of DeepSeek V3, R1 and V3.1: a section of calls, each the tool's name and JSON."""

import re
from typing import ClassVar

from roofline.text.replies.call_format import CallFrame
from roofline.text.replies.formats.headed import HeadedCalls


class DeepseekCalls(HeadedCalls):
    """DeepSeek V3.1: the tool's name, a separator and JSON."""

    name = "deepseek_v31"
    separator: ClassVar[str] = "<\uff5ctool\u2581sep\uff5c>"
    sections = ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)
    call_open = "<\uff5ctool\u2581call\u2581begin\uff5c>"
    arguments_open: ClassVar[tuple[str, ...]] = (separator,)
    closes: ClassVar[tuple[str, ...]] = (
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    )
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ((call_open, separator),)
    openings = (*sections, call_open)
    marks = (*openings, separator, *closes)
    head = re.compile(r"(?P<name>\S+)")
    frame = CallFrame(sections[0], "", closes[1])

    @classmethod
    def around_arguments(cls, tool: str) -> tuple[str, str]:
        return f"{cls.call_open}{tool}{cls.separator}", cls.closes[0]


class OlderDeepseekCalls(DeepseekCalls):
    """DeepSeek V3 and R1: the same with the word function before the name, and JSON in a block of code."""

    name = "deepseek_v3"
    signs = ((DeepseekCalls.call_open, "```json"),)
    arguments_open = ("\n```json", "```json")
    closes = ("```", *DeepseekCalls.closes)
    head = re.compile(rf"(?:function\s*)?(?:{DeepseekCalls.separator})?(?P<name>\S+)")

    @classmethod
    def around_arguments(cls, tool: str) -> tuple[str, str]:
        head = f"{cls.call_open}function{cls.separator}{tool}\n```json\n"
        return head, f"\n```{DeepseekCalls.closes[0]}"
