"""roofline bench compare: which of two servers is faster, by blocks in turns, with an interval that holds."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from roofline.cli.measure.load_options import TARGET_HELP, LoadTestOptions, outcome_told
from roofline.cli.options import AsJson
from roofline.cli.output import console, print_json
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

if TYPE_CHECKING:
    from roofline.bench.results.compare import By, Decision, Sequential
    from roofline.bench.serving.load_test import LoadTest
    from roofline.bench.serving.versus import Terms, VersusResult


@dataclass(frozen=True)
class CompareOptions(Options):
    """How two servers are compared."""

    label_b: str = option("", "What reports call B, and --label A. Default: B.", topic="Results")
    concurrency: int = option(4, "Workers of the closed loop.", minimum=1, unit="requests")
    rate: float | None = option(None, "Send at random moments instead, so many requests a second.", minimum=0.001)
    block: int = option(16, "Requests of a block.", minimum=1, unit="requests")
    by: Literal["auto", "throughput", "latency", "goodput"] = option(
        "auto",
        "What decides; auto: throughput of closed loops; at a --rate, which fixes that, goodput (requests a second "
        "within --objective) or, without an objective, latency.",
    )
    margin: float = option(3.0, "A smaller difference is none, in percent.", minimum=0.1, maximum=50)
    rounds: int = option(28, "At most; a round is the blocks A B B A.", minimum=2, unit="rounds")

    def decided_by(self, objective: str) -> "By":
        """Raises ConfigError where throughput is to decide at a rate, or goodput without a rate and an objective."""
        if self.by == "goodput" and (self.rate is None or not objective):
            missing = "an offered --rate" if self.rate is None else "--objective, such as ttft=200,tpot=50"
            raise ConfigError(f"--by goodput counts requests within limits at a rate: give {missing}")
        if self.rate is None:
            return "latency" if self.by == "latency" else "throughput"
        if self.by == "throughput":
            raise ConfigError(
                "--by throughput at a --rate would compare the rate with itself: leave one of the two out, or decide "
                "--by latency or goodput"
            )
        return "goodput" if objective and self.by != "latency" else "latency"


def command(
    a: Annotated[str, Argument(TARGET_HELP)],
    b: Annotated[str, Argument("Another one.")],
    options: LoadTestOptions,
    compared: CompareOptions,
    as_json: AsJson = False,
) -> None:
    """Compare two servers that run at the same time, in blocks A B B A with the same requests and arrivals.

    It ends when the interval of the ratio excludes 1, when it lies within --margin of 1 (no difference), or when the
    rounds are used up. The interval holds although it is looked at several times. Traffic: typical.
    """
    from roofline.bench.serving.load_test import open_load_test
    from roofline.bench.serving.versus import Terms, compare, points

    settings = options.settings(a)
    terms = Terms(
        requests=compared.block,
        concurrency=compared.concurrency,
        rate=compared.rate,
        by=compared.decided_by(options.objective),
        margin=compared.margin / 100,
        rounds=compared.rounds,
        promise=settings.promise,
    )
    traffic = options.traffic_of(2 * terms.requests * terms.most_rounds, "typical")
    streams = terms.concurrency if terms.rate is None else terms.requests
    other = replace(settings, target=b, label=compared.label_b or "B", certify=False)
    with ExitStack() as stack:
        first = stack.enter_context(open_load_test(replace(settings, label=settings.label or "A"), traffic, streams))
        second = stack.enter_context(open_load_test(other, traffic, streams))
        second.certificate = first.certificate
        stack.enter_context(outcome_told(first, second))
        if as_json:
            comparison = compare(first, second, terms, lambda _: None)
            points(first, second, terms, comparison)
        else:
            comparison = _show(first, second, terms)
        _tell(comparison, as_json)
        if comparison.interrupted:
            raise KeyboardInterrupt
        if comparison.failure:
            raise ConfigError(comparison.failure)


def _tell(comparison: "VersusResult", as_json: bool) -> None:
    """What the rounds say; of none, nothing."""
    if not comparison.rounds:
        return
    if as_json:
        print_json(_record(comparison))
        return
    out = console()
    out.print(f"by {comparison.by}: {comparison.verdict.sentence(comparison.by)}", style="bold", highlight=False)
    for what, ratios in _ratios(comparison):
        out.print(f"{what}: {_figures(ratios.decision())}", highlight=False)
    if comparison.goodput is not None:
        out.print(f"goodput: {comparison.goodput.decision().figures()}", highlight=False)


def _show(first: "LoadTest", second: "LoadTest", terms: "Terms") -> "VersusResult":
    """Compare, and print each round, the block that runs, and at the end the point of each side."""
    from roofline.bench.report.live import LiveView
    from roofline.bench.serving.versus import compare, points

    out = console(highlight=False)
    title = f"{first.traffic.name}, A: {first.system_label}, B: {second.system_label}"
    with LiveView(title, console=out) as view:

        def told(comparison: "VersusResult") -> None:
            out.print(_round_line(comparison))
            if comparison.decision is None:
                view.started(f"round {comparison.rounds + 1}")

        first.on_progress = second.on_progress = view.progress
        view.started("round 1")
        comparison = compare(first, second, terms, told)
        for point in points(first, second, terms, comparison):
            view.finished(point)
    return comparison


def _round_line(comparison: "VersusResult") -> str:
    figures = ", ".join(f"{what} {_figures(ratios.decision())}" for what, ratios in _ratios(comparison, 2))
    if comparison.goodput is not None and comparison.rounds > 1:
        figures += f"{', ' * bool(figures)}goodput {comparison.goodput.decision().figures()}"
    return f"round {comparison.rounds}: {figures or 'measured'}"


def _ratios(comparison: "VersusResult", fewest: int = 1) -> "list[tuple[str, Sequential]]":
    """Throughput and latency, of at least so many rounds in which no request failed."""
    both = [("throughput", comparison.throughput), ("latency", comparison.latency)]
    return [(what, ratios) for what, ratios in both if len(ratios.a) >= fewest]


def _figures(decision: "Decision") -> str:
    ratio = decision.ratio
    return f"B/A {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _record(comparison: "VersusResult") -> dict[str, object]:
    ratios = {what: each.decision().ratio for what, each in _ratios(comparison)}
    record: dict[str, object] = {
        "verdict": comparison.verdict.verdict,
        "by": comparison.by,
        "rounds": comparison.rounds,
        **{name: {"ratio": each.ratio, "low": each.low, "high": each.high} for name, each in ratios.items()},
    }
    if comparison.goodput is not None:
        decision = comparison.goodput.decision()
        low, high = decision.interval
        figures = {"a": decision.a, "b": decision.b, "difference": decision.difference, "low": low, "high": high}
        record["goodput"] = figures
    return record
