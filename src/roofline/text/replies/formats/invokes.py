"""The formats in which <invoke> has a <parameter> for each argument: MiniMax', and DeepSeek's DSML."""

import re
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFrame
from roofline.text.replies.formats.tagged import TaggedCalls
from roofline.text.replies.values import TEXT, allowed_types


class MinimaxCalls(TaggedCalls):
    """MiniMax M2: invocations within <minimax:tool_call>, which may be missing around them."""

    name = "minimax"
    open, close = "<minimax:tool_call>", "</minimax:tool_call>"
    signs = ((open, "<invoke name="),)
    head = ('<invoke name="', '">')
    openings, sections, section_ends = (open, head[0]), (open,), (close,)
    marks = (open, close)
    call_ends = ("</invoke>",)
    parameter = re.compile(r'<parameter name="(?P<name>[^">\n]+)">')
    value_close = ("</parameter>",)
    value_ends = (*value_close, "\n<parameter name=", "\n</invoke>", close)
    frame = CallFrame(f"{open}\n", "\n", f"\n{close}")

    @classmethod
    def value_head(cls, name: str, part: JsonObject) -> str:
        return f'<parameter name="{name}">'


class DsmlCalls(TaggedCalls):
    """DeepSeek V3.2 and V4: the same with DSML in each tag, and whether a value is text said in its tag.

    The section has either of its two names, whichever the template writes, and may be missing or unfinished. In a tag
    of a value DSML, or what it says of text, may be missing: the schema types the value then.
    """

    name = "dsml"
    mark: ClassVar[str] = "\uff5cDSML\uff5c"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ((mark, "invoke name="),)
    head = (f'<{mark}invoke name="', '">')
    sections = (f"<{mark}function_calls>", f"<{mark}tool_calls>")
    section_ends = (f"</{mark}function_calls>", f"</{mark}tool_calls>")
    openings: ClassVar[tuple[str, ...]] = (*sections, head[0])
    marks = (mark,)
    call_ends = (f"</{mark}invoke>",)
    parameter = re.compile(rf'<(?:{mark})?parameter name="(?P<name>[^">\n]+)"(?: string="(?P<string>true|false)")?>')
    value_close = (f"</{mark}parameter>",)
    value_ends = (*value_close, f"\n<{mark}parameter name=", f"\n</{mark}invoke>", *section_ends)
    frame: ClassVar[CallFrame] = CallFrame(f"{sections[0]}\n", "\n", f"\n{section_ends[0]}")

    @classmethod
    def value_head(cls, name: str, part: JsonObject) -> str:
        return f'<{cls.mark}parameter name="{name}" string="{str(allowed_types(part) == TEXT).lower()}">'

    def _begin_value(self, match: re.Match[str], behind: str) -> None:
        is_text = match["string"] == "true"
        self._start_value(match["name"], behind, TEXT if is_text else None)


class DsmlToolCalls(DsmlCalls):
    """DeepSeek V4, whose section has the other name."""

    name = "dsml_v4"
    signs = ((DsmlCalls.mark, "invoke name=", "tool_calls>"),)
    openings = (*DsmlCalls.sections[::-1], DsmlCalls.head[0])
    frame = CallFrame(f"{DsmlCalls.sections[1]}\n", "\n", f"\n{DsmlCalls.section_ends[1]}")
