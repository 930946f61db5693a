"""Comparing a bundle's weights with their hash, before or after a model answers; what came of it is kept for doctor."""

import hashlib
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.backends.base import ChecksWeights
from roofline.bundle import manifest as names
from roofline.bundle.manifest import BundleError
from roofline.common import env, files, log
from roofline.common.errors import ConfigError
from roofline.common.json_files import read_json_file

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.bundle.reader import Bundle


@dataclass(frozen=True)
class WeightsCheckOutcome:
    """The last comparison of a bundle: its directory, when (seconds since 1970), and what was wrong, None: nothing."""

    bundle: str
    time: float
    problem: str | None


def check_weights(bundle: "Bundle", executable: "Executable", when: str) -> None:
    """Compare the weights with their hash, as the option `check_weights` says. Raises BundleError for "first" where the
    weights were changed.

    Otherwise logs a warning where the last comparison said that they were.
    """
    if when != "first" and (problem := last_problem(bundle.path)):
        remedy = f"It answers all the same; `roofline doctor --verify {bundle.path}` compares it again."
        log.get("bundle").warning("%s %s", problem, remedy)
    if when == "off" or not isinstance(executable, ChecksWeights):
        return
    facts = bundle.manifest.files[names.WEIGHTS]
    error = bundle.changed(names.WEIGHTS)
    if when == "later":
        executable.check_weights(facts["bytes"], facts["sha256"], str(error), partial(keep, bundle.path))
        return
    right = executable.weights_hash(facts["bytes"]) == facts["sha256"]
    keep(bundle.path, None if right else str(error))
    if not right:
        raise error


def outcomes() -> list[WeightsCheckOutcome]:
    """The last comparison of each bundle that is still as it was then, by its directory."""
    outcomes = filter(None, map(_read, files.entries(_folder())))
    return sorted(outcomes, key=lambda outcome: outcome.bundle)


def last_problem(path: Path) -> str | None:
    """What the last comparison of a bundle said was wrong; None: nothing, or its weights were written since."""
    outcome = _read(_file(path))
    return None if outcome is None else outcome.problem


def verify(path: Path) -> "Bundle":
    """`reader.verify`, whose outcome for the weights is kept too."""
    from roofline.bundle import reader

    try:
        bundle = reader.verify(path)
    except BundleError as error:
        if error.reason == reader.changed_reason(names.WEIGHTS):
            keep(path, str(error))
        raise
    keep(path, None)
    return bundle


def keep(path: Path, problem: str | None) -> None:
    """Write down what came of comparing a bundle's weights just now."""
    file = _file(path)
    with files.where_possible("what came of checking weights is", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        values = {"bundle": str(path.resolve()), "time": time.time(), "problem": problem}
        files.write_atomically(file, json.dumps(values))


def _read(file: Path) -> WeightsCheckOutcome | None:
    """A kept outcome; None where there is none, or one of another version, or of weights that were written since."""
    try:
        outcome = WeightsCheckOutcome(**read_json_file(file))
        changed = (Path(outcome.bundle) / names.WEIGHTS).stat().st_ctime  # unlike st_mtime, of `cp -p` too
        return outcome if outcome.time >= changed else None
    except (ConfigError, OSError, TypeError, ValueError):
        return None


def _file(path: Path) -> Path:
    return _folder() / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}.json"


def _folder() -> Path:
    return env.home() / "weights-checks"
