"""Chat templates that read the content of a message as a list of parts alone, as some of models with pictures do.

Given a text in its place they would write nothing of it, and say nothing either: Jinja loops over its characters.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from roofline.common.errors import RequestError

_LOOP = re.compile(r"""\bin\s+\w+(\.content|\[\s*['"]content['"]\s*\])""")
_PROBE = "roofline probe"
Messages = Sequence[Mapping[str, object]]


def reads_parts_alone(source: str, render: Callable[[Messages], str]) -> bool:
    """Whether a template writes a user's text when it is a list of parts, and not when it is a text.

    source: Jinja, which is rendered only where it loops over a content; render: what it makes of messages.
    """
    if _LOOP.search(source) is None:
        return False
    message = {"role": "user", "content": _PROBE}
    return not _writes(render, [message]) and _writes(render, as_parts([message]))


def as_parts(messages: Messages) -> list[Mapping[str, object]]:
    """The messages with each text as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _writes(render: Callable[[Messages], str], messages: Messages) -> bool:
    try:
        return _PROBE in render(messages)
    except RequestError:  # it fails on such a message, or refuses it
        return False
