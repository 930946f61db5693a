"""How commands load a model whose steps they time."""

from dataclasses import dataclass
from typing import Annotated

from roofline.backends.options import LoadOptions
from roofline.cli.parser import Without
from roofline.common.options import same_option


@dataclass(frozen=True)
class TimedOptions(LoadOptions):
    """How a model is loaded whose steps are timed: on one rank; the times of the reference would say nothing."""

    backend: str = same_option(LoadOptions, "backend", help="What computes.", choices=("cpu", "gpu"))


# Of a model whose steps are timed: sizes follow from what is timed.
TimedLoad = Annotated[
    TimedOptions,
    Without(
        *("tensor_parallel", "pipeline_parallel", "cache_tokens", "max_model_len", "max_running", "max_batch_tokens"),
        "arithmetic",
    ),
]
