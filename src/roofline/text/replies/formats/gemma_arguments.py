"""Arguments of calls as Gemma 4 writes them, turned into JSON while they come."""

import json
import re

from roofline.text.replies.call_format import first_of
from roofline.text.replies.json_scanner import MAX_DEPTH
from roofline.text.replies.parser import begun
from roofline.text.replies.values import allowed_types, json_value, parameter_schema

QUOTE = '<|"|>'
_KEY = re.compile(r"[^\s,:{}\[\]<\"]*")
_LONGEST_KEY = 256


class GemmaArguments:
    """Turns arguments as Gemma writes them into JSON, as they come: keys without quotes, texts between marks.

    schema: of the tool's parameters, which types what is written without marks.
    """

    def __init__(self, schema: object) -> None:
        self._schema = schema
        self.pending = ""
        self._parts: list[str] = ["{"]
        self._open: list[list[str | int]] = [["}", 0]]  # of each open bracket what closes it, and how much it has
        self._mode = "key"
        self._text: list[str] = []  # of a text in quotes of JSON
        self._name = ""
        self.is_broken = False

    @property
    def complete(self) -> bool:
        """Whether the closing bracket of the arguments was there."""
        return not self._open

    def push(self, text: str) -> str:
        """Take more of the arguments: more of their JSON. `pending` is what was not used."""
        self.pending += text
        while self.pending and self._open and not self.is_broken and self._advance():
            pass
        return self.take()

    def take(self) -> str:
        """Return the JSON that is new."""
        parts, self._parts = self._parts, []
        return "".join(parts)

    def end(self) -> str:
        """Return what makes the JSON whole of arguments that have not ended."""
        if self._mode in ("text", "text of key"):
            self._parts.append(_escaped(self.pending[: len(self.pending) - begun(self.pending, QUOTE)]) + '"')
        elif self._mode in ("string", "string of key"):
            self._parts.append(json.dumps("".join(self._text), ensure_ascii=False))
        elif self._mode == "value" and self._open and self._open[-1][0] == "}":
            scalar = self.pending.split("<")[0].strip()
            self._parts.append(json_value(scalar, None) if scalar and not self.is_broken else "null")
        if self._mode in ("text of key", "string of key", "colon"):
            self._parts.append(": null")
        while self._open:
            self._parts.append(str(self._open.pop()[0]))
        return self.take()

    def _advance(self) -> bool:
        if self._mode in ("text", "text of key"):
            return self._read_text()
        if self._mode in ("string", "string of key"):
            return self._read_string()
        self.pending = self.pending.lstrip()
        if not self.pending or (len(self.pending) < len(QUOTE) and QUOTE.startswith(self.pending)):
            return False
        if self.pending[0] in "}]":
            return self._close()
        match self._mode:
            case "key":
                return self._read_key()
            case "colon":
                return self._take(":", ": ", "value") or self._break()
            case "next":
                return self._take(",", "", "key" if self._open[-1][0] == "}" else "value") or self._break()
        return self._read_value()

    def _take(self, mark: str, written: str, mode: str) -> bool:
        if not self.pending.startswith(mark):
            return False
        self.pending, self._mode = self.pending.removeprefix(mark), mode
        self._parts.append(written)
        return True

    def _break(self) -> bool:
        self.is_broken = True
        return False

    def _close(self) -> bool:
        if self.pending[0] != self._open[-1][0] or (self._mode in ("colon", "value") and self._open[-1][0] == "}"):
            return self._break()
        self._parts.append(str(self._open.pop()[0]))
        self.pending, self._mode = self.pending[1:], "next"
        return True

    def _begin_item(self, written: str) -> None:
        """What comes is another item of the bracket that is open."""
        self._parts.append(f"{', ' if self._open[-1][1] else ''}{written}")
        self._open[-1][1] = 1

    def _item(self, written: str) -> None:
        """What comes is a value: of a list another one, else that of a key."""
        if self._open[-1][0] == "]":
            self._begin_item(written)
        else:
            self._parts.append(written)

    def _read_key(self) -> bool:
        for mark, mode, written in ((QUOTE, "text of key", '"'), ('"', "string of key", "")):
            if self.pending.startswith(mark):
                self._begin_item(written)
                self.pending, self._mode, self._text = self.pending.removeprefix(mark), mode, []
                return True
        match = _KEY.match(self.pending)
        key = match[0] if match is not None else ""
        if len(key) == len(self.pending) and len(key) < _LONGEST_KEY:
            return False
        if not key or len(key) >= _LONGEST_KEY:
            return self._break()
        self._name = key if len(self._open) == 1 else ""
        self._begin_item(json.dumps(key, ensure_ascii=False))
        self.pending, self._mode = self.pending[len(key) :], "colon"
        return True

    def _read_value(self) -> bool:
        for mark, written, mode in ((QUOTE, '"', "text"), ('"', "", "string")):
            if self.pending.startswith(mark):
                self._item(written)
                self.pending, self._mode, self._text = self.pending.removeprefix(mark), mode, []
                return True
        for open, close, mode in (("{", "}", "key"), ("[", "]", "value")):
            if self.pending.startswith(open):
                self._item(open)
                self._open.append([close, 0])
                self.pending, self._mode = self.pending[1:], mode
                return len(self._open) <= MAX_DEPTH or self._break()
        place = first_of(self.pending, (",", "}", "]", QUOTE, "<tool_call|>", "\n"))
        if place is None:
            return False
        types = allowed_types(parameter_schema(self._schema, self._name), self._schema) if self._name else None
        if place[0] == 0:
            return self._break()
        self._item(json_value(self.pending[: place[0]].strip(), types if len(self._open) == 1 else None))
        self.pending, self._mode = self.pending[place[0] :], "next"
        return True

    def _read_text(self) -> bool:
        text, quote, behind = self.pending.partition(QUOTE)
        if not quote:
            text = text[: len(text) - begun(text, QUOTE)]
            behind = self.pending[len(text) :]
        self._parts.append(_escaped(text) + ('"' if quote else ""))
        if quote:
            self._mode = "next" if self._mode == "text" else "colon"
        self.pending = behind
        return bool(quote)

    def _read_string(self) -> bool:
        """Read a text in quotes as JSON has them: it is told when it has ended."""
        for at, character in enumerate(self.pending):
            if character == '"' and not _is_escaped(self._text):
                text = "".join(self._text)
                try:
                    value = json.loads(f'"{text}"', strict=False)
                except ValueError:
                    value = text
                self._parts.append(json.dumps(value, ensure_ascii=False))
                self.pending, self._mode = self.pending[at + 1 :], "next" if self._mode == "string" else "colon"
                return True
            self._text.append(character)
        self.pending = ""
        return False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_escaped(text: list[str]) -> bool:
    """Whether what follows a text stands behind a backslash that is no escaped one itself."""
    count = next((at for at, character in enumerate(reversed(text)) if character != "\\"), len(text))
    return count % 2 == 1
