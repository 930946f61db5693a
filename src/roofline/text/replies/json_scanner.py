"""Reads one JSON value a character at a time, so that a call of a tool is understood while it is being written."""

import re

SPACES = " \t\n\r"
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("-+.0123456789eEtrufalsn")
MAX_DEPTH = 128


class JsonScanner:
    """Follows the structure of an object or array.

    `depth`: how many brackets are open. `mode`: what may come next. `complete`: whether the value has ended.
    """

    def __init__(self) -> None:
        self.mode = "value"
        self.complete = False
        self._open: list[str] = []
        self._scalar = ""
        self._is_key = False
        self._escape = 0  # characters of an escape that are still to come

    @property
    def depth(self) -> int:
        return len(self._open)

    def feed(self, character: str) -> bool:
        """Take the next character; False: it cannot stand there, and the value is no JSON."""
        if self.complete:
            return character in SPACES
        if self.mode == "string":
            return self._in_string(character)
        if self.mode == "scalar":
            if character in _SCALAR_CHARACTERS:
                self._scalar += character
                return len(self._scalar) < 400
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self.mode = "next"
        if character in SPACES:
            return True
        return self._structure(character)

    def _structure(self, character: str) -> bool:
        if self.mode == "colon":
            self.mode = "value"
            return character == ":"
        if character in "]}" and self._may_close(character):
            self._open.pop()
            self.mode, self.complete = "next", not self._open
            return True
        if self.mode == "next":
            self.mode = "key" if self._open[-1] == "{" else "value"
            return character == ","
        if self.mode in ("key", "first key"):
            self.mode, self._is_key = "string", True
            return character == '"'
        return self._begin_value(character)

    def _may_close(self, character: str) -> bool:
        if not self._open or self._open[-1] != {"]": "[", "}": "{"}[character]:
            return False
        return self.mode in ("next", "first key", "first value")

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            self._open.append(character)
            self.mode = "first key" if character == "{" else "first value"
            return len(self._open) <= MAX_DEPTH
        if not self._open:  # of a call there is an object or a list around every scalar
            return False
        if character == '"':
            self.mode, self._is_key = "string", False
            return True
        self.mode, self._scalar = "scalar", character
        return character in "-0123456789tfn"

    def _in_string(self, character: str) -> bool:
        if self._escape == 1:
            self._escape = 4 + 1 if character == "u" else 0
            return character in '"\\/bfnrtu'
        if self._escape:
            self._escape = 0 if self._escape == 2 else self._escape - 1
            return character in "0123456789abcdefABCDEF"
        if character == "\\":
            self._escape = 1
        elif character == '"':
            self.mode = "colon" if self._is_key else "next"
        return character >= " "
