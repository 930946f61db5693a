"""roofline bench load: one load as its options say it, such as a recorded trace at its own moments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from roofline.cli.measure.load_options import TARGET_HELP, LoadTestOptions, tell_points
from roofline.cli.options import AsJson
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option


@dataclass(frozen=True)
class ArrivalOptions(Options):
    """When requests are sent."""

    arrivals: Literal["closed", "constant", "poisson", "gamma", "ramp", "trace", "batch"] = option(
        "poisson",
        "closed: workers that wait for their answers; batch: so many at once, and again when all are answered; trace: "
        "when the traffic says; the others at --rate.",
    )
    requests: int = option(100, "That are sent.", minimum=1, unit="requests")
    concurrency: int = option(1, "Workers of a closed loop, requests of a batch.", minimum=1, unit="requests")
    rate: float = option(1.0, "Requests a second; of a ramp the last.", minimum=0.001)
    rate_from: float = option(0.0, "The rate that a ramp begins with.", minimum=0)
    burstiness: float = option(0.5, "Of gamma: 1 is Poisson, less comes in bursts.", minimum=0.01)
    trace_speed: float = option(1.0, "How much faster than it was recorded a trace is sent.", minimum=0.001)
    seconds: float = option(3600.0, "After which no more are sent.", minimum=0.1, unit="seconds")
    streams: int = option(64, "At a time that the client is certified for.", minimum=1, unit="streams")


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: LoadTestOptions,
    load: ArrivalOptions,
    as_json: AsJson = False,
) -> None:
    """Measure one point under the load that the options describe. Traffic: typical."""
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.measure import measure

    traffic = options.traffic_of(load.requests, "typical")
    recorded = load.arrivals == "trace"
    if recorded and any(request.at_us is None for request in traffic.requests):
        raise ConfigError("this traffic does not say when its requests came: write one with `bench traffic trace`")
    # A trace is not sent beyond its end.
    requests = min(load.requests, len(traffic.requests)) if recorded else load.requests
    fields = ("arrivals", "concurrency", "rate", "rate_from", "burstiness", "trace_speed", "seconds")
    chosen = {name: getattr(load, name) for name in fields}
    at_a_rate = load.arrivals in ("constant", "poisson", "gamma")
    planned = min(requests / load.rate, load.seconds) if at_a_rate else None
    streams = load.concurrency if load.arrivals in ("closed", "batch") else load.streams
    with open_load_test(options.settings(target), traffic, streams) as test:
        plan = test.plan(requests, seed=options.seed, **chosen)
        points = (measure(test, "curve", each) for each in [plan])  # measured when it is asked for
        tell_points(test, points, as_json, 1, planned)
