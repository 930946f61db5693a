"""Values as Python writes them, read without Python: texts, numbers, True, False, None, lists and mappings."""

import re

from roofline.text.replies.json_scanner import MAX_DEPTH, SPACES

_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,400})(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class LiteralReader:
    """Reads values of a text from a place on. Every method raises ValueError where the text has none there."""

    def __init__(self, text: str) -> None:
        self._text, self.at = text, 0

    def entire(self) -> object:
        """Return the value that the text is."""
        value = self.value()
        if self.skip_spaces() != len(self._text):
            raise ValueError("something stands behind the value")
        return value

    def skip_spaces(self) -> int:
        """Return the place behind white space."""
        while self.at < len(self._text) and self._text[self.at] in SPACES:
            self.at += 1
        return self.at

    def value(self, depth: int = 0) -> object:
        """Return the value that stands next."""
        self.skip_spaces()
        if depth > MAX_DEPTH:
            raise ValueError("values are nested too deep")
        for close, open in (("]", "["), (")", "(")):
            if self._take(open):
                return self._list(close, depth + 1)
        if self._take("{"):
            return self._mapping(depth + 1)
        string = _STRING.match(self._text, self.at)
        if string is not None:
            self.at = string.end()
            text = _ESCAPE.sub(_unescaped, string[1] if string[1] is not None else string[2])
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # pairs of escapes are one
        return self._scalar()

    def _scalar(self) -> object:
        number = _NUMBER.match(self._text, self.at)
        if number is not None:
            self.at = number.end()
            is_integer = number[1] is None and number[2] is None
            return int(number[0]) if is_integer else float(number[0])
        word = _WORD.match(self._text, self.at)
        if word is None or word[0] not in _WORDS:
            raise ValueError("no value stands there")
        self.at = word.end()
        return _WORDS[word[0]]

    def _list(self, close: str, depth: int) -> list[object]:
        values: list[object] = []
        while not self._take(close):
            values.append(self.value(depth))
            if not self._take(","):
                self._expect(close)
                break
        return values

    def _mapping(self, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        while not self._take("}"):
            key = self.value(depth)
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            self._expect(":")
            values[key] = self.value(depth)
            if not self._take(","):
                self._expect("}")
                break
        return values

    def _take(self, mark: str) -> bool:
        self.skip_spaces()
        is_there = self._text.startswith(mark, self.at)
        self.at += len(mark) * is_there
        return is_there

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"{mark!r} is missing")


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] in "uUx" and len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    return _ESCAPES.get(escape, escape if escape in "\\'\"/" else f"\\{escape}")
