"""Hands a run from one setting to another: every n steps it is saved, ended, and resumed in the next setting.

This rehearses a move to another vendor's hardware with whatever can differ on one machine: processes, precision,
compilation, microbatches, device.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.train.config.read import read_config
from roofline.train.data import receipts
from roofline.train.run.launch import launch
from roofline.train.run.signals import STOP_SIGNALS
from roofline.train.run_folder import LOG, RELAY, read_lines


@dataclass(frozen=True)
class RelaySetting:
    """A setting that takes turns: its number of processes and its changes of the configuration."""

    name: str
    processes: int = 1
    changes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "RelaySetting":
        """The runner that "NAME: nproc=2 KEY=VALUE ..." describes. Raises ConfigError."""
        name, colon, changes_text = text.partition(":")
        processes, changes = 1, []
        for word in changes_text.split():
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
    """One turn, from step `first` (done before it) to `last`. held_out: losses at both steps, if evaluated."""

    name: str
    processes: int
    changes: list[str]
    first: int
    last: int
    held_out: list[float | None] = field(default_factory=lambda: [None, None])


@dataclass(frozen=True)
class Handover:
    """The change from one leg to the next. That the state is the same is checked when it is loaded.

    jump: the difference of the held-out losses before and after, in nats; None if they were not evaluated.
    """

    step: int
    giver: str
    taker: str
    jump: float | None


@dataclass(frozen=True)
class RelayReport:
    """A finished relay. order_steps: steps whose receipts were checked against the order of samples."""

    legs: list[Leg]
    handovers: list[Handover]
    order_steps: int


def relay(
    path: Path, changes: Sequence[str], every: int, runners: Sequence[RelaySetting], say: Callable[[str], None]
) -> RelayReport:
    """Run a configuration to its end, with the next of `runners` every `every` steps.

    A stopped relay continues from its last checkpoint. Raises ConfigError if a leg fails, or if it has read other
    samples than those of the order.
    """
    if len(runners) < 2 or every < 1:
        raise ConfigError("a relay needs two runners (--leg) and at least one step each (--every)")
    config = read_config(path, changes)
    if config.run_folder is None:
        raise ConfigError("run_folder is missing: a relay keeps its log and receipts there")
    folder = Path(config.run_folder)
    for runner in runners:
        read_config(path, [*changes, *runner.changes])  # reports errors before the first leg
    legs = _earlier_legs(folder)
    total, step = _total_steps(folder) if legs else None, legs[-1].last if legs else 0
    resumes = "previous" if config.autoresume == "previous" else "true"
    common = [f"autoresume={resumes}", "save_interval=1dur", "eval_first=true"]
    if config.eval_interval == "0ba" and config.eval_loader is not None:
        common.append("eval_interval=1dur")  # at the end of a leg, to compare with the next one's start
    while total is None or step < total:
        runner = runners[len(legs) % len(runners)]
        say(f"leg {len(legs) + 1}, {runner.name}: from step {step}")
        status = launch(runner.processes, path, [*changes, *runner.changes, *common, f"stop_after={step + every}ba"])
        if status in (128 + number for number in STOP_SIGNALS):
            raise ConfigError(f"leg {len(legs) + 1} ({runner.name}) was stopped; the same command goes on with it")
        if status:
            raise ConfigError(f"leg {len(legs) + 1} ({runner.name}) failed; what it said stands above")
        legs.append(_leg(folder, runner, step))
        total, step = _total_steps(folder), legs[-1].last
        described = [{"from": leg.first, "to": leg.last} | asdict(leg) for leg in legs]
        write_atomically(folder / RELAY, json.dumps({"every": every, "legs": described}, indent=1) + "\n")
    return RelayReport(legs, _handovers(legs), _check_receipts(folder))


def _earlier_legs(folder: Path) -> list[Leg]:
    """The legs of a stopped relay."""
    if not (folder / RELAY).exists():
        return []
    try:
        legs = json.loads((folder / RELAY).read_text())["legs"]
        return [Leg(**{field.name: leg[field.name] for field in fields(Leg)}) for leg in legs]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / RELAY} is damaged: {error!r}") from error


def _total_steps(folder: Path) -> int:
    """The steps of the complete run, from its log."""
    about = [line["about"] for line in read_lines(folder / LOG) if "about" in line]
    return int(about[-1]["steps"])


def _leg(folder: Path, runner: RelaySetting, first: int) -> Leg:
    """The leg that has just ended, from the run's log."""
    lines = read_lines(folder / LOG)
    last = max((line["step"] for line in lines if "loss" in line), default=first)
    if last <= first:
        raise ConfigError(f"{folder}: a leg from step {first} on took no step")
    begun = max(at for at, line in enumerate(lines) if "about" in line)
    evaluated = [line for line in lines[begun:] if "eval_loss" in line]
    losses = [next((line["eval_loss"] for line in evaluated if line["step"] == step), None) for step in (first, last)]
    return Leg(
        name=runner.name,
        processes=runner.processes,
        changes=list(runner.changes),
        first=first,
        last=last,
        held_out=losses,
    )


def _handovers(legs: Sequence[Leg]) -> list[Handover]:
    handovers = []
    for giver, taker in itertools.pairwise(legs):
        before, after = giver.held_out[1], taker.held_out[0]
        jump = after - before if before is not None and after is not None else None
        handovers.append(Handover(giver.last, giver.name, taker.name, jump))
    return handovers


def _check_receipts(folder: Path) -> int:
    """The number of receipts, which follow from the order. Raises ConfigError if one does not."""
    run = receipts.read(folder)
    wrong = receipts.verify(run)
    if wrong is not None:
        raise ConfigError(f"{folder}: the receipt of step {wrong} is not that of the order of samples")
    return len(run.receipts)
