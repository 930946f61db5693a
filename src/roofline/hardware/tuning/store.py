"""The results of tuning on a machine: records by shape, verdicts by program, and the file that keeps them between runs.

Backends measure (`backends/cpu/tuning/tune.py`). There is one file for each backend and
kind of machine, so that no choice is used on other hardware. A record says which variant of an op of some kind, shape
and regime was fastest; a verdict says whether a whole program became faster with the chosen ones. A load uses
verdicts alone.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, locked, where_possible, write_atomically
from roofline.hardware.tuning.location import path

JsonObject = Mapping[str, Any]  # values are checked where they are read
VERSION = 1  # of the file's layout and of what is measured


@dataclass(frozen=True)
class Setting:
    """What measurements depend on beside the machine.

    run: instruction set and threads, or device options, as text; build: hash of the kernels' sources; compiler: its
    name and version.
    """

    run: str
    build: str
    compiler: str

    def differs(self, other: "Setting") -> str:
        """Why figures measured in this setting do not hold in the `other`; empty where they do."""
        if self.build != other.build:
            return f"measured with kernels {self.build}, these are {other.build}"
        if self.compiler != other.compiler:
            return f"measured with compiler {self.compiler}, this one is {other.compiler}"
        return f"measured with {self.run}, this is {other.run}" if self.run != other.run else ""


def tell_outdated(settings: Iterable[Setting], current: Setting, remedy: str) -> None:
    """Warn where choices that would be used were measured with other kernels or another compiler than the current
    ones, by which they are ignored; nothing is said of other threads or devices, whose choices are for another day."""
    for setting in settings:
        if (setting.build, setting.compiler) != (current.build, current.compiler):
            why = setting.differs(current)
            log.get("hardware").warning("what was tuned is not used: %s; %s measures it again", why, remedy)
            return


@dataclass(frozen=True)
class TuningRecord:
    """The choice for ops of one kind and shape in one regime of rows.

    variant: what was chosen; default: against what; reason: why, in words; figures: ratio of the variant's time to the
    default's with its interval (low, high), `noise`, and what else the measurement has to say.
    """

    kind: str
    shape: str
    regime: str
    setting: Setting
    variant: str
    default: str
    reason: str
    figures: JsonObject
    measured: str

    @property
    def key(self) -> tuple[str, ...]:
        """Records of one key replace each other: that of a new build replaces that of the old one."""
        return (self.kind, self.shape, self.regime, self.setting.run)


@dataclass(frozen=True)
class VariantChoice:
    """A variant for ops of a program, by their indices."""

    ops: tuple[int, ...]
    variant: str


@dataclass(frozen=True)
class TuningVerdict:
    """A program with the chosen variants against the same with defaults, end to end, in one regime.

    kept: whether a load uses `choices`; figures: as a record's.
    """

    program: str
    model: str
    regime: str
    setting: Setting
    choices: tuple[VariantChoice, ...]
    kept: bool
    reason: str
    figures: JsonObject
    measured: str

    @property
    def key(self) -> tuple[str, ...]:
        return (self.program, self.regime, self.setting.run)


@dataclass
class Tunings:
    """The content of a store: records, verdicts, and what unfinished measurements have so far."""

    backend: str
    chip: str
    name: str
    records: dict[tuple[str, ...], TuningRecord] = field(default_factory=dict)
    verdicts: dict[tuple[str, ...], TuningVerdict] = field(default_factory=dict)
    unfinished: dict[str, Any] = field(default_factory=dict)


def load(backend: str, chip: str, name: str = "") -> Tunings:
    """What is stored for this machine; empty where there is nothing that can be used.

    A damaged file is put aside under another name, one of another machine is left; a warning says so.
    """
    empty, file = Tunings(backend, chip, name), path(backend, chip)
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        return empty
    except (OSError, UnicodeDecodeError) as error:
        _put_aside(file, cause_of(error) if isinstance(error, OSError) else str(error))
        return empty
    try:
        raw = json.loads(text)
        version = raw["version"]
        if version != VERSION:
            log.get("hardware").warning("%s is ignored: it has version %s, this is %s", file, version, VERSION)
            return empty
        tunings = _parse(raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _put_aside(file, f"{type(error).__name__}: {error}")
        return empty
    if (tunings.backend, tunings.chip) != (backend, chip):
        log.get("hardware").warning("%s is ignored: it was measured on %s (%s)", file, tunings.name, tunings.chip)
        return empty
    return tunings


def save(tunings: Tunings) -> Path:
    """Merge into the stored file, atomically; entries that other processes stored meanwhile stay.

    `unfinished` is taken as it is here: entries of None are removed. Raises ConfigError where nothing can be written.
    """
    try:
        return _write(tunings)
    except OSError as error:
        target = path(tunings.backend, tunings.chip)
        raise ConfigError(
            f"{target} cannot be written: {cause_of(error)}; set ROOFLINE_HOME to a folder that can"
        ) from error


def save_where_possible(tunings: Tunings) -> bool:
    """`save`, for results that are of use without a file too: where nothing can be written, a warning says so, once.
    Whether they were saved."""
    with where_possible("what is tuned is", path(tunings.backend, tunings.chip)):
        _write(tunings)
        return True
    return False


def _write(tunings: Tunings) -> Path:
    target = path(tunings.backend, tunings.chip)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock")):
        stored = load(tunings.backend, tunings.chip, tunings.name)
        stored.records |= tunings.records
        stored.verdicts |= tunings.verdicts
        stored.unfinished |= tunings.unfinished
        unfinished = {key: value for key, value in stored.unfinished.items() if value is not None}
        raw = {
            "version": VERSION,
            "backend": tunings.backend,
            "chip": tunings.chip,
            "name": tunings.name or stored.name,
            "records": [asdict(record) for record in stored.records.values()],
            "verdicts": [asdict(verdict) for verdict in stored.verdicts.values()],
            "unfinished": unfinished,
        }
        write_atomically(target, json.dumps(raw, indent=1))
    return target


def _parse(raw: JsonObject) -> Tunings:
    """Raises KeyError, TypeError, ValueError or AttributeError on anything that `save` would not have written."""
    tunings = Tunings(str(raw["backend"]), str(raw["chip"]), str(raw["name"]))
    for entry in raw["records"]:
        record = TuningRecord(**{**entry, "setting": _setting(entry), "figures": dict(entry["figures"])})
        _texts(record, "kind", "shape", "regime", "variant", "default", "reason", "measured")
        tunings.records[record.key] = record
    for entry in raw["verdicts"]:
        choices = tuple(VariantChoice(_indices(c["ops"]), str(c["variant"])) for c in entry["choices"])
        parsed = {"setting": _setting(entry), "choices": choices, "figures": dict(entry["figures"])}
        verdict = TuningVerdict(**{**entry, **parsed})
        _texts(verdict, "program", "model", "regime", "reason", "measured")
        if not isinstance(verdict.kept, bool):
            raise TypeError("kept is not true or false")
        tunings.verdicts[verdict.key] = verdict
    tunings.unfinished = dict(raw["unfinished"])
    return tunings


def _indices(numbers: Sequence[int]) -> tuple[int, ...]:
    indices = tuple(int(number) for number in numbers)
    if any(index < 0 for index in indices):
        raise ValueError("an op's index is negative")
    return indices


def _setting(entry: JsonObject) -> Setting:
    setting = Setting(**entry["setting"])
    _texts(setting, "run", "build", "compiler")
    return setting


def _texts(entry: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(entry, name), str):
            raise TypeError(f"{name} is not a text")


def _put_aside(file: Path, why: str) -> None:
    aside = file.with_name(f"{file.stem}.damaged-{time.time_ns():x}")
    try:
        os.replace(file, aside)
        where = f"kept as {aside}"
    except OSError:
        where = "left where it is"
    log.get("hardware").warning("the tuning store %s is damaged (%s): ignored, %s", file, why, where)
