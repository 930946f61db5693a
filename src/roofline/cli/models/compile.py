"""roofline compile: a model into a bundle."""

from pathlib import Path
from typing import Annotated

from roofline.cli.options import ModelArgument, Threads
from roofline.common.options import Option
from roofline.common.units import human_bytes


def command(
    model: ModelArgument,
    output: Annotated[Path, Option("The bundle's directory; a bundle there is replaced.", flags=("--output", "-o"))],
    threads: Threads = None,
) -> None:
    """Compile MODEL into a directory of data that every command starts from at once."""
    from roofline.bundle import compile_model
    from roofline.cli.run.prepare import pull

    pull(model)
    written = compile_model(model, output, threads=threads)
    print(f"{written.path}: {human_bytes(written.nbytes)} in {written.seconds:.2f} s")
