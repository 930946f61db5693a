"""roofline bench replay: a published chart, what is measured here, and what the chips allow, on one page."""

from pathlib import Path
from typing import Annotated

from roofline.cli.output import check_output
from roofline.cli.parser import Argument
from roofline.common.options import Option


def command(
    name: Annotated[str, Argument("mlc-amd, rocm-llm-opt, flywheel, mosaic-mi250 or dell-mi300x.")],
    out: Annotated[Path | None, Option("The page: one HTML file.", flags=("--out", "-o"))] = None,
    points: Annotated[
        list[Path] | None, Option("Files of points, or records of bench latency and bench train, of yours.")
    ] = None,
    markdown: Annotated[Path | None, Option("Also write it as Markdown.")] = None,
) -> None:
    """Draw published figures with their sources, the limits of the chips they were measured on, and points of yours.

    Without files it tells which command measures the nearest form that a machine allows.
    """
    from roofline.bench.replays.own import read_own
    from roofline.bench.replays.published import publication
    from roofline.bench.replays.replay import replay
    from roofline.bench.report.page import page
    from roofline.bench.report.text import markdown as as_markdown
    from roofline.common.files import write_atomically

    published = publication(name)
    for path in (out, markdown):
        check_output(path)
    own, refused = read_own(points or [])
    report = replay(published, own, refused)
    if out is not None:
        write_atomically(out, page(report))
        print(f"written: {out}")
    if markdown is not None:
        write_atomically(markdown, as_markdown(report))
        print(f"written: {markdown}")
    print(f"{published.title}: {published.about}")
    if not points:
        print(f"nothing of yours is in it; the nearest form: {published.again}; then name its file with --points")
    for sentence in report.refused:
        print(f"refused: {sentence}")
