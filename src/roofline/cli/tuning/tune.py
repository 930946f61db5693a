"""roofline tune: measure kernel variants on a model's own shapes and keep what wins; explain what was chosen."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.options import AsJson, ModelArgument
from roofline.cli.output import print_json
from roofline.cli.parser import Only
from roofline.common.options import Option
from roofline.common.units import human_seconds

if TYPE_CHECKING:
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.tuning.tune import Tuner, TuningPlan
    from roofline.hardware.tuning.store import TuningRecord, Tunings, TuningVerdict

Load = Annotated[LoadOptions, Only("threads", "isa", "weights", "kv_cache_dtype")]


def run(
    load: Load,
    model: ModelArgument = DEFAULT_MODEL,
    budget: Annotated[float | None, Option("Seconds it may take at most.", minimum=1)] = None,
    again: Annotated[bool, Option("Measure also what is known already.")] = False,
) -> None:
    """Measure, compare end to end, store. Ctrl-C stops it; the next run goes on where it stopped.

    No variant changes a bit of a result. A default is replaced only where the gain exceeds the noise.
    """
    from roofline.backends.cpu.tuning.tune import Tuner
    from roofline.hardware import detect
    from roofline.hardware.tuning import store as tunings

    executable = _executable(model, load)
    machine = detect.detect()
    stored = tunings.load("cpu", machine.fingerprint, machine.chip)
    tuner = Tuner(executable, model, stored, budget=budget, again=again)
    plan = tuner.plan()
    saves = tunings.save_where_possible(stored)  # said before the work where it cannot be
    _announce(model, plan, budget)
    with _interrupts() as stop:
        stopped = _work(tuner, plan, stop)
    if stopped or any(contest.outcome is None for contests in plan.contests.values() for contest in contests):
        again_from = "what was is kept: run the same command again to go on" if saves else "nothing is kept of it"
        print(f"stopped before all was measured; {again_from}")
    _show(stored, executable)
    if saves:
        print(f"stored in {tunings.path('cpu', machine.fingerprint)}")


def explain(
    load: Load,
    model: ModelArgument = DEFAULT_MODEL,
    chip: Annotated[str | None, Option("Instead: what is stored of this GPU's products.")] = None,
    tunableop: Annotated[Path | None, Option("Instead: what this file says.")] = None,
    as_json: AsJson = False,
) -> None:
    """What was chosen for each op and regime, against what, by how much and with how much noise, and why."""
    from roofline.cli.tuning import files as tune_files
    from roofline.hardware import detect
    from roofline.hardware.tuning import store as tunings

    if chip is not None or tunableop is not None:
        tune_files.explain(chip, tunableop, as_json)
        return
    executable = _executable(model, load)
    machine = detect.detect()
    stored = tunings.load("cpu", machine.fingerprint, machine.chip)
    print_json(_plain(stored, executable), indent=1) if as_json else _show(stored, executable)


def _executable(model: str, load: LoadOptions) -> "CpuExecutable":
    from roofline import bundle
    from roofline.backends.cpu.executable import CpuExecutable

    loaded = bundle.load(model, replace(load, tuned=False), text=False)
    assert isinstance(loaded.executable, CpuExecutable)
    return loaded.executable


def _announce(model: str, plan: "TuningPlan", budget: float | None) -> None:
    count = sum(len(contests) for contests in plan.contests.values())
    reused = f"; {plan.settled} are known already" if plan.settled else ""
    within = f", within the budget of {human_seconds(budget)}" if budget else ""
    print(f"{model}: {count} pairs of shape and regime to measure{reused}: about {human_seconds(plan.seconds)}{within}")
    sys.stdout.flush()


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one ends the program as usual.

    Where Ctrl-C is ignored, as in the background of a script, it stays ignored.
    """
    stop, previous = threading.Event(), signal.getsignal(signal.SIGINT)
    if previous in (signal.SIG_IGN, None):  # None: a handler that could not be put back
        yield stop
        return

    def first(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, previous)

    signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def _work(tuner: "Tuner", plan: "TuningPlan", stop: threading.Event) -> bool:
    """Runs the plan with a line of progress on a terminal; whether it was stopped."""
    line = sys.stderr.isatty()
    for step in tuner.run(plan, stop.is_set):
        if line:
            print(f"\r{step.share:4.0%}  {step.text:<60}", end="", file=sys.stderr, flush=True)
    if line:
        print(file=sys.stderr)
    return stop.is_set()


def _relevant(stored: "Tunings", executable: "CpuExecutable") -> "tuple[list[TuningRecord], list[TuningVerdict]]":
    """What the store says on this program's shapes and on itself, at these threads and this instruction set."""
    from roofline.backends.cpu.select import setting_of
    from roofline.backends.cpu.tuning.variants import groups

    run = setting_of(executable.isa, executable.threads).run
    shapes = [(group.kind, group.shape) for group in groups(executable.program)]
    records = [r for r in stored.records.values() if (r.kind, r.shape) in shapes and r.setting.run == run]
    records.sort(key=lambda r: (r.regime, shapes.index((r.kind, r.shape))))
    mine = [v for v in stored.verdicts.values() if v.program == executable.program_hash and v.setting.run == run]
    return records, sorted(mine, key=lambda v: v.regime)


def _plain(stored: "Tunings", executable: "CpuExecutable") -> dict[str, object]:
    records, verdicts = _relevant(stored, executable)
    return {
        "backend": stored.backend,
        "chip": stored.name,
        "records": [asdict(r) | {"ignored": _stale(r, executable)} for r in records],
        "verdicts": [asdict(v) | {"ignored": _stale(v, executable)} for v in verdicts],
    }


def _stale(entry: "TuningRecord | TuningVerdict", executable: "CpuExecutable") -> str:
    from roofline.backends.cpu.select import setting_of

    return entry.setting.differs(setting_of(executable.isa, executable.threads))


def _show(stored: "Tunings", executable: "CpuExecutable") -> None:
    records, verdicts = _relevant(stored, executable)
    if not records:
        print("nothing is tuned for this model on this machine: `roofline tune MODEL` does it")
        return
    rows = [("", "op and shape", "chosen", "against", "us a step", "time")]
    for r in records:  # the time is that of all ops of the shape with the default
        default_us = f"{r.figures['default_us']:.1f}" if "default_us" in r.figures else ""
        rows.append((r.regime, r.shape, r.variant, r.default, default_us, _measured(r)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    reasons = ["why", *(_stale(r, executable) or r.reason for r in records)]
    for row, reason in zip(rows, reasons, strict=True):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)), reason, sep="  ")
    for verdict in verdicts:
        stale = _stale(verdict, executable)
        use = f"ignored: {stale}" if stale else "used" if verdict.kept else "not used"
        print(f"the whole model, {verdict.regime}: {verdict.reason}; {_measured(verdict) or 'not compared'}; {use}")
    if any(r.figures.get("busy") and r.variant == r.default for r in records):
        print("the machine was busy: what differed too much between two runs of the same is measured again next time")
    print("time: share of the default's, its 99 % interval, and in brackets what two runs of the default differ by")


def _measured(entry: "TuningRecord | TuningVerdict") -> str:
    """ "95.1% 94.0-96.2% (0.8%)", with the parts that were measured."""
    figures = entry.figures
    noise = f"({figures['noise']:.1%})" if figures.get("noise") is not None else ""
    if "ratio" not in figures:
        return noise
    return f"{figures['ratio']:.1%} {100 * figures['low']:.1f}-{figures['high']:.1%} {noise}"
