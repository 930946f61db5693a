"""roofline pull: get a model."""

from typing import Annotated

from roofline.cli.parser import Argument


def command(
    name: Annotated[str, Argument("A short name, or hf:ORG/REPO[:FILE]. Default: the default model.")] = "",
) -> None:
    """Download a model into the cache, verified; what an interrupted pull had finished is kept."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    from roofline.weights import sources

    name = name or sources.DEFAULT_MODEL
    columns = TextColumn("{task.description:>11}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        path = sources.pull(name, report)
    print(f"{name} is in {path}")
