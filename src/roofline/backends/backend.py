"""The interface of a backend: one object that turns a model and the options of loading into an Executable.

`Backend` is what every one of them does. What only some can do is a protocol of its own: run one rank's share of a
model (`ServesRanks`), run a bundle as it lies on disk (`RunsBundles`), compile for chips that are not here
(`CompilesAhead`), read nothing of a checkpoint later (`CopiesWeights`). Callers ask with isinstance.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from roofline.backends.capacity import Capacity
from roofline.backends.options import LoadOptions
from roofline.common.fields import naming
from roofline.common.json_types import JsonMapping

if TYPE_CHECKING:
    from roofline import _native
    from roofline.backends.base import Executable
    from roofline.backends.checkpoint import LoadableCheckpoint
    from roofline.backends.cpu.backend import CompiledModel
    from roofline.backends.parallel.ranks import Ranks
    from roofline.backends.parallel.share import ShareExecutable
    from roofline.models.config import ModelConfig
    from roofline.ops.batch import BatchLimits
    from roofline.program.ir import Program, Share
    from roofline.program.target import Target

SHARED_WITH_GUESSER = ("embed.weight", "head.weight")  # what a layer that guesses has of its model
Notes = Mapping[str, str]  # what was chosen automatically, and why


@dataclass(frozen=True)
class Neighbours:
    """What else will lie on the machine beside a model. No option of a user: whoever loads several models knows it.

    replica, replicas: the model is the replica-th of so many copies, which divide the devices and the memory for
    caches; draft: a model that is loaded next on the same device, with as many tokens in its cache; traces: room is
    left for two other traces of this model (hidden states, logits of a prompt), with steps and pages of these limits.
    """

    replica: int = 0
    replicas: int = 1
    draft: "LoadableCheckpoint | None" = None
    traces: "BatchLimits | None" = None


@dataclass(frozen=True)
class LoadRequest:
    """All that a backend makes an Executable from."""

    checkpoint: "LoadableCheckpoint"
    config: "ModelConfig"
    options: LoadOptions
    capacity: Capacity
    neighbours: Neighbours = Neighbours()

    def compile_guesser(self, target: "Target", share: "Share | None" = None) -> "Program | None":
        """The Program of the model's layer that guesses further tokens, or of one rank's share of it, where the options
        ask for it.

        Raises as `compile_program`, ConfigError where the files have no such layer.
        """
        from roofline.common.errors import ConfigError
        from roofline.models.mtp import guessing_layer
        from roofline.models.registry import get
        from roofline.program.compile import compile_program
        from roofline.program.ir import WHOLE

        if not self.options.guesses:
            return None
        pair, tensors = guessing_layer(get(self.config.family), self.config), self.checkpoint.guessing
        if pair is None or not tensors:
            remedy = "load files that have it (mtp.* or nextn tensors), or use speculate='ngram' or 'draft'"
            raise ConfigError(f"{self.checkpoint.path} has no layer that guesses, for speculate='mtp': {remedy}")
        shared = {
            name: self.checkpoint.tensors[name] for name in SHARED_WITH_GUESSER if name in self.checkpoint.tensors
        }
        with naming(self.checkpoint.path):
            return compile_program(*pair, {**shared, **tensors}, target, share=share or WHOLE, keeps_hidden=True)

    def compile(self, target: "Target", share: "Share | None" = None, keeps_hidden: bool = False) -> "Program":
        """The Program of the model, or of one rank's share, for a target. Raises as `compile_program`."""
        from roofline.models.registry import get
        from roofline.program.compile import compile_program
        from roofline.program.ir import WHOLE

        family, tensors = get(self.config.family), self.checkpoint.tensors
        with naming(self.checkpoint.path):
            program = compile_program(
                family, self.config, tensors, target, share=share or WHOLE, keeps_hidden=keeps_hidden
            )
        if not self.options.max_adapters:
            return program
        from roofline.program.passes.adapt import adapt

        return adapt(program, self.options.max_adapter_rank)


class Backend(Protocol):
    """What every backend does."""

    def resolve(self, options: LoadOptions, neighbours: Neighbours) -> LoadOptions:
        """The options with those values replaced that follow from this machine, before a model is looked for.

        Raises ConfigError, UnsupportedError, CapacityError: the options do not fit each other or this machine.
        """

    def capacity(self, options: LoadOptions, config: JsonMapping, replicas: int) -> Capacity:
        """Sizes of a model. config: fields of its ModelConfig; replicas: copies that share the memory for caches.

        Raises ConfigError, CapacityError: they do not fit the model, the machine or each other.
        """

    def make(self, request: LoadRequest) -> "tuple[Executable, Notes]":
        """The whole model, ready to run. Raises UnsupportedError, CapacityError, ConfigError."""


@runtime_checkable
class CopiesWeights(Protocol):
    """A backend whose executables compute with copies of the tensors, made within `make`: a model in memory may be
    trained or freed afterwards. For any other, `roofline.torch.from_model` copies the tensors before."""

    copies_weights: bool


@runtime_checkable
class HoldsCompressedRows(Protocol):
    """A backend whose cache may hold the compressed rows of attention instead of the keys and values that are made of
    them (`models.latent`)."""

    def holds_compressed_rows(self, options: LoadOptions, config: JsonMapping) -> bool:
        """Whether a model that has such rows is loaded so. config: fields of its ModelConfig."""


@runtime_checkable
class ServesRanks(Protocol):
    """A backend that runs a model on several processes, each with a share of it (docs/how-to/parallel.md)."""

    def check_share(self, request: LoadRequest, share: "Share") -> None:
        """Raises, before any process is started, where the model or the host cannot be divided so."""

    def rank_device(self, options: LoadOptions, rank: int) -> str:
        """torch's name of a rank's device."""

    def make_share(self, request: LoadRequest, ranks: "Ranks") -> "tuple[ShareExecutable, Notes]":
        """This rank's share, ready to run."""


@runtime_checkable
class RunsBundles(Protocol):
    """A backend that bundles are compiled for."""

    def make_from_bundle(
        self, bundle: "CompiledModel", mapping: "_native.Mapping", options: LoadOptions, capacity: Capacity
    ) -> "tuple[Executable, Notes]":
        """The model of a bundle, ready to run; mapping: its weights, mapped (`cpu.memory.map_image`)."""


@dataclass(frozen=True)
class CompiledAhead:
    """Of one model on one chip: binaries that its launches asked for, and how many of them had to be compiled."""

    chip: str
    binaries: int
    compiled: int


@runtime_checkable
class CompilesAhead(Protocol):
    """A backend that compiles a model's kernels for chips that are not here."""

    def compile_ahead(
        self,
        open_checkpoint: "Callable[[], LoadableCheckpoint]",
        options: LoadOptions,
        chips: Sequence[str],
        folder: Path | None,
    ) -> Iterator[CompiledAhead]:
        """Compile what the model runs on chips of these names into the kernel cache, or into `folder`.

        open_checkpoint: called in other processes, so it must be picklable.
        """
