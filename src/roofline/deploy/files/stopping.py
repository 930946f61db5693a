"""How long whoever ends a server has to wait for it."""

from collections.abc import Sequence
from itertools import pairwise

from roofline.server.limits import Limits

CLOSING_SECONDS = 15  # for errors of answers that were cut off, and for engines to end
FLAG = "--drain-seconds"


def stop_seconds(words: Sequence[str]) -> int:
    """Return the seconds after which a server that was told to end has ended by itself. words: of `roofline serve`."""
    drain = Limits.drain_seconds
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        if flag == FLAG and value.isdigit():  # anything else is refused by the server itself
            drain = int(value)
    return drain + CLOSING_SECONDS
