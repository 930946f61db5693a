"""Numbers that JSON has no word for, as transformers writes them into a config.json: {"__float__": "Infinity"}."""

import math

from roofline.common.json_types import JsonObject

_TAG = "__float__"
_VALUES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def with_floats(config: JsonObject) -> JsonObject:
    """A configuration with these objects as the numbers that they stand for."""
    return {key: _number(value) for key, value in config.items()}


def _number(value: object) -> object:
    if isinstance(value, dict):
        tag = value.get(_TAG)
        return _VALUES[tag] if len(value) == 1 and isinstance(tag, str) and tag in _VALUES else with_floats(value)
    return [_number(item) for item in value] if isinstance(value, list) else value
