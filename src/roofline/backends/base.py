"""The interface between the engine and a backend: one Executable, two calls a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from roofline.backends.sampling import Sampled, SampleRows
from roofline.common.errors import RooflineError
from roofline.ops.batch import Batch, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.adapters import AdapterSlots
    from roofline.hardware.roofs import Roofs
    from roofline.program.ir import Program


class LostError(RooflineError):
    """An executable can compute nothing any more: what it runs on is gone. Its process has to start anew."""


class Clock(Protocol):
    """Where the engine reads time from; a simulated backend advances its own."""

    def now(self) -> float:
        """Seconds, monotonic."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()


@dataclass(frozen=True)
class StepCost:
    """What a step must move and compute, and how long that takes at the measured roofs (None: roofs not measured).

    work: the step's size as (1, tokens, rows, keys read, query-key pairs), and of a model with experts how many
    distinct ones of a layer the tokens and the rows are expected to go to; to price it again at other roofs.
    """

    flops: float
    weight_bytes: float
    kv_bytes: float
    limit_seconds: float | None
    work: tuple[float, ...] = ()

    def __add__(self, other: "StepCost") -> "StepCost":
        """Of two computations one after the other; together they have no `work`."""
        limits = self.limit_seconds, other.limit_seconds
        return StepCost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            None if limits[0] is None or limits[1] is None else limits[0] + limits[1],
        )


class Executable(Protocol):
    """A compiled Program bound to weights and a cache of `num_pages` pages.

    The engine fills `batch`, calls `forward`, then `sample`, which returns when its results are in place.
    `exact`: a row's bits do not depend on what else is in its step, nor on how its sequence was cut into steps.
    """

    fingerprint: str
    exact: bool
    vocab_size: int
    max_context: int
    limits: BatchLimits
    num_pages: int
    page_bytes: int
    batch: Batch
    clock: Clock

    def forward(self) -> None:
        """Run the step described by `batch`; on a device it may still be under way."""

    def logits(self) -> np.ndarray:
        """float32 [rows, vocab_size]: a view of the last step's logits, valid until the next forward."""

    def sample(self, rows: SampleRows) -> Sampled:
        """Choose one id for each logit row of the last step."""

    def step_cost(self) -> StepCost:
        """The price of the step now in `batch`."""

    def close(self) -> None:
        """Free memory and threads. The executable cannot be used afterwards."""


# What an Executable may also be able to do, asked with isinstance.


@runtime_checkable
class Queueing(Protocol):
    """Begins a step before the ids of the one before are on the host.

    An id below 0 in `batch` is -1 - r: the id that row r of the last `queue_sample` chose.
    """

    def queue_sample(self, rows: SampleRows) -> Callable[[], Sampled]:
        """Sample as `sample` does, but return at once: what it returns waits for the ids. `forward` may be called
        before that."""


@runtime_checkable
class Resamples(Protocol):
    """Computes on the host's own cores, and can choose some ids of a step anew at no more than what they cost.

    Bits of ids that may come next are made there at the expense of the step, so only where an id was refused.
    """

    def sample_again(self, rows: SampleRows, chosen: np.ndarray) -> Sampled:
        """As `sample`, but for the logit rows `chosen`, int32 [n], alone; of the others, what the last call gave.

        rows: of all logit rows of the step, as in that call, but for `mask`.
        """


@runtime_checkable
class Retraceable(Protocol):
    """Runs other traces of its model, such as one that gives hidden states, on the same weights."""

    @property
    def program(self) -> "Program":
        """The Program it runs."""

    def variant(self, program: "Program", limits: BatchLimits, num_pages: int) -> Executable:
        """Another trace of the same model, with a cache and a batch of its own. Raises CapacityError for want of
        memory."""


@runtime_checkable
class IdentifiesWeights(Protocol):
    """Says which weights it computes with; the fingerprint depends on them and on all else that the bits depend on."""

    @property
    def weights_identity(self) -> str:
        """A hash of the weights, in hexadecimal, that does not depend on the chip."""


@runtime_checkable
class GivesHidden(Protocol):
    """Runs its model also without the head, on the same weights and the same cache."""

    def headless(self) -> Executable:
        """The model up to what its head reads, as an executable with a batch of its own, in which every token can have
        a row: its `logits` are the hidden rows, float32 [rows, width], and nothing is sampled from them. A sequence's
        pages may be written by the one and read by the other; one `forward` of the two runs at a time. Whoever asks
        closes it, before this one.

        Raises UnsupportedError where the model has no such rows, CapacityError for want of memory.
        """


class GuessingExecutable(Executable, Protocol):
    """The layer of a model that guesses further tokens (`models.mtp`), as an executable: a token's row begins with its
    id and a hidden row of the token before it, and its logits are those of the token behind it."""

    def take_hidden(self, rows: np.ndarray) -> None:
        """Write what the tokens of the step in `batch` begin with, float32 [tokens, width], before `forward`."""

    def hidden(self) -> np.ndarray:
        """float32 [rows, width] of the last step, beside each row of logits: what the guess behind it goes on from.
        Valid until the next forward."""


