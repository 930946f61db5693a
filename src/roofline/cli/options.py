"""Options that several commands share, beside the declared groups (LoadOptions, EngineConfig, SamplingParams)."""

from dataclasses import dataclass
from typing import Annotated

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.parser import Argument
from roofline.common.options import Option, Options, declared, option

MODEL_HELP = "A name from `roofline list`, hf:ORG/REPO[:FILE], or a path."
SYSTEM_HELP, STOP_HELP = "The system message.", "End the answer before this text."

ModelArgument = Annotated[str, Argument(MODEL_HELP)]
AsJson = Annotated[bool, Option("Print one JSON object.", flags=("--json",))]
AsJsonLines = Annotated[bool, Option("Print one JSON object a line, for each point.", flags=("--json",))]
Threads = Annotated[int | None, declared(LoadOptions)["threads"]]
Isa = Annotated[str | None, declared(LoadOptions)["isa"]]
Weights = Annotated[str | None, declared(LoadOptions)["weights"]]
KvCacheDtype = Annotated[str, declared(LoadOptions)["kv_cache_dtype"]]
MOST_MEMORY = 65_536  # GB that a chip may be said to have: no machine has more


@dataclass(frozen=True)
class ModelOptions(Options):
    """The models that a command runs."""

    model: str = option(DEFAULT_MODEL, MODEL_HELP, flags=("--model", "-m"))
    draft: str | None = option(
        None, "A smaller model of the same vocabulary, for --speculate draft.", topic="Speculation"
    )


@dataclass(frozen=True)
class AdaptedModelOptions(ModelOptions):
    """The models that a command runs, and the adapter that it answers with."""

    adapter: str | None = option(
        None,
        "A LoRA adapter that the model computes with, as PATH or, as `roofline serve` has it, NAME=PATH: a folder of "
        "PEFT's files, or a GGUF file.",
    )


Stop = Annotated[list[str] | None, Option(STOP_HELP)]
System = Annotated[str | None, Option(SYSTEM_HELP)]
Draft = Annotated[str | None, declared(ModelOptions)["draft"]]
AdapterPlace = Annotated[str | None, declared(AdaptedModelOptions)["adapter"]]
