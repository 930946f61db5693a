"""roofline bench report, history, check, cost: what measured points show, from the files that hold them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import check_output, console, plain_table, print_json, print_table
from roofline.cli.parser import Argument
from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.options import Option, Options, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roofline.bench.report.chart import ReportSection, Table
    from roofline.bench.report.cost import Depreciation, Prices
    from roofline.bench.report.history import Finding, GoodputFinding
    from roofline.bench.report.page import Report
    from roofline.bench.report.throughput import Slo

    Findings = Sequence[Finding | GoodputFinding]

Files = Annotated[list[Path], Argument("Files of measured points, as bench curve and others write them.")]
Out = Annotated[Path | None, Option("The page: one HTML file.", flags=("--out", "-o"))]
Metric = Annotated[
    str,
    Option(
        "Which figure: request_rate, answer_rate, ttft, tpot or e2e; of training train_rate, step_time or efficiency."
    ),
]


@dataclass(frozen=True)
class PriceOptions(Options):
    """What a machine costs. Prices are inputs with a source and a day: none is built in."""

    price: list[str] | None = option(
        None, "USD an hour of all devices of a machine: 2.5, or MI300X=2.5 for machines with that in their name."
    )
    price_capex: list[str] | None = option(
        None, "USD that a bought machine cost, in place of a price an hour: 250000, or MI300X=250000."
    )
    price_years: float | None = option(None, "Years until a bought machine is worth nothing.", minimum=0.1)
    price_utilisation: float | None = option(
        None, "Share of the hours in which a bought machine serves: 0.6.", minimum=0.01, maximum=1
    )
    price_source: str = option("", "Where the prices are from.")
    price_date: str = option("", "The day of the prices: 2026-11-26.")
    kwh: float | None = option(None, "USD a kWh, where the hourly price has no electricity in it.", minimum=0)
    pue: float = option(1.0, "Energy of the building for each joule of the machine.", minimum=1)
    answer_weight: float = option(4.0, "How many prompt tokens an answer token is charged as.", minimum=0.01)


def report(
    files: Files,
    prices: PriceOptions,
    out: Out = None,
    markdown: Annotated[Path | None, Option("Also write it as Markdown.")] = None,
    csv: Annotated[Path | None, Option("Also write all points as CSV.")] = None,
    title: Annotated[str, Option("The title. Default: the presets that were measured.")] = "",
    slo: Annotated[
        str, Option("What users are promised, in ms: ttft=2000,tpot=200,e2e=30000, or some; or mlperf:NAME.")
    ] = "",
) -> None:
    """Draw measured points, of one machine or several, on one page that needs no network.

    Points that exceed what is physically possible are refused, with the arithmetic, and are in no chart.
    """
    from roofline.bench.report.gather import gather
    from roofline.bench.report.report import report as make

    if out is None and markdown is None and csv is None:
        raise ConfigError("name where the report goes: -o report.html, --markdown FILE or --csv FILE")
    promised = _slo(slo)
    priced = _prices(prices) if prices.changes() else None
    for path in (out, markdown, csv):
        check_output(path)
    gathered = gather(files)
    page = make(gathered, title, promised, priced)
    _write(page, out, markdown)
    if csv is not None:
        from roofline.bench.report.text import csv_of_points
        from roofline.common.files import write_atomically

        write_atomically(csv, csv_of_points(gathered.points))
        print(f"written: {csv}")
    print(page.about)
    for refused in page.refused:
        print(f"refused: {refused}")


def history(files: Files, metric: Metric = "request_rate", out: Out = None) -> None:
    """Show how a figure of the same load changed from version to version, with intervals."""
    from roofline.bench.report.gather import gather
    from roofline.bench.report.history import trend
    from roofline.bench.report.page import Report

    check_output(out)
    gathered = gather(files)
    section = trend(gathered, metric)
    _show(section)
    _write(Report(section.title, f"{len(gathered.points)} points", (section,), tuple(gathered.refused)), out, None)


def check(
    new: Annotated[Path, Argument("The file of the version to check.")],
    against: Annotated[
        Path | None, Option("The file of the version before. Default: the paired ratios in NEW, of bench compare.")
    ] = None,
    at_most: Annotated[str, Option("How much slower it may be.")] = "5%",
    metric: Annotated[
        str,
        Option(
            "Which figure: as of history. Default: request_rate; without --against what bench compare decided by, or "
            "one of answer_rate, e2e and goodput."
        ),
    ] = "",
    other_traffic: Annotated[bool, Option("Compare points of different traffic too.")] = False,
    other_machine: Annotated[bool, Option("Compare points of different machines too.")] = False,
    as_json: AsJson = False,
) -> int:
    """Refuse a version that is slower: status 1 where a figure is worse by more than is allowed, beyond doubt."""
    from roofline.bench.report.gather import gather
    from roofline.bench.report.history import Allowed, check_pairs, without_match
    from roofline.bench.report.history import check as compare

    share = _share(at_most)
    mine = gather([new])
    if mine.refused:
        raise ConfigError(f"{new}: {mine.refused[0]}")
    findings: Sequence[Finding | GoodputFinding]
    if against is None:
        findings = check_pairs(mine.points, share, metric)
    else:
        theirs = gather([against])
        allowed = Allowed(share, other_traffic, other_machine)
        findings = compare(mine.points, theirs.points, metric or "request_rate", allowed)
        if alone := without_match(mine.points, theirs.points, allowed):
            log.get("bench").warning("%s", alone)
    slower = [finding for finding in findings if finding.verdict == "slower"]
    _tell(findings, slower, share, as_json)
    return 1 if slower else 0


def cost(files: Files, prices: PriceOptions, out: Out = None) -> None:
    """Tell what a million tokens cost over the offered load, and the energy of a token where a counter was read.

    Prices are inputs with a date and a source: none is built in.
    """
    from roofline.bench.report.cost import sections
    from roofline.bench.report.gather import gather
    from roofline.bench.report.page import Report

    priced = _prices(prices)
    check_output(out)
    gathered = gather(files)
    parts = sections(gathered, priced)
    if not parts:
        if gathered.points and not any(point.counts and point.counts.answer_tokens for point in gathered.points):
            raise ConfigError("no point has answers whose tokens could have a cost: those of training have none")
        places = ", ".join(gathered.places)
        raise ConfigError(
            f"no point has both a price and tokens a second (machines: {places}): --price 2.5 is for any machine"
        )
    for section in parts:
        _show(section)
    _write(Report("cost", f"{len(gathered.points)} points", tuple(parts), tuple(gathered.refused)), out, None)


def _write(report: "Report", out: Path | None, markdown: Path | None) -> None:
    from roofline.bench.report.page import page
    from roofline.bench.report.text import markdown as as_markdown
    from roofline.common.files import write_atomically

    if out is not None:
        write_atomically(out, page(report))
        print(f"written: {out}")
    if markdown is not None:
        write_atomically(markdown, as_markdown(report))
        print(f"written: {markdown}")


def _show(section: "ReportSection") -> None:
    out = console(highlight=False, markup=False)
    out.print(section.title, style="bold")
    if section.text:
        out.print(section.text)
    if section.table is not None:
        _print_table(section.table)


def _print_table(table: "Table") -> None:
    print_table(console(highlight=False), plain_table(table.headings, table.rows))


def _slo(text: str) -> "Slo":
    from roofline.bench.report.throughput import Slo
    from roofline.bench.results.objectives import read_objective

    if not text:
        return Slo()
    promise = read_objective(text, "slo")
    return Slo(*(promise.limit(name) for name in ("ttft", "tpot", "e2e")))


def _prices(options: PriceOptions) -> "Prices":
    from roofline.bench.report.cost import Prices, check_date, parse_prices

    if not options.price and not options.price_capex:
        raise ConfigError("name what a machine costs: --price 2.5, in USD an hour, or --price-capex 250000")
    if not options.price_source.strip() or not options.price_date:
        raise ConfigError("a price needs --price-source and --price-date: others must be able to look it up")
    check_date(options.price_date)
    if options.pue != 1.0 and options.kwh is None:
        raise ConfigError(f"pue={options.pue:g} multiplies electricity: name its price with --kwh")
    rent, purchase = parse_prices(options.price or ()), parse_prices(options.price_capex or (), "price_capex")
    twice = sorted(rent.keys() & purchase.keys())
    if twice:
        raise ConfigError(
            f"{twice[0] or 'any machine'} has both --price and --price-capex: a machine is rented or bought"
        )
    return Prices(
        usd_per_hour=rent,
        source=options.price_source,
        date=options.price_date,
        usd_per_kwh=options.kwh,
        pue=options.pue,
        answer_weight=options.answer_weight,
        purchase=purchase,
        depreciation=_depreciation(options),
    )


def _depreciation(options: PriceOptions) -> "Depreciation | None":
    """Of bought machines, None where there are none. Raises ConfigError for what does not fit together."""
    from roofline.bench.report.cost import Depreciation

    years, utilisation = options.price_years, options.price_utilisation
    if not options.price_capex:
        if years is not None or utilisation is not None:
            raise ConfigError("--price-years and --price-utilisation are of bought machines: name --price-capex")
        return None
    if years is None or utilisation is None or options.kwh is None:
        raise ConfigError("--price-capex needs --price-years, --price-utilisation and --kwh: its owner pays for these")
    return Depreciation(years=years, utilisation=utilisation)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 <= share < 1:
        raise ConfigError(f"at_most={text!r} is no share: write it as 5%")
    return share


def _tell(
    findings: "Sequence[Finding | GoodputFinding]",
    slower: "Sequence[Finding | GoodputFinding]",
    share: float,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    if as_json:
        print_json({"at_most": share, "slower": len(slower), "findings": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        print(finding)
    if slower:
        print(f"{len(slower)} of {len(findings)} loads are slower by more than {share:.0%}")
