"""How deep JSON nests, told from its bytes before a parser builds anything of it."""

import re

# A string of JSON, or the rest where it has no end: without possessive repeats, and without that, an open string with
# many quotes in it would be read from each of them to the end.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def json_depth_within(raw: bytes, most: int) -> bool:
    """Whether brackets nest at most `most` deep.

    Without strings and all else only brackets are left; each round takes off the innermost ones. What is left after
    `most` rounds nests deeper, or is not balanced, which the parser would refuse anyway.
    """
    brackets = STRING.sub(b"", raw).translate(None, NOT_BRACKETS).replace(b"{", b"[").replace(b"}", b"]")
    for _ in range(most):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets
