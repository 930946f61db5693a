"""roofline bench load: one load as its options say it, such as a recorded trace at its own moments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from roofline.cli.measure.load_options import TARGET_HELP, CollectedTestOptions, UnreadOptions, tell_points
from roofline.cli.options import AsJson
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

# Options of some arrivals alone, by the fields of a plan that they set.
_ARRIVALS = {
    "concurrency": ("closed", "batch"),
    "rate": ("constant", "poisson", "gamma", "ramp"),
    "rate_from": ("ramp",),
    "burstiness": ("gamma",),
    "trace_speed": ("trace",),
}


@dataclass(frozen=True)
class ArrivalOptions(Options):
    """When requests are sent."""

    arrivals: Literal["closed", "constant", "poisson", "gamma", "ramp", "trace", "batch"] = option(
        "poisson",
        "closed: workers that wait for their answers; batch: so many at once, and again when all are answered; trace: "
        "when the traffic says; the others at --rate.",
    )
    requests: int = option(100, "That are sent.", minimum=1, unit="requests")
    concurrency: int | None = option(
        None, "Workers of a closed loop, requests of a batch. Default: 1.", minimum=1, unit="requests"
    )
    rate: float | None = option(None, "Requests a second; of a ramp the last. Default: 1.", minimum=0.001)
    rate_from: float | None = option(None, "The rate that a ramp begins with. Default: 0.", minimum=0)
    burstiness: float | None = option(None, "Of gamma: 1 is Poisson, less comes in bursts. Default: 0.5.", minimum=0.01)
    trace_speed: float | None = option(
        None, "How much faster than it was recorded a trace is sent. Default: 1.", minimum=0.001
    )
    seconds: float = option(3600.0, "After which no more are sent.", minimum=0.1, unit="seconds")
    streams: int | None = option(
        None,
        "At a time that the client is certified for. Default: those of --concurrency; of other arrivals 64.",
        minimum=1,
        unit="streams",
    )

    def chosen(self) -> dict[str, object]:
        """The fields of a plan that say how. Raises ConfigError for an option of other arrivals."""
        for name, its_arrivals in _ARRIVALS.items():
            if getattr(self, name) is not None and self.arrivals not in its_arrivals:
                flag = f"--{name.replace('_', '-')}"
                kinds = " or ".join(its_arrivals)
                raise ConfigError(f"{flag} is of --arrivals {kinds}, not {self.arrivals}: leave one of the two out")
        own = {name: getattr(self, name) for name in _ARRIVALS if getattr(self, name) is not None}
        return {"burstiness": 0.5, **own, "arrivals": self.arrivals, "seconds": self.seconds}


def command(
    target: Annotated[str, Argument(TARGET_HELP)],
    options: CollectedTestOptions,
    load: ArrivalOptions,
    unread: UnreadOptions,
    as_json: AsJson = False,
) -> None:
    """Measure one point under the load that the options describe. Traffic: typical."""
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.measure import measure

    chosen = {**load.chosen(), **unread.plan_fields(target)}
    traffic = options.traffic_of(load.requests, "typical")
    recorded = load.arrivals == "trace"
    if recorded and any(request.at_us is None for request in traffic.requests):
        raise ConfigError("this traffic does not say when its requests came: write one with `bench traffic trace`")
    # A trace is not sent beyond its end.
    requests = min(load.requests, len(traffic.requests)) if recorded else load.requests
    at_a_rate = load.arrivals in ("constant", "poisson", "gamma")
    planned = min(requests / (load.rate or 1.0), load.seconds) if at_a_rate else None
    streams = load.streams or (load.concurrency or 1 if load.arrivals in ("closed", "batch") else 64)
    with options.collecting(), open_load_test(options.settings(target), traffic, streams) as test:
        plan = test.plan(requests, seed=options.seed, **chosen)
        points = (measure(test, "load", each) for each in [plan])  # measured when it is asked for
        tell_points(test, points, as_json, 1, planned)
