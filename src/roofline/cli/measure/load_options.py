"""What the commands have in common that put a server under load: which, with what, where the results go."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roofline.cli.output import check_output, console
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

if TYPE_CHECKING:
    from roofline.bench.load.progress import Progress
    from roofline.bench.results.point import Point
    from roofline.bench.serving.load_test import LoadTest, Settings
    from roofline.bench.traffic.traffic import Traffic

TARGET_HELP = (
    "http://... of any OpenAI-compatible server; roofline:MODEL with options of `roofline serve` behind it; or the "
    "command line of another server with {port} in it, which is started and ended."
)
_TRAFFIC, _RESULTS = "Traffic", "Results"


@dataclass(frozen=True)
class LoadTestOptions(Options):
    """How a server is put under load."""

    label: str = option("", "What reports call the system. Default: what the server says it is.", topic=_RESULTS)
    model: str | None = option(None, "That requests name. Default: the first that the server lists.")
    model_here: str = option(
        "", "The model that the server runs on this machine's CPU, for its limit. Known of roofline:MODEL."
    )
    chip: str = option("", "A product that runs --model-here instead of this CPU, for the limit by its data sheet.")
    chips: int = option(1, "Devices of --chip that share the model.", minimum=1, unit="devices")
    tokens_per_step: float = option(
        1.0,
        "That a step makes of an answer on average, where the server guesses tokens: it raises the limit.",
        minimum=1,
    )
    api_key: str | None = option(None, "Sent as a bearer token.", secret=True)
    route: Literal["completions", "chat"] = option("completions", "Which route requests are sent to.")
    preset: str = option("", "Traffic to make: typical, long, dell, mlc, rocm, chat, multi-turn.", topic=_TRAFFIC)
    traffic: Path | None = option(None, "A file of `roofline bench traffic` instead.", topic=_TRAFFIC)
    seed: int = option(0, "Of the traffic that is made.", minimum=0, topic=_TRAFFIC)
    natural: bool = option(
        False, "Let answers end where the model ends them, also where the preset does not.", topic=_TRAFFIC
    )
    out: Path | None = option(None, "File that each point is added to.", flags=("--out", "-o"), topic=_RESULTS)
    events: Path | None = option(None, "Folder that the raw events of each point are kept in.", topic=_RESULTS)
    objective: str = option("", "Goodput under this promise, such as mlperf:llama2-70b.", topic=_RESULTS)
    timeout: float = option(600.0, "That a request may take.", minimum=0.1, unit="seconds")
    probe: bool = option(True, "Mix in prompts whose answers by the idle system are known.")
    certificate: bool = option(True, "Measure first what the client itself adds.")

    def settings(self, target: str) -> "Settings":
        """As the load test takes them. Raises OSError where the results cannot be written."""
        from roofline.bench.serving.load_test import Settings

        check_output(self.out)
        if self.events is not None:
            self.events.mkdir(parents=True, exist_ok=True)
        if self.chips > 1 and not self.chip:
            raise ConfigError("--chips counts devices of --chip: name the product, or leave it out")
        return Settings(
            target=target,
            label=self.label,
            model=self.model,
            model_here=self.model_here,
            chip=self.chip,
            chips=self.chips,
            tokens_per_step=self.tokens_per_step,
            key=self.api_key,
            route=self.route,
            results=self.out,
            events=self.events,
            objective=self.objective,
            probe=self.probe,
            certify=self.certificate,
            timeout=self.timeout,
        )

    def traffic_of(self, requests: int, preset: str) -> "Traffic":
        """The traffic that was chosen, or that preset's. requests: that will be sent."""
        from roofline.bench.traffic.presets import preset_traffic
        from roofline.bench.traffic.traffic import read_traffic

        if self.traffic is None:
            return preset_traffic(self.preset or preset, requests, self.seed, "natural" if self.natural else None)
        if self.preset:
            raise ConfigError("--preset and --traffic both say what is sent: leave one of the two out")
        if self.natural:
            raise ConfigError(
                "a file says itself where answers end: write it with --stop natural, or leave --natural out"
            )
        traffic = read_traffic(self.traffic)
        if not traffic.requests:
            raise ConfigError(f"{self.traffic} has no requests; write one with `roofline bench traffic`")
        return traffic


HEADINGS = ("load", "requests/s", "tokens/s", "mean e2e", "p95", "TTFT p50", "TPOT p50", "of limit", "equal", "notes")


def tell_points(test: "LoadTest", points: "Iterable[Point]", as_json: bool) -> None:
    """Print each point as it is measured: a line of a table, or a JSON object. On a terminal, a line on standard error
    says how far the load is that runs."""
    import msgspec

    out = console()
    if sys.stderr.isatty():
        test.on_progress = lambda now: print(f"\r{_progress_line(now):<100}\r", end="", file=sys.stderr, flush=True)
    for number, point in enumerate(points):
        if as_json:
            print(msgspec.json.encode(point).decode(), flush=True)
            continue
        if number == 0:
            out.print(_line(HEADINGS), style="bold", highlight=False)
        out.print(_line(_cells(point)), highlight=False)


def _progress_line(now: "Progress") -> str:
    failed = f", {now.failed} failed" if now.failed else ""
    return (
        f"{now.elapsed:.0f} s: {now.completed} requests{failed}, {now.in_flight} in flight, "
        f"{now.tokens_per_s:.0f} tokens/s, client {now.cpu:.0%} of a core, {now.slip_ms:.1f} ms late"
    )


_WIDTHS = (12, 10, 9, 10, 9, 9, 9, 8, 6, 0)


def _line(cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:>{width}}" if width else cell for cell, width in zip(cells, _WIDTHS, strict=True))


def _cells(point: "Point") -> tuple[str, ...]:
    load, metrics, fidelity = point.load, point.metrics, point.fidelity
    assert load is not None, "a point under load"
    if load.concurrency is not None:
        what = f"{load.concurrency} workers" if load.arrivals == "closed" else f"batch {load.concurrency}"
    else:
        what = load.arrivals if load.offered is None else f"{load.offered:.2f}/s"

    def figure(name: str, field: str, form: str) -> str:
        value = getattr(metrics[name], field) if name in metrics else None
        return "-" if value is None else format(value, form)

    limit = point.limit
    share = (
        None if limit is None else limit.share_of_sheet if limit.share_of_measured is None else limit.share_of_measured
    )
    notes = [flag for flag in point.validity.flags if flag not in ("too few requests for p99",)]
    return (
        what,
        figure("request_rate", "value", ".2f"),
        figure("answer_rate", "value", ".1f"),
        figure("e2e_corrected", "mean", ".0f"),
        figure("e2e_corrected", "p95", ".0f"),
        figure("ttft_corrected", "p50", ".1f"),
        figure("tpot", "p50", ".2f"),
        "-" if share is None else f"{share:.0%}",
        "-" if fidelity is None else f"{fidelity.equal}/{fidelity.probes}",
        ", ".join(notes),
    )


FOOTNOTE = (
    "times in ms, counted from the planned moment; of limit: share of what the roofs allow; equal: probes "
    "that were answered as by the idle system"
)
