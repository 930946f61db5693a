"""roofline bench train: the training loop timed on random rows: a card, or points over numbers of processes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from roofline.cli.output import check_output, console, plain_table, print_json, print_table
from roofline.cli.parser import Argument
from roofline.cli.training.card import Convention
from roofline.common.errors import ConfigError
from roofline.common.options import Option, Options, option

if TYPE_CHECKING:
    from roofline.bench.results.point import Point
    from roofline.bench.train_scaling import Scaling


@dataclass(frozen=True)
class TimingOptions(Options):
    """How much is timed, in how many processes."""

    steps: int = option(10, "Steps that count.", minimum=1)
    warmup: int = option(3, "Steps before them.", minimum=0)
    nproc: int = option(1, "Processes on this machine, which share each step.", minimum=1)
    processes: str | None = option(
        None, "Instead: several numbers of processes, with commas, measured one after the other, such as 1,2,4."
    )
    scaling: str | None = option(
        None,
        "With processes, what stays the same: the rows of a step (strong), or those in each process (weak). "
        "Default: strong.",
        choices=("strong", "weak"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes is None and self.scaling is not None:
            raise ConfigError(f"scaling={self.scaling} is over several numbers of processes: give them, processes=1,2")
        if self.processes is not None and self.nproc != 1:
            raise ConfigError("nproc and processes both say how many there are: leave one of the two out")

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of processes, none where a single one is timed. Raises ConfigError."""
        if self.processes is None:
            return ()
        words = [word.strip() for word in self.processes.split(",")]
        if len(words) < 2 or not all(word.isdecimal() and int(word) > 0 for word in words) or _repeats(words):
            raise ConfigError(
                f"processes={self.processes}: give two or more different numbers above 0, with commas, such as 1,2"
            )
        return tuple(map(int, words))


def _repeats(words: Sequence[str]) -> bool:
    return len({int(word) for word in words}) < len(words)


def command(
    options: TimingOptions,
    what: Annotated[str, Argument("A preset (mpt-125m, llama-3.2-1b, ...), or a YAML file of a run.")] = "mpt-125m",
    changes: Annotated[list[str] | None, Option("KEY.KEY=VALUE of the configuration.", flags=("--set",))] = None,
    convention: Convention = "foundry",
    as_json: Annotated[
        bool, Option("Print one JSON object; with processes one a line, for each point.", flags=("--json",))
    ] = False,
    out: Annotated[
        Path | None,
        Option("Also write the record into a file; with processes each point is added to it.", flags=("--out", "-o")),
    ] = None,
) -> None:
    """Time the training loop on random rows: no data is needed, nothing is kept but the record.

    With --processes 1,2 the loop is timed with each number of processes, and the efficiency is told against the first.
    """
    from roofline.bench.train import bench_train
    from roofline.cli.training.card import show
    from roofline.common.files import write_atomically

    counts = options.counts
    check_output(out)
    if counts:
        from roofline.bench.train_scaling import Scaling

        rule: Literal["weak", "strong"] = "weak" if options.scaling == "weak" else "strong"
        timed = (tuple(changes or ()), options.steps, options.warmup)
        _scale(Scaling(what, counts, rule, *timed, convention), as_json, out)
        return
    record = bench_train(what, changes or [], steps=options.steps, warmup=options.warmup, processes=options.nproc)
    if as_json:
        print_json(record)
    else:
        show([record["card"]], [what], convention)
        print(f"again: {record['command']}")
    if out is not None:
        write_atomically(out, json.dumps(record, indent=1) + "\n")


def _scale(settings: "Scaling", as_json: bool, out: Path | None) -> None:
    import msgspec

    from roofline.bench.results.store import append_points, with_id
    from roofline.bench.train_scaling import scale

    points = []
    for point in scale(settings, show=not as_json):
        points.append(with_id(point))
        if out is not None:
            append_points([point], out)
        if as_json:
            print(msgspec.json.encode(points[-1]).decode(), flush=True)
    if not as_json:
        _show(points, settings)


def _show(points: Sequence["Point"], settings: "Scaling") -> None:
    from roofline.bench.report import words
    from roofline.bench.train_scaling import in_words

    cpu = points[0].extra["threads"] is not None
    headings = ["processes", *["threads each"] * cpu, "rows a step", "tok/s", "tok/s a process", "TFLOP/s a process"]
    headings += ["efficiency", "step p50 ms", "roof tok/s", "of the roof"]
    out = console(highlight=False)
    print_table(out, plain_table(headings, [_row(point, cpu) for point in points]))
    stays = "rows of a step stay" if settings.rule == "strong" else "rows in each process stay"
    share = "of a core (processes share the cores of a CPU, cores / processes threads each)" if cpu else "of a device"
    out.print(
        f"{settings.rule} scaling: the {stays} the same. Efficiency is the tok/s {share} over those with "
        f"{in_words(settings.processes[0])}.",
        markup=False,
    )
    # Numbers of processes may have been compared with products of different sizes.
    roofs = dict.fromkeys("; ".join(point.limit.assumptions[:2]) for point in points if point.limit is not None)
    for roof in roofs:
        out.print(f"roof: {roof}", markup=False)
    busy = max(point.host.load for point in points)
    out.print(f"{words.machine(points[0])}; other programs used at most {busy:.1f} cores", markup=False)
    out.print(f"again: {settings.command}", markup=False)


def _row(point: "Point", cpu: bool) -> list[str]:
    from roofline.bench.report import words
    from roofline.bench.train_scaling import EACH, EFFICIENCY, FLOPS

    rate, efficiency = (point.metrics.get(name) for name in (words.TRAIN, EFFICIENCY))
    around = None if efficiency is None else efficiency.ci95
    share = "the first" if efficiency is None else words.percent(efficiency.value)
    share += "" if around is None else f" [{words.percent(around[0])}, {words.percent(around[1])}]"
    return [
        str(point.extra["processes"]),
        *[str(point.extra["threads"])] * cpu,
        str(point.extra["batch"]),
        words.with_interval(words.central(rate), None if rate is None else rate.ci95),
        words.digits(words.metric(point, EACH), 4),
        words.digits(words.metric(point, FLOPS), 4),
        share,
        words.digits(words.metric(point, words.STEP), 4),
        words.digits(None if point.limit is None else point.limit.tokens_per_s, 4),
        words.percent(words.share(point)),
    ]
