"""Options that several commands share."""

from typing import Annotated, Literal

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
Weights = Annotated[
    str | None, typer.Option("--weights", help="random:SEED runs the model's configuration on random weights.")
]
Speculate = Annotated[
    Literal["off", "ngram", "draft"],
    typer.Option(
        "--speculate", help="Guess tokens and verify them together: from the text itself, or with --draft. Same output."
    ),
]
Draft = Annotated[str | None, typer.Option("--draft", help="A smaller model of the same vocabulary that guesses.")]
SpeculateTokens = Annotated[int, typer.Option("--speculate-tokens", min=1, max=15, help="Longest guess.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer. Default: what fits.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the smallest set of tokens with this probability.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer. Default: a fresh one.")]
