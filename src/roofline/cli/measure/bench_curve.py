"""roofline bench curve: throughput and latency of a server with more and more requests at a time, beside the limit."""

from typing import Annotated

from roofline.cli.measure.load_options import TARGET_HELP, LoadTestOptions, tell_points
from roofline.cli.options import AsJsonLines
from roofline.cli.parser import Argument
from roofline.common.options import Option


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: LoadTestOptions,
    workers: Annotated[int, Option("The most at a time: 1, 2, 4, ... up to it.", minimum=1, unit="workers")] = 64,
    requests: Annotated[int, Option("Of each worker at a level.", minimum=1, unit="requests")] = 5,
    fewest: Annotated[int, Option("At every level, however few workers it has.", minimum=1, unit="requests")] = 32,
    seconds: Annotated[float, Option("After which a level sends no more.", minimum=0.1, unit="seconds")] = 60.0,
    poisson: Annotated[bool, Option("Beside each level, send requests at random moments at 0.9 of its rate.")] = True,
    as_json: AsJsonLines = False,
) -> None:
    """Measure requests a second and latency with 1, 2, 4, ... requests at a time. Traffic: typical.

    Workers send their next request when the last one was answered; beside each level, an open loop sends the same
    number at random moments, so that waiting shows. Points are added to --out as they are measured.
    """
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.series import Sizes, curve, levels

    sizes = Sizes(requests, fewest, seconds)
    loads = 2 if poisson else 1  # of each level
    requests_of_all = sum(sizes.of(level) for level in levels(workers)) * loads
    traffic = options.traffic_of(requests_of_all, "typical")
    with open_load_test(options.settings(target), traffic, workers) as test:
        tell_points(test, curve(test, workers, sizes, poisson), as_json, len(levels(workers)) * loads)
