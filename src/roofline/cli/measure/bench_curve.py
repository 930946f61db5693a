"""roofline bench curve: throughput and latency of a server with more and more requests at a time, beside the limit."""

from pathlib import Path
from typing import Annotated

from roofline.cli.measure.load_options import (
    TARGET_HELP,
    CollectedTestOptions,
    LevelOptions,
    UnreadOptions,
    tell_points,
)
from roofline.cli.options import AsJsonLines
from roofline.cli.parser import Argument
from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.options import Option


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: CollectedTestOptions,
    level: LevelOptions,
    unread: UnreadOptions,
    workers: Annotated[int, Option("The most at a time: 1, 2, 4, ... up to it.", minimum=1, unit="workers")] = 64,
    poisson: Annotated[bool, Option("Beside each level, send requests at random moments at 0.9 of its rate.")] = True,
    levels_from: Annotated[
        Path | None,
        Option("Measure the levels of the last curve in this file, at the rates that it offered: check compares them."),
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Measure requests a second and latency with 1, 2, 4, ... requests at a time. Traffic: typical.

    Workers send their next request when the last one was answered; beside each level, an open loop sends the same
    number at random moments, so that waiting shows. Points are added to --out as they are measured.
    """
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.series import Sizes, curve, levels, levels_of, unlike_levels

    sizes = Sizes(level.requests, level.fewest, level.seconds, unread.plan_fields(target))
    rates = None if levels_from is None else levels_of(levels_from)
    measured = levels(workers) if rates is None else [each for each in rates if each <= workers]
    if not measured:
        raise ConfigError(f"{levels_from} has no level of at most {workers} workers: raise --workers")
    loads = 2 if poisson else 1  # of each level
    traffic = options.traffic_of(sum(sizes.of(each) for each in measured) * loads, "typical")
    for difference in [] if levels_from is None else unlike_levels(levels_from, traffic, sizes, workers):
        log.get("bench").warning("%s: %s", levels_from, difference)
    with options.collecting(), open_load_test(options.settings(target), traffic, measured[-1]) as test:
        tell_points(test, curve(test, workers, sizes, poisson, rates), as_json, len(measured) * loads)
