"""`roofline bench train --processes 1,2`: the training loop timed with one number of processes after the other.

Strong scaling keeps the rows of a step, weak scaling the rows of a step in each process. Each number is a run in
processes of its own, as `roofline train --nproc` starts them, and becomes a point.

Where each process has a GPU, efficiency is the tokens a second of a GPU over those of the first point. Processes on a
CPU share its cores, so there it is of a core: with as many cores in use, the ratio of the tokens a second of all.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import roofline
from roofline.bench.report import words
from roofline.bench.report.ratios import ratio
from roofline.bench.results import point as schema
from roofline.bench.results.point import Point
from roofline.bench.serving.surroundings import this_host
from roofline.bench.train import announcement, config_of, run_processes
from roofline.bench.train_points import RATE, devices_of, limit_of, metrics_of, window_of
from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.common.units import now_utc

Rule = Literal["strong", "weak"]
BUSY = 0.5  # cores that other programs use, from which on a point is marked
EFFICIENCY, EACH, FLOPS = words.EFFICIENCY, "process_rate", "flops_rate"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Scaling:
    """What is timed. what, changes, steps, warmup: as for `bench_train`; processes: a run each; convention: how the
    FLOPs of the figures are counted."""

    what: str
    processes: tuple[int, ...]
    rule: Rule = "strong"
    changes: tuple[str, ...] = ()
    steps: int = 10
    warmup: int = 3
    convention: str = "foundry"

    @property
    def command(self) -> str:
        """Which measures the same again."""
        numbers = ",".join(map(str, self.processes))
        parts = ["roofline", "bench", "train", self.what, "--processes", numbers, "--scaling", self.rule]
        parts += ["--steps", str(self.steps), "--warmup", str(self.warmup)]
        parts += ["--convention", self.convention] if self.convention != "foundry" else []
        return shlex.join([*parts, *(part for change in self.changes for part in ("--set", change))])


@dataclass(frozen=True)
class ScalingRun:
    """One number of processes, and its configuration."""

    processes: int
    config: JsonObject

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return int(self.config["global_train_batch_size"])


def scale(settings: Scaling, show: bool = True) -> Iterator[Point]:
    """A point for each number of processes, as soon as it is measured. show: say on stderr which one begins.

    Raises ConfigError before anything is timed: processes that the devices or the rows of a step do not suffice for;
    what `bench_train` raises.
    """
    name, first = os.urandom(8).hex(), None
    with tempfile.TemporaryDirectory(prefix="roofline-bench-") as place:
        folder = Path(place)
        for run in _runs(settings, folder):
            path = folder / f"{run.processes}.json"
            path.write_text(json.dumps(run.config))
            if show:
                print(_announcement(settings, run, path), file=sys.stderr, flush=True)
            started, host = now_utc(), this_host()
            run_processes(run.processes, path)
            measured = _point(settings, run, name=name, started=started, host=host)
            if first is None:
                first = measured
            else:
                measured.metrics[EFFICIENCY] = _efficiency(measured, first)
            yield measured


def _runs(settings: Scaling, folder: Path) -> list[ScalingRun]:
    """All runs, which are checked. Raises ConfigError."""

    def config(count: int, *changes: str) -> JsonObject:
        of_run = folder / f"run-{count}"
        return config_of(settings.what, [*settings.changes, *changes], of_run, settings.steps, settings.warmup)

    least = settings.processes[0]
    plain = config(least)
    _check_convention(settings, plain)
    _check_devices(settings, plain)
    rows, runs = plain["global_train_batch_size"], []
    for count in settings.processes:
        shares = _shares(plain, count)
        if settings.rule == "weak":
            own = _divided(rows, _shares(plain, least), least)
            runs.append(ScalingRun(count, config(count, f"global_train_batch_size={own * shares}")))
        else:
            _divided(rows, shares, count)
            runs.append(ScalingRun(count, config(count)))
    return runs


def _shares(config: JsonObject, count: int) -> int:
    """Parts that the rows of a step are cut into. Raises ConfigError for processes that cannot share matrices or
    elastic shards as configured."""
    tensor, elastic = config["tensor_parallel"], config["elastic"]
    if count % tensor:
        raise ConfigError(f"tensor_parallel={tensor} does not divide {in_words(count)}: leave that number out")
    if elastic is not None:
        from roofline.train.parallel.elastic import rounds

        rounds(elastic["virtual_shards"], 0, count)
    return int(count // tensor)


def _divided(rows: int, shares: int, processes: int) -> int:
    if rows % shares:
        parts = f"{processes} processes" if shares == processes else f"the {shares} groups of {processes} processes"
        raise ConfigError(
            f"global_train_batch_size={rows}: {rows} rows do not divide among {parts}, so some would wait for others; "
            f"set a multiple of {shares}"
        )
    return rows // shares


def _check_devices(settings: Scaling, config: JsonObject) -> None:
    """Raises ConfigError where there are fewer devices than processes, or where cores cannot be shared evenly."""
    import torch

    max_processes = max(settings.processes)
    if torch.accelerator.is_available() and config["device"] != "cpu":
        have, unit = torch.accelerator.device_count(), "GPU"
    else:
        from roofline.train.run.launch import threads_of

        have, unit = threads_of(1), "core"
        if set_by_user := env.foreign(THREADS):
            raise ConfigError(
                f"{THREADS}={set_by_user} gives any number of processes as many threads each: unset it, so that they "
                "share the cores"
            )
    if max_processes > have:
        raise ConfigError(
            f"processes={','.join(map(str, settings.processes))}: {max_processes} processes need a {unit} each, and "
            f"there {'is' if have == 1 else 'are'} {have}"
        )


def _check_convention(settings: Scaling, config: JsonObject) -> None:
    from roofline.train.report.flops import ADAPTED, CONVENTIONS

    known = ADAPTED if config["adapter"] is not None else CONVENTIONS
    if settings.convention not in known:
        raise ConfigError(f"convention={settings.convention} does not count this run: choose one of {', '.join(known)}")


def in_words(processes: int) -> str:
    return f"{processes} process{'es' * (processes != 1)}"


def _announcement(settings: Scaling, run: ScalingRun, path: Path) -> str:
    steps = settings.warmup + settings.steps
    return f"{in_words(run.processes)}: {announcement(path, settings.what, steps, run.processes)}"


def _point(settings: Scaling, run: ScalingRun, *, name: str, started: str, host: schema.Host) -> Point:
    from roofline.train.report import cards
    from roofline.train.run_folder import LOG, read_lines

    folder = Path(run.config["run_folder"])
    card = cards.read(str(folder))
    steps, before = list[tuple[float, int]](), 0
    for line in read_lines(folder / LOG):
        if "loss" in line:
            steps.append((line["seconds"], line["tokens"] - before))
            before = line["tokens"]
    metrics = metrics_of(card, steps)
    count, rate = metrics[RATE].n, card["speed"]["tokens_per_s_per_device"]
    metrics[EACH] = schema.Figure(definition=f"{RATE} / processes", unit="tokens/s", n=count, value=rate)
    metrics[FLOPS] = schema.Figure(
        definition=f"of a process; {settings.convention}: {card['conventions'][settings.convention]}",
        unit="TFLOP/s",
        n=count,
        value=card["flops"][settings.convention]["tflops_per_device"],
    )
    return Point(
        id="",
        run=name,
        kind="train",
        preset=_preset(settings, run, card),
        started=started,
        ended=now_utc(),
        system=_system(settings, card),
        host=host,
        devices=devices_of(card),
        workload=None,
        load=None,
        client=None,
        window=window_of(card),
        counts=None,
        metrics=metrics,
        validity=_validity(host),
        limit=limit_of(card),
        extra=_extra(settings, run, card),
    )


def _validity(host: schema.Host) -> schema.Validity:
    """Whether other programs took so much of the machine that the times are not those of training alone."""
    if host.load < BUSY:
        return schema.Validity(grade="A")
    return schema.Validity(grade="C", flags=[f"other programs used {host.load:.1f} cores"])


def _preset(settings: Scaling, run: ScalingRun, card: JsonObject) -> str:
    """What two points share whose speeds may be compared."""
    rows = f"batch {run.batch} of {card['seq_len']} tokens"
    return ", ".join([settings.what, f"{settings.rule} scaling", in_words(run.processes), rows, *settings.changes])


def _system(settings: Scaling, card: JsonObject) -> schema.System:
    options = {"precision": card["precision"], "sharding": card["sharding"] or "none"}
    return schema.System(
        label=f"roofline {card['model']['name']}",
        target=f"train:{settings.what}",
        engine="roofline",
        version=roofline.__version__,
        options=options | {change.partition("=")[0]: change.partition("=")[2] for change in settings.changes},
        model=card["model"]["name"],
        parameters=card["model"]["parameters"],
        devices_per_replica=card["devices"],
    )


def _extra(settings: Scaling, run: ScalingRun, card: JsonObject) -> dict[str, float | int | str | bool | None]:
    """threads: of each process on a CPU."""
    return {
        "scaling": settings.rule,
        "processes": run.processes,
        "threads": card["device"].get("threads"),
        "batch": run.batch,
        "microbatch": card["microbatch"],
        "steps": card["speed"]["steps"][1],
        "torch": card["versions"]["torch"],
        "commit": card["versions"]["commit"],
        "command": settings.command,
    }


def _efficiency(point: Point, first: Point) -> schema.Figure:
    """Of a point against the first one, with an interval where those of the two rates give one."""
    between = ratio([point], [first], RATE)
    assert between is not None, "both have a rate"
    more = _resources(point) / _resources(first)
    of = "device" if point.extra["threads"] is None else "core (processes x threads)"
    around = between.interval
    return schema.Figure(
        definition=f"{RATE} of a {of} / that with {in_words(int(first.extra['processes'] or 1))}, with the same rows "
        f"{'of a step' if point.extra['scaling'] == 'strong' else 'in each process'}",
        unit="1",
        n=point.metrics[RATE].n,
        value=between.value / more,
        ci95=None if around is None else (around[0] / more, around[1] / more),
    )


def _resources(point: Point) -> int:
    """GPUs, or cores, in use."""
    return int(point.extra["processes"] or 1) * int(point.extra["threads"] or 1)
