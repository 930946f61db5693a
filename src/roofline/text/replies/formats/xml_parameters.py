"""The format of Qwen 3.5 and Qwen3-Coder: a tag with the tool's name, and in it one for each argument."""

import re
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFrame
from roofline.text.replies.formats.tagged import TaggedCalls
from roofline.text.replies.reasoning import SEED


class XmlParameterCalls(TaggedCalls):
    """Qwen 3.5 and 3-Coder, Nemotron 3, Step 3.5, MiMo: <function=f> and <parameter=k>, a value on lines of its own.

    <tool_call> around it may be missing. A value ends at its closing tag; where that is missing, at a line that begins
    with the next tag.
    """

    name = "xml"
    open: ClassVar[str] = "<tool_call>"
    close: ClassVar[str] = "</tool_call>"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = (("<tool_call>", "<function=", "<parameter="),)
    head = ("<function=", ">")
    openings: ClassVar[tuple[str, ...]] = (open, head[0])
    marks: ClassVar[tuple[str, ...]] = (open, close)
    sections: ClassVar[tuple[str, ...]] = (open,)
    section_ends: ClassVar[tuple[str, ...]] = (close,)
    call_ends = ("</function>",)
    parameter = re.compile(r"<parameter=(?P<name>[^>\s<]+)>")
    value_lead: ClassVar[str] = "\n"
    value_close: ClassVar[tuple[str, ...]] = ("\n</parameter>", "</parameter>")
    value_ends: ClassVar[tuple[str, ...]] = (
        *value_close,
        *("\n<parameter=", "\n</function>", "\n</tool_call>", "</tool_call>"),
    )
    frame: ClassVar[CallFrame] = CallFrame(f"{open}\n", f"\n{close}\n{open}\n", f"\n{close}")

    @classmethod
    def value_head(cls, name: str, part: JsonObject) -> str:
        return f"<parameter={name}>{cls.value_lead}"


class SeedCalls(XmlParameterCalls):
    """Seed-OSS: the same within <seed:tool_call>, values without lines of their own."""

    name = "seed_xml"
    open, close = "<seed:tool_call>", "</seed:tool_call>"
    signs = (("seed:tool_call>", "<function="),)
    openings, marks, sections, section_ends = (open, "<function="), (open, close), (open,), (close,)
    thoughts = SEED
    value_lead = ""
    value_close = ("</parameter>",)
    value_ends = (*value_close, "\n<parameter=", "\n</function>", close)
    frame = CallFrame(f"{open}\n", f"\n{close}\n{open}\n", f"\n{close}")