@runtime_checkable
class KeepsHidden(Protocol):
    """May have been loaded with its model's layer that guesses (`LoadOptions.guesses`)."""

    @property
    def guesser(self) -> GuessingExecutable | None:
        """That layer, with as many pages as this executable has; None: it was loaded without. Whoever asks closes it,
        before this one."""

    def hidden(self) -> np.ndarray:
        """float32 [tokens, width] of the last step, where there is a guesser: what the head reads, or would read. Valid
        until the next forward."""


@runtime_checkable
class ComputesNothing(Protocol):
    """An Executable without logits: its ids are made up, and nothing can be told of them or held to a form.

    Its batch has the sizes of a step alone: header, starts of segments and lengths of contexts.
    """

    computes_nothing: bool


@runtime_checkable
class SaysCausal(Protocol):
    """Says whether a token sees nothing that follows it.

    Where it does, the model is an encoder: a prompt is one step, its pages are of no use to another prompt, and all
    that it gives are hidden rows.
    """

    @property
    def causal(self) -> bool: ...


def is_encoder(executable: Executable) -> bool:
    """Whether the model of an executable is an encoder; those that do not say are none."""
    return isinstance(executable, SaysCausal) and not executable.causal


@dataclass(frozen=True)
class ExpertCounts:
    """Which experts the steps' rows went to since the start, all layers together: how many rows went to each (none: the
    model has no experts), and the distinct ones of a layer in a step, added up over so many layers of steps."""

    rows: list[int]
    read: int
    layers: int


@runtime_checkable
class CountsExperts(Protocol):
    """Counts which experts are used."""

    def expert_counts(self) -> ExpertCounts: ...


@runtime_checkable
class FindsDamage(Protocol):
    """Finds what makes logits no numbers."""

    def damaged_tensor(self) -> str | None:
        """A tensor that holds NaN or infinity, None where none does. Reads all weights."""


@runtime_checkable
class MeasuresRoofs(Protocol):
    """Measures the limits of the chip it runs on, and prices steps at them."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads at least once."""

    def measure_roofs(self, reads: Sequence[int]) -> "Roofs":
        """The limits now; reads: working sets in bytes, ascending."""

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: "Roofs", working_set: int) -> float:
        """The least time for steps of these sizes (`StepCost.work`) at `roofs`, reads at `working_set` bytes."""


@runtime_checkable
class TimesOps(Protocol):
    """Times each instruction of its Program."""

    @property
    def program(self) -> "Program":
        """The Program it runs."""

    def clocks(self, on: bool) -> None:
        """Whether `forward` takes the time of each op from now on."""

    def op_seconds(self) -> list[float]:
        """Seconds of each instruction of the last `forward` that ran with clocks."""


@runtime_checkable
class Adapts(Protocol):
    """Computes each row with the adapter that `batch.adapters` names for it."""

    @property
    def adapters(self) -> "AdapterSlots":
        """Its slots; there are none where its Program has no places for adapters."""


@runtime_checkable
class KeepsPages(Protocol):
    """Has the pages of its cache in memory of this process, from where they can be copied, and back, between steps."""

    def page_views(self, page: int) -> Sequence[memoryview]:
        """The bytes of a page where they lie, `page_bytes` in all, in parts whose order is always the same. What is
        written into them is what later steps read. None of them may be kept beyond `close`."""


@runtime_checkable
class KeepsState(Protocol):
    """Has layers with recurrent state, in `limits.state_slots` slots beside the pages of its cache."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: what all such layers have of one sequence; 0 where the model has none."""


@runtime_checkable
class CopiesState(KeepsState, Protocol):
    """Has its slots of recurrent state in memory of this process, from where they can be copied, and back."""

    def slot_views(self, slot: int) -> Sequence[memoryview]:
        """The bytes of a slot where they lie, `slot_bytes` in all, as `KeepsPages.page_views` has those of a page."""


class BackgroundCheck(Protocol):
    """A comparison of weights with their hash that goes on beside the steps."""

    pending: bool  # until it has ended, or was stopped
    problem: str | None  # a sentence, where the weights are other ones

    def stop(self) -> None:
        """Give up, if it still goes on."""


@runtime_checkable
class ChecksWeights(Protocol):
    """Has the bytes of a file of weights in memory as they lie on disk."""

    weights_check: BackgroundCheck | None

    def weights_hash(self, nbytes: int) -> str:
        """SHA-256 of so many bytes of them, in hexadecimal."""

    def check_weights(self, nbytes: int, sha256: str, problem: str, ended: Callable[[str | None], None]) -> None:
        """Compares their hash in the background, as `weights_check`; problem: the sentence for weights with another
        hash; ended: told that, or None."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """Captures steps in device graphs; captures: whether it uses them, which a bench turns off to compare."""

    captures: bool

    def graphs_captured(self) -> str:
        """How many steps have been captured, and why no more are, in words."""
