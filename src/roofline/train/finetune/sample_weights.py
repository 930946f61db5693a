"""Tells whether a message or a whole record says that it is not to be trained on."""

import math
from collections.abc import Mapping

from roofline.common.errors import ConfigError
from roofline.common.fields import describe
from roofline.train.data.record_fields import RecordFields

# Whether an answer is trained on: OpenAI's, axolotl's two, ms-swift's.
SWITCHES = ("weight", "train", "training", "loss")
_RECORD_WEIGHTS = ("weight", "weights", "sample_weight", "example_weight", "instance_weight", "loss_weight")
_RECORD_SWITCHES = ("train", "training", "trainable", "loss")  # false: not to be trained on
_BAD_MARKS = ("is_bad", "bad", "skip", "exclude", "excluded", "ignore", "discard")  # true: not to be trained on


def is_trained(turn: Mapping[str, object], where: str, remarks: set[str]) -> bool:
    """Whether an assistant's message is to be trained on, as it says itself. Raises ConfigError."""
    if turn.get("train_detail"):
        raise ConfigError(f"{where}: its train_detail masks parts of it; give each part a message, or remove it")
    values = {key: _number(turn[key], f"{where}: its {key}") for key in SWITCHES if turn.get(key) is not None}
    for key, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{where}: its {key} is {value:g}, and nothing is trained away from an answer: give 0 for an answer "
                "that is not to be trained on, 1 for one that is, or train on pairs (roofline prefer)"
            )
    if not {0.0, 1.0}.issuperset(values.values()):
        remarks.add("weights of messages other than 0 and 1 (they count as 1)")
    return 0 not in values.values()


def refuse_untrained(record: RecordFields, where: str) -> None:
    """Raise ConfigError for a record that says of itself that it is not to be trained on, under keys that no reader of
    its form asked for: a weight of 0 or below, `train` of false, a mark such as `is_bad`."""
    for key in record.unread:
        value = record.peek(key)
        if _says_untrained(key, value):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{where}: {key} is {shown}, which says that the record is not to be trained on, and all of it would "
                "be: remove the record, or the key"
            )


def _says_untrained(key: str, value: object) -> bool:
    number, word = _plain_number(value), str(value).strip().lower()
    if key in _RECORD_WEIGHTS and number is not None and not number > 0:
        return True
    if key in _RECORD_SWITCHES and (value is False or word == "false"):
        return True
    if key == "train" and number == 0:
        return True
    return key in _BAD_MARKS and (value is True or word == "true" or number == 1)


def _plain_number(value: object) -> float | None:
    """A number, also one that is written as text; None for anything else."""
    try:
        return float(value) if isinstance(value, bool | int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _number(value: object, where: str) -> float:
    """0 or 1 for false or true; numbers may be written as text."""
    word = str(value).strip().lower()
    number = {"false": 0.0, "true": 1.0}.get(word, _plain_number(value))
    if number is None:
        raise ConfigError(f"{where} is {describe(value)}, neither a number nor true or false")
    return number
