"""Answers that go on from a beginning: what of it is written into the prompt, and what the answer's form has of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roofline.engine.constraint import Constraint
from roofline.server.text_side import LONGEST_OPENING, TextSide
from roofline.text.replies.reasoning import CLOSE


@dataclass(frozen=True)
class Beginning:
    """What stands before an answer in its turn.

    text: of the answer, as the prompt has it. thinking: the reasoning was opened before the text. spoken: what of the
    text is no reasoning; None: the answer goes on within the reasoning. close: the mark that ends it.
    """

    text: str = ""
    thinking: bool = False
    spoken: str | None = ""
    close: str = CLOSE

    def held_to(self, form: Constraint) -> Constraint:
        """A form that beginning and answer have together; reasoning comes before it and is free."""
        if self.spoken is None:
            return replace(form, begun=self.text, behind=self.close)
        return replace(form, begun=self.spoken)


def beginning_of(ids: Sequence[int], content: str | None, text: TextSide) -> Beginning:
    """The beginning of an answer to a prompt. content: of the last message; None: the answer begins itself."""
    if content is None:
        thinking = text.ends_thinking(ids)
        return Beginning(thinking=thinking, spoken=None if thinking else "", close=text.reply_format.thoughts.close)
    tail = text.decode(ids[-(len(content.encode("utf-8", "replace")) + LONGEST_OPENING) :])
    spellings = (content, content.rstrip(), content.strip())  # some templates trim it
    begun = next((each for each in spellings if tail.endswith(each)), content)
    thoughts = text.reply_format.thoughts
    if not text.reply_format.thinks:
        return Beginning(begun, spoken=begun)
    thinking = tail[: len(tail) - len(begun)].rstrip().endswith(thoughts.open)
    if not (thinking or begun.lstrip().startswith(thoughts.open)):
        return Beginning(begun, spoken=begun)
    _, mark, behind = begun.partition(thoughts.close)
    return Beginning(begun, thinking, behind.lstrip() if mark else None, thoughts.close)
