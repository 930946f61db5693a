"""How deep JSON nests and how much it holds, told from its bytes before a parser builds anything of it."""

import re
from dataclasses import dataclass

# A string of JSON, or the rest where it has no end: without possessive repeats, and without that, an open string with
# many quotes in it would be read from each of them to the end.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
STRING = re.compile(_STRING, re.DOTALL)
STRINGS = re.compile(rb'(?:[^"]*+' + _STRING + rb"){1,4096}+", re.DOTALL)  # and what stands before each
PIECE_BYTES = 64 << 10  # from which on a text is read in pieces, so that other threads have their turns
NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))


@dataclass(frozen=True)
class JsonStructure:
    """What JSON text has outside its strings. marks: its brackets and commas; strings: how many there are, names of
    fields among them; names: how many of those."""

    marks: bytes
    strings: int
    names: int

    @property
    def containers(self) -> int:
        """Objects and arrays."""
        return self.marks.count(b"[") + self.marks.count(b"{")

    @property
    def commas(self) -> int:
        """One less than the values of each object and array together."""
        return self.marks.count(b",")

    def nests_within(self, most: int) -> bool:
        """Whether brackets nest at most `most` deep.

        Each round takes off the innermost ones. What is left after `most` rounds nests deeper, or is not balanced,
        which the parser would refuse anyway.
        """
        brackets = self.marks.translate(None, b",").replace(b"{", b"[").replace(b"}", b"]")
        for _ in range(most):
            if not brackets:
                return True
            brackets = brackets.replace(b"[]", b"")
        return not brackets


def json_structure(raw: bytes) -> JsonStructure:
    """The structure of JSON text, or of what is none."""
    marks, strings, names, at = [], 0, 0, 0
    while at < len(raw):
        piece = STRINGS.match(raw, at) if len(raw) > PIECE_BYTES else None
        end = len(raw) if piece is None else piece.end()
        outside, count = STRING.subn(b"", raw[at:end])
        marks.append(outside.translate(None, NOT_STRUCTURE))
        strings += count
        names += outside.count(b":")
        at = end
    return JsonStructure(b"".join(marks), strings, names)


def json_depth_within(raw: bytes, most: int) -> bool:
    """Whether brackets of JSON text nest at most `most` deep."""
    return json_structure(raw).nests_within(most)
