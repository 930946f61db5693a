"""Which format a model writes calls of tools and reasoning in, told from its chat template."""

from collections.abc import Collection
from dataclasses import dataclass

from roofline.text.replies.formats.hermes import HermesCalls
from roofline.text.replies.formats.table import CALL_FORMATS, CALL_MARKS, call_format
from roofline.text.replies.parser import PlainReply, ReplyParser
from roofline.text.replies.reasoning import THINK, THOUGHTS, ThinkingReply, ThoughtMarks

# All texts that a parser of replies may look for.
THOUGHT_MARKS = tuple(mark for thoughts in THOUGHTS for mark in (thoughts.open, thoughts.close))
REPLY_MARKS = tuple(dict.fromkeys((*THOUGHT_MARKS, *CALL_MARKS)))


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes.

    Args:
        calls: a name of CALL_FORMATS.
        thinks: whether a reply may begin with reasoning.
        takes_tools: whether the chat template writes the tools of a request; where it does not, a system message has
            to.
        thoughts: what stands around the reasoning.
        takes_calls: whether a chat template that does not write the tools writes calls and their results all the same.
        is_unknown: the chat template describes tools in a format that is none of ours, so `calls` says nothing.
    """

    calls: str
    thinks: bool
    takes_tools: bool
    thoughts: ThoughtMarks = THINK
    takes_calls: bool = False
    is_unknown: bool = False

    def marks(self, *, tools: bool) -> frozenset[str]:
        """Return the texts that a parser of such replies looks for, which a tokenizer may have as special tokens."""
        thoughts = (self.thoughts.open, self.thoughts.close) if self.thinks else ()
        form = CALL_FORMATS[self.calls]
        return frozenset((*thoughts, *(form.marks if tools or form.tells_reasoning else ())))

    def parser(self, tools: Collection[str], *, thinking: bool) -> ReplyParser:
        """Return a parser of a reply.

        tools: names of those that it may call; a mapping has the schemas of their parameters. thinking: the prompt ends
        within the reasoning.
        """
        form = CALL_FORMATS[self.calls]

        def rest() -> ReplyParser:
            return form(tools) if tools or form.tells_reasoning else PlainReply()

        if not self.thinks or form.tells_reasoning:
            parser = rest()
            if thinking:
                parser.push(self.thoughts.open)
            return parser
        within = rest if form.is_marked else PlainReply
        return ThinkingReply(rest, open=thinking, marks=self.thoughts, within=within)


def reply_format(template: str, calls: str | None = None, thinks: bool | None = None) -> ReplyFormat:
    """The format of a model with this chat template; `calls` and `thinks`, where they are known otherwise."""
    takes_tools, form = "tools" in template, call_format(template)
    chosen = form or HermesCalls if calls is None else CALL_FORMATS[calls]
    candidates = (chosen.thoughts, *THOUGHTS)
    thoughts = next((marks for marks in candidates if (marks.sign or marks.open) in template), None)
    return ReplyFormat(
        chosen.name,
        thoughts is not None if thinks is None else thinks,
        takes_tools,
        thoughts or THINK,
        takes_calls=not takes_tools and "tool_calls" in template and chosen.writes(template),
        is_unknown=takes_tools and calls is None and form is None,
    )
