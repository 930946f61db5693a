"""roofline bench compare: which of two servers is faster, by blocks in turns, with an interval that holds."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from roofline.cli.measure.load_options import TARGET_HELP, LoadTestOptions
from roofline.cli.options import AsJson
from roofline.cli.output import console, print_json
from roofline.cli.parser import Argument
from roofline.common.options import Option

if TYPE_CHECKING:
    from roofline.bench.results.compare import Decision
    from roofline.bench.serving.versus import Comparison


def command(
    a: Annotated[str, Argument(TARGET_HELP)],
    b: Annotated[str, Argument("Another one.")],
    options: LoadTestOptions,
    label_b: Annotated[str, Option("What reports call B; --label is A's.")] = "",
    concurrency: Annotated[int, Option("Workers of the closed loop.", minimum=1, unit="requests")] = 4,
    rate: Annotated[
        float | None, Option("Send at random moments instead, so many requests a second.", minimum=0.001)
    ] = None,
    block: Annotated[int, Option("Requests of a block.", minimum=1, unit="requests")] = 16,
    by: Annotated[Literal["throughput", "latency"], Option("What decides.")] = "throughput",
    margin: Annotated[float, Option("A smaller difference is none, in percent.", minimum=0.1)] = 3.0,
    rounds: Annotated[int, Option("At most; a round is the blocks A B B A.", minimum=2, unit="rounds")] = 28,
    as_json: AsJson = False,
) -> None:
    """Compare two servers that run at the same time, in blocks A B B A with the same requests and arrivals.

    It ends when the interval of the ratio excludes 1, when it lies within --margin of 1 (no difference), or when the
    rounds are used up. The interval holds although it is looked at several times. Traffic: typical.
    """
    from roofline.bench.serving.load_test import WARM_UP, open_load_test
    from roofline.bench.serving.versus import Terms, compare, points

    terms = Terms(block, concurrency, rate, by, margin / 100, rounds)
    traffic = options.traffic_of(WARM_UP + 2 * block * rounds, "typical")
    streams = concurrency if rate is None else block
    settings = options.settings(a)
    with ExitStack() as stack:
        first = stack.enter_context(open_load_test(replace(settings, label=settings.label or "A"), traffic, streams))
        other = replace(settings, target=b, label=label_b or "B", certify=False)
        second = stack.enter_context(open_load_test(other, traffic, streams))
        second.certificate = first.certificate
        comparison = compare(first, second, terms, lambda so_far: None if as_json else _tell_round(so_far))
        points(first, second, terms, comparison)
    if not comparison.throughput.a:
        raise KeyboardInterrupt
    if as_json:
        print_json(_record(comparison))
        return
    out = console()
    out.print(f"by {by}: {comparison.verdict.sentence}", style="bold", highlight=False)
    for what, ratios in (("throughput", comparison.throughput), ("latency", comparison.latency)):
        out.print(f"{what}: {_figures(ratios.decision())}", highlight=False)


def _tell_round(comparison: "Comparison") -> None:
    rounds = len(comparison.throughput.a)
    figures = ", ".join(
        f"{what} {_figures(ratios.decision())}"
        for what, ratios in (("throughput", comparison.throughput), ("latency", comparison.latency))
        if rounds > 1
    )
    console().print(f"round {rounds}: {figures or 'measured'}", highlight=False)


def _figures(decision: "Decision") -> str:
    ratio = decision.ratio
    return f"B/A {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _record(comparison: "Comparison") -> dict[str, object]:
    ratios = {"throughput": comparison.throughput.decision().ratio, "latency": comparison.latency.decision().ratio}
    return {
        "verdict": comparison.verdict.verdict,
        "by": comparison.by,
        "rounds": len(comparison.throughput.a),
        **{name: {"ratio": each.ratio, "low": each.low, "high": each.high} for name, each in ratios.items()},
    }
