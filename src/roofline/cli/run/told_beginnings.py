"""Beginnings from which the answer to a prompt may go on: where no request is at hand, only its ids tell them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline.server.text_side import TextSide

MOST_BEGINNINGS = 8  # of a prompt that are tried: each is parsed in every format
MOST_IDS = 1 << 14  # of the end of a prompt, where its last turn has none of the tokens that begin one


def possible_beginnings(prompt: Sequence[int] | None, text: "TextSide") -> list[str]:
    """The ends of a prompt's last turn that open reasoning or a call, from the earliest on; none for an unknown prompt.

    What stands before such an opening is text in any case, and changes nothing of what a parser makes of the answer.
    """
    from roofline.text.replies.reply_format import REPLY_MARKS

    if not prompt:
        return []
    turn_marks = text.special_ids() - text.special_ids(REPLY_MARKS)
    ids = prompt[-MOST_IDS:]
    start = next((at + 1 for at in range(len(ids) - 1, -1, -1) if ids[at] in turn_marks), 0)
    tail = text.decode(ids[start:])
    marked = re.finditer("|".join(map(re.escape, REPLY_MARKS)), tail)
    objects = re.finditer(r"^[^{\[\n]*([{\[])", tail, re.MULTILINE)  # the first of each line
    places = {match.start() for match in marked} | {match.start(1) for match in objects}
    return [tail[place:] for place in sorted(places)]
