"""roofline bench lora: fine-tuning timed over batch sizes; memory that runs out is a row of the result."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import DEFAULT_MODEL
from roofline.bench.lora.options import LoraBenchOptions
from roofline.cli.options import AsJsonLines, ModelArgument
from roofline.cli.output import check_output, console, plain_table, print_table
from roofline.common.errors import ConfigError
from roofline.common.options import Option

if TYPE_CHECKING:
    from roofline.bench.results.point import Point

HEADINGS = ("batch", "rows at a time", "real tok/s", "with padding", "p50 ms", "p95 ms", "memory", "MFU", "loss")


def command(
    options: LoraBenchOptions,
    model: ModelArgument = DEFAULT_MODEL,
    batches: Annotated[str, Option("Rows of a step, with commas: a run each.")] = "1,16,64,128",
    changes: Annotated[list[str] | None, Option("KEY.KEY=VALUE of the configuration.", flags=("--set",))] = None,
    as_json: AsJsonLines = False,
    out: Annotated[Path | None, Option("File that each point is added to.", flags=("--out", "-o"))] = None,
) -> None:
    """Time fine-tuning over batch sizes, by default as Dell and Metrum did in 2024: 200 steps behind 10, 512 tokens.

    Each batch size is a process of its own; one that does not fit into memory is a row that says so.
    """
    from roofline.bench.lora.sweep import LoraSweepSettings, sweep
    from roofline.bench.results.store import append_points, with_id

    check_output(out)
    settings = LoraSweepSettings(model, options, _sizes(batches), tuple(changes or ()))
    points = []
    for point in sweep(settings, show=not as_json):
        points.append(with_id(point))
        if out is not None:
            append_points([point], out)
        if as_json:
            _print_line(points[-1])
    if not as_json:
        _show(points, settings.command + ("" if out is None else f" --out {shlex.quote(str(out))}"))


def _sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words) or len({*words}) < len(words):
        raise ConfigError(f"--batches {text}: give different numbers of rows above 0, with commas, such as 1,16")
    return tuple(map(int, words))


def _print_line(point: "Point") -> None:
    import msgspec

    print(msgspec.json.encode(point).decode(), flush=True)


def _show(points: Sequence["Point"], again: str) -> None:
    from roofline.bench.train_points import MFU

    out = console(highlight=False)
    print_table(out, plain_table(HEADINGS, [_row(point) for point in points]))
    for point in points:
        if reason := point.extra["out_of_memory"]:
            out.print(f"batch {point.extra['batch']}: out of memory: {reason}", markup=False)
    shares = [point.metrics[MFU] for point in points if MFU in point.metrics]
    if shares:
        out.print(f"MFU {shares[0].definition}", markup=False)
    out.print(f"again: {again}", markup=False)


def _row(point: "Point") -> list[str]:
    from roofline.bench.lora.point import COMPUTED, LOSS, OUT_OF_MEMORY, REAL
    from roofline.bench.report import words
    from roofline.bench.train_points import MEMORY, MFU, STEP
    from roofline.common.units import human_bytes

    batch = str(point.extra["batch"])
    if not point.metrics:
        return [batch, OUT_OF_MEMORY, *["-"] * (len(HEADINGS) - 2)]
    of = point.metrics
    memory = words.metric(point, MEMORY)
    return [
        batch,
        str(point.extra["microbatch"]),
        words.digits(words.metric(point, REAL), 4),
        words.digits(words.metric(point, COMPUTED), 4),
        words.digits(of[STEP].p50, 4),
        words.digits(of[STEP].p95, 4),
        "-" if memory is None else human_bytes(memory),
        words.percent(words.metric(point, MFU)),
        f"{point.extra['first_loss']:.3f} to {words.metric(point, LOSS):.3f}",
    ]
