"""Options that several commands share."""

from typing import Annotated

import typer

DEFAULT_MODEL = "smollm2-135m"

Model = Annotated[
    str, typer.Option("--model", "-m", help="A name from `roofline list`, hf:ORG/REPO[:FILE], or a path.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Compute threads. Default: the usable cores.")]
Isa = Annotated[
    str | None, typer.Option("--isa", help="Instruction set: avx512, avx2, neon, portable. Default: the best here.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
