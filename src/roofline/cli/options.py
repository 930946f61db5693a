"""Options: how commands describe theirs, without Typer, and those that several share."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from roofline.common.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"


class Option:
    """A named value of a command, in `Annotated`.

    Args:
        names: as on the command line, "--on/--off" for a switch with two names; none: made from the parameter's.
        help: one line.
        min, max: the smallest and the largest number allowed.
    """

    def __init__(self, *names: str, help: str = "", min: float | None = None, max: float | None = None) -> None:
        self.names, self.help, self.min, self.max = names, help, min, max


class Argument:
    """A value without a name, in the order of the parameters."""

    def __init__(self, *, help: str = "") -> None:
        self.help = help


Model = Annotated[str, Option("--model", "-m", help="A name from `roofline list`, hf:ORG/REPO[:FILE], or a path.")]
Threads = Annotated[int | None, Option("--threads", min=1, help="Compute threads. Default: the usable cores.")]
Isa = Annotated[
    str | None, Option("--isa", help="Instruction set: avx512, avx2, neon, portable. Default: the best here.")
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Weights = Annotated[
    str | None, Option("--weights", help="random:SEED[:FORMAT] runs the model's configuration on random weights.")
]
Speculate = Annotated[
    Literal["off", "ngram", "draft"],
    Option(
        "--speculate", help="Guess tokens and verify them together: from the text itself, or with --draft. Same output."
    ),
]
Draft = Annotated[str | None, Option("--draft", help="A smaller model of the same vocabulary that guesses.")]
SpeculateTokens = Annotated[int, Option("--speculate-tokens", min=1, max=15, help="Longest guess.")]
KvCacheDtype = Annotated[
    Literal["auto", "bf16", "int8", "fp8"],
    Option("--kv-cache-dtype", help="Format of the key-value cache; int8, or fp8 on GPUs, takes half. auto: bf16."),
]
Backend = Annotated[
    Literal["cpu", "gpu", "reference"], Option("--backend", help="What computes; reference is torch, slow and obvious.")
]
TimedBackend = Annotated[Literal["cpu", "gpu"], Option("--backend", help="What computes.")]
Device = Annotated[
    str,
    Option("--device", help="GPU of --backend gpu: amd:0, nvidia:1, a product or an architecture. auto: the first."),
]
Exact = Annotated[
    bool,
    Option("--exact", help="Results do not depend on what else is in a step: slower on a GPU, true anyway elsewhere."),
]
Activations = Annotated[
    Literal["auto", "fp8"],
    Option("--activations", help="fp8 with --backend gpu: rounded to it where weights are. auto: 16 bits."),
]
Offload = Annotated[
    str, Option("--offload", help="Layers kept in the host's memory with --backend gpu; auto: as few as it takes.")
]
TensorParallel = Annotated[
    int, Option("--tensor-parallel", "--tp", min=1, help="Ranks, each a process, that share each layer.")
]
PipelineParallel = Annotated[
    int, Option("--pipeline-parallel", "--pp", min=1, help="Stages that share the layers; not of --backend cpu.")
]
MaxTokens = Annotated[int | None, Option("--max-tokens", min=1, help="Longest answer. Default: what fits.")]
Temperature = Annotated[float, Option("--temperature", min=0.0, help="0 takes the most likely token.")]
TopP = Annotated[float, Option("--top-p", help="Keep the smallest set of tokens with this probability.")]
Seed = Annotated[int | None, Option("--seed", help="The same seed gives the same answer. Default: a fresh one.")]


def placed(
    backend: str,
    device: str,
    exact: bool,
    offload: str,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    activations: str = "auto",
) -> dict[str, Any]:
    """Where a model runs, as options of `roofline.bundle.load`: those that differ from its defaults. Raises ConfigError
    for an `offload` that is neither a number nor "auto"."""
    if offload != "auto" and not offload.isdecimal():
        raise ConfigError(f"--offload {offload!r} is neither a number of layers nor auto")
    layers: int | str = "auto" if offload == "auto" else int(offload)
    given = {"backend": (backend, "cpu"), "device": (device, "auto"), "exact": (exact, False), "offload": (layers, 0)}
    given |= {"tensor_parallel": (tensor_parallel, 1), "pipeline_parallel": (pipeline_parallel, 1)}
    given |= {"activations": (activations, "auto")}
    return {name: value for name, (value, default) in given.items() if value != default}


def described(command: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any, Any]]:
    """(parameter, its type, its Option or Argument; None for another description) of each of a command's values."""
    hints = get_type_hints(command, include_extras=True)
    found = []
    for parameter in inspect.signature(command).parameters.values():
        hint, about = hints[parameter.name], None
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            about = next((extra for extra in extras if isinstance(extra, Option | Argument)), None)
        found.append((parameter, hint, about))
    return found


def typed(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with Typer's own descriptions in place of ours."""
    import typer

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        return command(**values)

    hints = get_type_hints(command, include_extras=True)
    for parameter, kind, about in described(command):
        if isinstance(about, Option):
            hints[parameter.name] = Annotated[
                kind, typer.Option(*about.names, help=about.help, min=about.min, max=about.max)
            ]
        elif isinstance(about, Argument):
            hints[parameter.name] = Annotated[kind, typer.Argument(help=about.help)]
    call.__annotations__ = hints
    signature = inspect.signature(command)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
