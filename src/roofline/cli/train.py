"""roofline train: one loop for every chip."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    config: Annotated[Path, typer.Argument(help="A YAML file with LLM Foundry's keys (docs/training.md).")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.KEY=VALUE instead of what the file says; may be repeated.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine, which share each step.")] = 1,
) -> None:
    """Train a model as a YAML file says."""
    from roofline.train.config import read

    given = changes or []
    read(config, given)  # what is wrong with it is said once, not by each process
    if nproc > 1:
        from roofline.train.launch import launch

        raise typer.Exit(launch(nproc, config, given))
    from roofline.train.console import Console
    from roofline.train.loop import train

    settled = read(config, given)
    console = Console(settled)
    console.end(train(settled, console.show))
