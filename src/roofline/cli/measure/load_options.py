"""What the commands have in common that put a server under load: which, with what, where the results go."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roofline.cli.output import check_output, console
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

if TYPE_CHECKING:
    from roofline.bench.load.plan import Plan
    from roofline.bench.results.point import Point
    from roofline.bench.serving.load_test import LoadTest, Settings
    from roofline.bench.traffic.traffic import Traffic

TARGET_HELP = (
    "http://... of any OpenAI-compatible server, or of several with commas, which take requests in turn; "
    "roofline:MODEL with options of `roofline serve` behind it; engine:MODEL with options of `LLM`, in this process; "
    "openvino:FOLDER with --python of an interpreter that has openvino-genai; llama.cpp:FILE.gguf with options of "
    "llama-server; or the command line of another server with {port} in it, which is started and ended."
)
_TRAFFIC, _RESULTS = "Traffic", "Results"
_UNREAD = ("unread_tokens", "unread_seconds")


@dataclass(frozen=True)
class LoadTestOptions(Options):
    """How a server is put under load."""

    label: str = option(
        "", "What reports call the system. Default: what the server says it is; of compare A.", topic=_RESULTS
    )
    model: str | None = option(None, "That requests name. Default: the first that the server lists.")
    model_here: str = option(
        "", "The model that the server runs on this machine's CPU, for its limit. Known of roofline:MODEL."
    )
    chip: str = option("", "A product that runs --model-here instead of this CPU, for the limit by its data sheet.")
    chips: int = option(1, "Devices of --chip that share the model.", minimum=1, unit="devices")
    dtype: str = option(
        "", "Format in which the server has the weights (fp8, int4, ...), for the limit. Default: as --model-here has."
    )
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
    objective: str = option(
        "",
        "Goodput under this promise: mlperf:llama2-70b and others, or limits in ms such as ttft=200,tpot=50,e2e=3000.",
        topic=_RESULTS,
    )
    timeout: float = option(600.0, "That a request may take.", minimum=0.1, unit="seconds")
    probe: bool = option(True, "Mix in prompts whose answers by the idle system are known.")
    certificate: bool = option(True, "Measure first what the client itself adds.")

    def settings(self, target: str) -> "Settings":
        """As the load test takes them. Raises OSError where the results cannot be written."""
        from roofline.bench.results.objectives import read_objective
        from roofline.bench.serving.load_test import Settings

        check_output(self.out)
        if self.events is not None:
            self.events.mkdir(parents=True, exist_ok=True)
        if self.dtype and not self.model_here:
            raise ConfigError("--dtype is of the model that the server runs: name it with --model-here")
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
            dtype=self.dtype,
            key=self.api_key,
            route=self.route,
            results=self.out,
            events=self.events,
            promise=read_objective(self.objective, "objective") if self.objective else None,
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


@dataclass(frozen=True)
class LevelOptions(Options):
    """How much is sent at a level of a series."""

    requests: int = option(5, "Of each worker at a level.", minimum=1, unit="requests")
    fewest: int = option(32, "At every level, however few workers it has.", minimum=1, unit="requests")
    seconds: float = option(60.0, "After which a level sends no more.", minimum=0.1, unit="seconds")


@dataclass(frozen=True)
class UnreadOptions(Options):
    """Clients beside the measured ones that do not read their answers."""

    unread: float = option(
        0.0,
        "Share of the requests, beside which another client sends one and does not read its answer. Figures are of the "
        "requests that are read.",
        minimum=0,
        maximum=1,
    )
    unread_tokens: int | None = option(
        None,
        "Of an answer that is not read. Default: as many as of the request beside it.",
        minimum=1,
        unit="tokens",
    )
    unread_seconds: float | None = option(
        None, "After which a client that does not read gives up. Default: 120.", minimum=0.1, unit="seconds"
    )

    def plan_fields(self, target: str) -> dict[str, object]:
        """What a plan has of them. Raises ConfigError for options without a share, and for a target that has no
        connections."""
        from roofline.bench.load.targets import IN_PROCESS

        chosen = {name: getattr(self, name) for name in _UNREAD if getattr(self, name) is not None}
        if chosen and not self.unread:
            flag = f"--{next(iter(chosen)).replace('_', '-')}"
            raise ConfigError(f"{flag} is of clients that --unread adds: name their share, or leave {flag} out")
        if self.unread and target.startswith(IN_PROCESS):
            raise ConfigError(f"--unread is of servers: {target} has no connection whose client could leave it unread")
        return {**chosen, "unread": self.unread}


@dataclass(frozen=True)
class CollectedTestOptions(LoadTestOptions):
    """How a server is put under load, and whose metrics are kept meanwhile."""

    collect: list[str] | None = option(
        None,
        "Server whose /metrics are written beside --out (FILE.series) while it is measured, as ADDRESS or "
        "NAME=ADDRESS; of a fleet each replica, once for each. `bench report` draws them.",
        topic=_RESULTS,
    )
    collect_interval: float = option(
        2.0, "From one reading of --collect to the next.", minimum=0.1, maximum=3600, unit="seconds", topic=_RESULTS
    )

    def collecting(self) -> AbstractContextManager[None]:
        """Around the measuring: what collects. Raises ConfigError where it cannot."""
        from roofline.bench.serving.collecting import collecting

        return collecting(self.collect or (), self.out, self.api_key, self.collect_interval)


MOST_UNANSWERED = 0.1  # of a command's requests, beyond which its status is not 0
FOOTNOTE = (
    "times in ms, counted from the planned moment: TTFT and TPOT are medians, latency is the mean; of the limit: share "
    "of the tokens/s that the roofs allow"
)


def tell_points(
    test: "LoadTest",
    points: "Iterable[Point]",
    as_json: bool,
    count: int | None = None,
    seconds: float | None = None,
    overload: bool = False,
) -> None:
    """Print each point as it is measured, and before it how far the load is that runs; or JSON objects alone.

    points: measured as they are asked for, one after the other; count: of them at most; seconds: that each takes;
    overload: whether the last point is to show where the server fails. Raises ConfigError where not a single request
    was answered, and where more than MOST_UNANSWERED of them were not.
    """
    ends: list[tuple[int, int]] = []
    with outcome_told(test):
        _show_points(test, _and_interrupted(_counted(points, ends)), as_json, count, seconds)
    judged = ends[:-1] if overload and len(ends) > 1 else ends
    without, sent = (sum(column) for column in zip(*judged, strict=True)) if judged else (0, 0)
    if test.answered and without > MOST_UNANSWERED * sent:
        cause = f"the last one that failed: {test.failure}" if test.failure else "their answers had no text"
        raise ConfigError(
            f"{without} of {sent} requests were not answered, more than {MOST_UNANSWERED:.0%}; {cause}. "
            "The points are of the others, and flagged"
        )
    if test.impossible:
        raise ConfigError(f"{test.impossible}. The points are kept, and flagged; reports leave their share out")
    if not test.answered:
        cause = (
            f"the last one failed with: {test.failure}"
            if test.failure
            else "none was sent in time, or answers had no text"
        )
        raise ConfigError(f"no request was answered; {cause}")


def _counted(points: "Iterable[Point]", ends: list[tuple[int, int]]) -> "Iterator[Point]":
    """The points. ends: of each, how many requests were not answered, and how many came to an end, is added to it."""
    for point in points:
        if point.counts is not None:
            without = point.counts.failed + point.counts.empty
            ends.append((without, without + point.counts.completed))
        yield point


@contextmanager
def outcome_told(*tests: "LoadTest") -> Iterator[None]:
    """Around the measuring: points that cannot be written are printed; after Ctrl-C it is told where the points are."""
    from roofline.bench.serving.load_test import NotKept

    try:
        yield
    except NotKept as error:
        for point in error.points:
            _print_json(point)
        raise
    except KeyboardInterrupt as abort:
        raise KeyboardInterrupt(_after_abort(tests[0].settings.results, sum(test.points for test in tests))) from abort


def _after_abort(results: Path | None, points: int) -> str:
    if not points:
        return "Aborted! No point was measured by then."
    what = "the point that was measured by then is" if points == 1 else f"the {points} points measured by then are"
    place = "in the output alone: there was no --out" if results is None else f"in {results}"
    return f"Aborted! {what.capitalize()} {place}."


def _and_interrupted(points: "Iterable[Point]") -> "Iterator[Point]":
    """The points, and the one that Ctrl-C ended. Raises KeyboardInterrupt behind it."""
    from roofline.bench.serving.measure import Interrupted

    try:
        yield from points
    except Interrupted as abort:
        yield abort.point
        raise


def _show_points(
    test: "LoadTest", points: "Iterable[Point]", as_json: bool, count: int | None, seconds: float | None
) -> None:
    if as_json:
        for point in points:
            _print_json(point)
        return
    from roofline.bench.report.live import LiveView

    out = console(highlight=False)
    title = f"{test.traffic.name}, {test.system_label}"
    with LiveView(title, points=count, seconds=seconds, console=out) as view:
        test.on_start = lambda plan: view.started(load_of_plan(plan), test.most_tokens_per_s(plan))
        test.on_progress = view.progress
        for point in points:
            view.finished(point)
    out.print(FOOTNOTE, style="dim")


def _print_json(point: "Point") -> None:
    import msgspec

    print(msgspec.json.encode(point).decode(), flush=True)


def load_of_plan(plan: "Plan") -> str:
    """What a plan offers, as its point will be called."""
    from roofline.bench.report import words

    is_open = plan.arrivals not in ("closed", "batch", "trace")
    return words.load_text(plan.arrivals, plan.concurrency, plan.rate if is_open else None)
