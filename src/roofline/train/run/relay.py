"""A run handed on from process to process: every n steps it is stored, ended, and taken up in another setting.

The drill of a change of vendor, for whatever differs here: processes, precision, compilation, microbatches, device.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.train.config.read import read_config
from roofline.train.data import receipts
from roofline.train.report import log
from roofline.train.run.launch import launch

RELAY = "relay.json"


@dataclass(frozen=True)
class Runner:
    """A setting that takes its turns: processes, and changes of the configuration."""

    name: str
    processes: int = 1
    changes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Runner":
        """From "NAME: nproc=2 KEY=VALUE ...". Raises ConfigError."""
        name, colon, rest = text.partition(":")
        processes, changes = 1, []
        for word in rest.split():
            key, equals, value = word.partition("=")
            if not equals or (key == "nproc" and (not value.isdigit() or int(value) < 1)):
                raise ConfigError(f"--leg {text!r}: {word!r} is not nproc=NUMBER or KEY=VALUE")
            if key == "nproc":
                processes = int(value)
            else:
                changes.append(word)
        if not colon or not name.strip():
            raise ConfigError(f'--leg {text!r}: it is written "NAME: nproc=2 KEY=VALUE ..."')
        return cls(name.strip(), processes, tuple(changes))


@dataclass
class Leg:
    """One turn: steps `first` (done before it) to `last`. held_out: losses at its first and last step, if evaluated."""

    name: str
    processes: int
    changes: list[str]
    first: int
    last: int
    held_out: list[float | None] = field(default_factory=lambda: [None, None])


@dataclass(frozen=True)
class Handover:
    """What is the same on both sides: the state's fingerprint is compared when it is loaded, this is what else is.

    jump: of the held-out loss from one side to the other, in nats; None where none was evaluated.
    """

    step: int
    giver: str
    taker: str
    jump: float | None


@dataclass(frozen=True)
class Report:
    """A relay that came to its end. order_steps: steps whose receipts were found to be those of the order."""

    legs: list[Leg]
    handovers: list[Handover]
    order_steps: int


def relay(
    path: Path, changes: Sequence[str], every: int, runners: Sequence[Runner], say: Callable[[str], None]
) -> Report:
    """Run a configuration to its end, each `every` steps by the next of `runners`.

    A relay that was stopped goes on from its last checkpoint. Raises ConfigError: a leg failed; what it read is not
    the order's.
    """
    if len(runners) < 2 or every < 1:
        raise ConfigError("a relay needs two runners (--leg) and at least one step each (--every)")
    config = read_config(path, changes)
    if config.run_folder is None:
        raise ConfigError("run_folder is missing: a relay keeps its log and receipts there")
    folder = Path(config.run_folder)
    for runner in runners:
        read_config(path, [*changes, *runner.changes])  # what is wrong is said before the first leg
    legs = _before(folder)
    whole, step = _whole(folder) if legs else None, legs[-1].last if legs else 0
    common = ["autoresume=true", "save_interval=1dur", "eval_first=true"]
    if config.eval_interval == "0ba" and config.eval_loader is not None:
        common.append("eval_interval=1dur")  # also at the end of a leg, beside the next one's first
    while whole is None or step < whole:
        runner = runners[len(legs) % len(runners)]
        say(f"leg {len(legs) + 1}, {runner.name}: from step {step}")
        if launch(runner.processes, path, [*changes, *runner.changes, *common, f"stop_after={step + every}ba"]):
            raise ConfigError(f"leg {len(legs) + 1} ({runner.name}) failed; what it said stands above")
        legs.append(_leg(folder, runner, step))
        whole, step = _whole(folder), legs[-1].last
        described = [{"from": leg.first, "to": leg.last} | asdict(leg) for leg in legs]
        write_atomically(folder / RELAY, json.dumps({"every": every, "legs": described}, indent=1) + "\n")
    return Report(legs, _handovers(legs), _checked(folder))


def _before(folder: Path) -> list[Leg]:
    """Legs of a relay that was stopped."""
    if not (folder / RELAY).exists():
        return []
    known = [each.name for each in fields(Leg)]
    try:
        legs = json.loads((folder / RELAY).read_text())["legs"]
        return [Leg(**{key: leg[key] for key in known}) for leg in legs]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / RELAY} is damaged: {error!r}") from error


def _whole(folder: Path) -> int:
    """Steps of the whole run, as its log says."""
    about = [line["about"] for line in log.read(folder / log.LOG) if "about" in line]
    return int(about[-1]["steps"])


def _leg(folder: Path, runner: Runner, first: int) -> Leg:
    lines = log.read(folder / log.LOG)
    last = max((line["step"] for line in lines if "loss" in line), default=first)
    if last <= first:
        raise ConfigError(f"{folder}: a leg from step {first} on took no step")
    begun = max(at for at, line in enumerate(lines) if "about" in line)
    evaluated = [line for line in lines[begun:] if "eval_loss" in line]
    held: list[Any] = [
        next((line["eval_loss"] for line in evaluated if line["step"] == step), None) for step in (first, last)
    ]
    return Leg(runner.name, runner.processes, list(runner.changes), first, last, held)


def _handovers(legs: Sequence[Leg]) -> list[Handover]:
    found = []
    for giver, taker in itertools.pairwise(legs):
        before, after = giver.held_out[1], taker.held_out[0]
        jump = after - before if before is not None and after is not None else None
        found.append(Handover(giver.last, giver.name, taker.name, jump))
    return found


def _checked(folder: Path) -> int:
    run = receipts.read(folder)
    wrong = receipts.verify(run)
    if wrong is not None:
        raise ConfigError(f"{folder}: the receipt of step {wrong} is not that of the order of samples")
    return len(run.receipts)
