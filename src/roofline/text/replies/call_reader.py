"""One call of a tool, written as a JSON object with a name and arguments, understood while it is being written."""

import json
from collections.abc import Collection

from roofline.common.json_escapes import whole_escapes
from roofline.text.replies.json_scanner import SPACES, JsonScanner
from roofline.text.replies.parser import CallDelta

ARGUMENTS = ("arguments", "parameters")
ALLOWED_KEYS = frozenset({"name", "type", "id", *ARGUMENTS})
MOST_UNDECIDED = 1 << 20  # characters that are kept back until it is certain whether they are a call


class CallReader:
    """Takes the characters of one object. Arguments are told as they come, once the name is known.

    `state`: "undecided"; "call", once it is certain; "complete", at its closing bracket; "broken", where a call stops
    being JSON; "text", where the object is none of a call: then `raw` is its text so far.

    Args:
        names: of the tools that may be called.
        number: of this call within the reply.
    """

    def __init__(self, names: Collection[str], number: int) -> None:
        self.state = "undecided"
        self._raw: list[str] = []  # lists, as adding to a string that an object holds copies it each time
        self._names, self._number = names, number
        self._scanner = JsonScanner()
        self._name: str | None = None
        self._key, self._in_value = "", False
        self._value: list[str] = []  # of an object of arguments its first character alone
        self._arguments: list[str] = []  # not told yet
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """The text so far, while it is not certain that it is a call."""
        return "".join(self._raw)

    @property
    def only_names(self) -> bool:
        """Whether the text so far is no more than what comes before the arguments of a call: a tool's name, or less."""
        text = "".join(self.raw.split())
        beginnings = (f'{{"name":{json.dumps(name)}' for name in self._names)
        return any("".join(beginning.split()).startswith(text) for beginning in beginnings)

    @property
    def ended(self) -> bool:
        """Whether no more characters belong to the object."""
        return self.state in ("complete", "broken", "text")

    def feed(self, character: str) -> None:
        """Take the next character, while not `ended`."""
        if self.state == "undecided":
            self._raw.append(character)
        before, depth = self._scanner.mode, self._scanner.depth
        valid = self._scanner.feed(character) and (depth > 0 or character == "{")
        if not valid or (self.state == "undecided" and len(self._raw) > MOST_UNDECIDED):
            self._fail()
        elif depth == 1 and not self._in_value:
            self._between(before, character)
        elif self._in_value:
            self._in_value_of_key(character)
        if self._scanner.complete and not self.ended:
            self._complete()

    def take(self) -> list[CallDelta]:
        """What is new since the last time."""
        if self.state not in ("call", "complete", "broken") or self._name is None:
            return []
        name, arguments = self._name, "".join(self._arguments)
        self._arguments.clear()
        if name:
            self._name = ""  # told
            return [CallDelta(self._number, name, arguments)]
        return [CallDelta(self._number, None, arguments)] if arguments else []

    def _between(self, before: str, character: str) -> None:
        """Within the object, outside of its values."""
        if before in ("key", "first key") and character == '"':
            self._key = ""
        elif before == "string":
            if self._scanner.mode == "string":
                self._key += character
            elif self._key not in ALLOWED_KEYS:
                self._fail()
        elif before == "value" and character not in SPACES:
            self._in_value, self._value = True, [character]
            if self._key in ARGUMENTS:
                if self._has_arguments or character not in '{"':
                    self._fail()
                self._has_arguments = True
                self._arguments += [character] if character == "{" else []

    def _in_value_of_key(self, character: str) -> None:
        ended = self._scanner.depth <= 1 and self._scanner.mode != "string" and self._scanner.mode != "scalar"
        closes = ended and character in '"}]' and self._scanner.depth == 1
        if not ended or closes:
            if self._key in ARGUMENTS and self._value[0] == "{":
                self._arguments.append(character)
            else:
                self._value.append(character)
        if ended:
            self._in_value = False
            self._end_value()

    def _end_value(self) -> None:
        if self._key == "name":
            try:
                name = json.loads("".join(self._value))
            except ValueError:
                name = None
            if self._name is not None or not isinstance(name, str) or name not in self._names:
                self._fail()
            else:
                self._name, self.state = name, "call"
        elif self._key in ARGUMENTS and self._value[0] == '"':  # some models write JSON within a string
            arguments = _inner_object("".join(self._value))
            if arguments is None:
                self._fail()
            else:
                self._arguments.append(arguments)

    def _complete(self) -> None:
        if self.state != "call":
            self.state = "text"
            return
        if not self._has_arguments:
            self._arguments = ["{}"]
        self.state = "complete"

    def _fail(self) -> None:
        self.state = "broken" if self.state == "call" else "text"


def _inner_object(string: str) -> str | None:
    """The text of the JSON object that a JSON string holds; None: it holds none."""
    scanner = JsonScanner()
    try:
        text = json.loads(whole_escapes(string)).strip(SPACES)
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) and all(map(scanner.feed, text)) else None
