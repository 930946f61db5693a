"""The formats of DeepSeek V3, R1 and V3.1: a section of calls, each the tool's name and JSON."""

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from roofline.common.json_types import JsonMapping
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
    def instructions(cls, tools: Sequence[JsonMapping], *, own_results: bool) -> list[tuple[str, bool]]:
        """Return what DeepSeek documents for V3.1, which its models were trained on."""
        pieces = [("## Tools\nYou have access to the following tools:\n", True)]
        for tool in tools:
            description, parameters = tool.get("description") or "", tool.get("parameters") or {}
            told = json.dumps(parameters, ensure_ascii=False)
            pieces.append((f"\n### {tool['name']}\nDescription: {description}\n\nParameters: {told}\n", False))
        pattern = "".join(
            (cls.sections[0], cls.call_open, "tool_call_name", cls.separator, "tool_call_arguments", cls.closes[0])
        )
        rules = (
            f"\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n{pattern}{{{{additional_tool_calls}}}}"
            f"{cls.closes[1]}\n\nWhere:\n"
            "- `tool_call_name` must be an exact match to one of the available tools\n"
            "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
            "- For multiple tool calls, chain them directly without separators or spaces"
        )
        return [*pieces, (rules, True)]

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
    def instructions(cls, tools: Sequence[JsonMapping], *, own_results: bool) -> list[tuple[str, bool]]:
        """Return what any format says: DeepSeek documents nothing for these."""
        return super(DeepseekCalls, cls).instructions(tools, own_results=own_results)

    @classmethod
    def around_arguments(cls, tool: str) -> tuple[str, str]:
        head = f"{cls.call_open}function{cls.separator}{tool}\n```json\n"
        return head, f"\n```{DeepseekCalls.closes[0]}"
