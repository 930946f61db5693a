"""Which format a model writes calls of tools and reasoning in, told from its chat template."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from roofline.text.replies.call_formats import HermesCalls, MistralCalls, ObjectCalls
from roofline.text.replies.parser import PlainReply, ReplyParser
from roofline.text.replies.reasoning import CLOSE, OPEN, ThinkingReply

CALL_FORMATS: dict[str, Callable[[Collection[str]], ReplyParser]] = {
    "hermes": HermesCalls,
    "llama3": ObjectCalls,
    "json": ObjectCalls,
    "mistral": MistralCalls,
}
# Where a template writes one of these, its model does; the first that is there decides.
SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters"', "llama3"),
)
CALL_MARKS = (HermesCalls.open, HermesCalls.close, MistralCalls.open, MistralCalls.separator, ObjectCalls.prefix)


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes.

    calls: a name of CALL_FORMATS. thinks: whether a reply may begin with reasoning. takes_tools: whether the chat
    template writes the tools of a request; where it does not, a system message has to.
    """

    calls: str
    thinks: bool
    takes_tools: bool

    def marks(self, *, tools: bool) -> frozenset[str]:
        """Return the texts that a parser of such replies looks for, which a tokenizer may have as special tokens."""
        thoughts = (OPEN, CLOSE) if self.thinks else ()
        return frozenset((*thoughts, *(CALL_MARKS if tools else ())))

    def parser(self, names: Collection[str], *, thinking: bool) -> ReplyParser:
        """Of a reply in which these tools may be called; thinking: the prompt ends within the reasoning."""
        calls_parser = CALL_FORMATS[self.calls](names) if names else PlainReply()
        return ThinkingReply(calls_parser, open=thinking) if self.thinks else calls_parser


def reply_format(template: str, calls: str | None = None, thinks: bool | None = None) -> ReplyFormat:
    """The format of a model with this chat template; `calls` and `thinks`, where they are known otherwise."""
    takes_tools = "tools" in template
    if calls is None:
        calls = next((name for sign, name in SIGNS if takes_tools and sign in template), "hermes")
    return ReplyFormat(calls, OPEN in template if thinks is None else thinks, takes_tools)
