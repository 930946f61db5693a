"""roofline bench sweep: more and more requests at a time, until a server is saturated or fails."""

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
from roofline.common.options import Option


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: CollectedTestOptions,
    level: LevelOptions,
    unread: UnreadOptions,
    concurrency: Annotated[int, Option("The most at a time.", minimum=1, unit="requests")] = 2048,
    as_json: AsJsonLines = False,
) -> None:
    """Double the requests at a time until two levels in turn bring less than 3 % more, or 1 % fail. Traffic: dell.

    Each prompt is another variant of a pool's templates behind a salt of its own, so that no cache answers it.
    """
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.series import Sizes, levels, sweep

    sizes = Sizes(level.requests, level.fewest, level.seconds, unread.plan_fields(target))
    traffic = options.traffic_of(sum(sizes.of(workers) for workers in levels(concurrency)), "dell")
    with options.collecting(), open_load_test(options.settings(target), traffic, concurrency) as test:
        tell_points(test, sweep(test, concurrency, sizes), as_json, overload=True)
