"""Rewards of sampled answers: a function of the user's, or agreement with the answer that the data set has."""

import importlib.util
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from roofline.common.errors import ConfigError, RooflineError, describe_error

Record = Mapping[str, object]  # a line of the data set
Reward = Callable[[str, Record], float]  # of an answer's text
EXACT = "exact_match"
ANSWERS = ("answer", "completion", "response", "output")  # keys of the right answer, the first that a record has


def reward_of(name: str) -> Reward:
    """The reward "FILE.py:FUNCTION", or "exact_match". Raises ConfigError."""
    if name == EXACT:
        return exact_match
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"reward={name}: it is neither {EXACT} nor FILE.py:FUNCTION")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"reward={name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"roofline_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward={name}: {path} cannot be imported: {describe_error(error)}") from error
    target = getattr(module, function, None)
    if not callable(target):
        raise ConfigError(f"reward={name}: {path} has no function {function}")

    def reward(answer: str, record: Record) -> float:
        try:
            result = target(answer, record)
        except Exception as error:
            raise RooflineError(
                f"reward={name} failed on the answer {answer[:60]!r}{_line(error, path)}: {describe_error(error)}"
            ) from error
        try:
            value = float(result)
        except (TypeError, ValueError) as error:
            raise RooflineError(
                f"reward={name} returned {result!r:.60} for the answer {answer[:60]!r}: it has to return a number"
            ) from error
        if not math.isfinite(value):
            raise RooflineError(
                f"reward={name} is {value} for the answer {answer[:60]!r}: it has to be a finite number"
            )
        return value

    return reward


def _line(error: Exception, path: Path) -> str:
    """Return where in the user's file an error was raised; nothing where it was outside of it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""


def exact_match(answer: str, record: Record) -> float:
    """1 for the text of the record's answer, without space around it, else 0."""
    right = right_answer(record)
    if right is None:
        raise RooflineError(f"reward={EXACT}: a prompt has no right answer under {', '.join(ANSWERS)}")
    return float(answer.strip() == right.strip())


def right_answer(record: Record) -> str | None:
    """The answer that a record has for its prompt: a text, or a number as JSON writes it."""
    return next((text for key in ANSWERS if (text := _as_text(record.get(key))) is not None), None)


def _as_text(value: object) -> str | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # tables have whole numbers as floats
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)
