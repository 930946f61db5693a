"""roofline compile: a model into a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from roofline.cli.options import Threads


def command(
    model: Annotated[str, typer.Argument(help="A name, hf:ORG/REPO[:FILE], or a path.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's directory; a bundle there is replaced.")],
    threads: Threads = None,
) -> None:
    """Compile MODEL into a directory of data that every command starts from at once."""
    from roofline.bundle import compile_model
    from roofline.cli.run.prepare import pulled
    from roofline.common.units import human_bytes

    pulled(model)
    written = compile_model(model, output, threads=threads)
    typer.echo(f"{written.path}: {human_bytes(written.nbytes)} in {written.seconds:.2f} s")
