"""JSON of untrusted files: of bounded size and depth, without repeated keys."""

import json
import math
from pathlib import Path

from roofline.common.fields import refuse, shorten
from roofline.common.files import read_regular
from roofline.common.json_types import JsonObject

MAX_JSON_BYTES = 1 << 27
_NUMBER = "__float__"  # transformers writes numbers that JSON has no word for as {"__float__": "Infinity"}
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class RepeatedKeyError(ValueError):
    """An object of JSON has a key twice, of which a reader would take one without a word."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these keys and values, as an `object_pairs_hook`. Raises RepeatedKeyError."""
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        earlier: set[str] = set()
        twice = next(key for key, _ in pairs if key in earlier or earlier.add(key))  # type: ignore[func-returns-value]
        raise RepeatedKeyError(f"the key {shorten(twice)!r} appears twice")
    return parsed


def parse_json(path: Path | str, field: str, text: bytes) -> object:
    """JSON without repeated keys. Raises ConfigError naming file and field, also for nesting without end."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        refuse(path, field, str(error))
    except RecursionError:
        refuse(path, field, "is nested too deeply")
    except ValueError as error:  # not JSON, not UTF-8, or a number of absurd length
        refuse(path, field, f"is not JSON: {shorten(str(error))}; mend it, or get the file again")


def parse_object(path: Path | str, text: bytes) -> JsonObject:
    """The JSON object that a file holds. Raises ConfigError."""
    parsed = parse_json(path, "file", text)
    if not isinstance(parsed, dict):
        refuse(path, "file", "does not hold a JSON object")
    return parsed


def read_json_file(path: Path) -> JsonObject:
    """A JSON object from a file of bounded size. Raises ConfigError."""
    return parse_object(path, read_regular(path, MAX_JSON_BYTES))


def read_config_json(path: Path) -> JsonObject:
    """The config.json of a model, with the numbers that JSON has no word for. Raises ConfigError."""
    return {key: _as_number(value) for key, value in read_json_file(path).items()}


def _as_number(value: object) -> object:
    if isinstance(value, list):
        return [_as_number(item) for item in value]
    if not isinstance(value, dict):
        return value
    word = value.get(_NUMBER)
    if len(value) == 1 and isinstance(word, str) and word in _NUMBERS:
        return _NUMBERS[word]
    return {key: _as_number(item) for key, item in value.items()}
