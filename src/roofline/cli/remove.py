"""roofline rm: delete a pulled model."""

from typing import Annotated

import typer


def command(name: Annotated[str, typer.Argument(help="a name that `roofline list` shows as pulled")]) -> None:
    """Delete a pulled model from the cache."""
    from roofline.common.units import human_bytes
    from roofline.weights import sources

    typer.echo(f"removed {name}, {human_bytes(sources.remove(name))}")
