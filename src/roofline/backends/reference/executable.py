"""The reference as an Executable: slow, but the engine can run on it, step for step like any other backend."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.adapters import AdapterSlots
from roofline.backends.base import Clock, GuessingExecutable, MonotonicClock, StepCost
from roofline.backends.checkpoint import damaged_tensor
from roofline.backends.prices import PriceTable, StepPrices
from roofline.backends.reference.cache import ReferencePages
from roofline.backends.reference.interpreter import Interpreter, Observer
from roofline.backends.reference.sampling import sample
from roofline.backends.reference.slots import ReferenceSlots
from roofline.backends.reference.weights import Read
from roofline.backends.sampling import Sampled, SampleRows
from roofline.common.errors import UnsupportedError
from roofline.ops.adapters import AdaptedRows
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits
from roofline.ops.collectives import RankGroup
from roofline.ops.traits import Trait
from roofline.program.ir import HIDDEN, Instr, Program
from roofline.program.passes.adapt import ADAPTERS
from roofline.program.target import GPU_ORDERS
from roofline.program.text import program_hash

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ReferenceExecutable:
    """A Program on torch; see `backends.base.Executable`.

    read: file tensor name -> its bytes; num_pages: pages of 16 tokens the cache holds; weights_hash: of the
    tensors' bytes; it goes into the fingerprint with the Program; group: who shares the matrices, where the Program is
    one rank's; caches, states: pages and slots of state of another executable of the same model, shared with it, None:
    its own.
    """

    program: Program
    read: Read
    limits: BatchLimits
    num_pages: int
    max_context: int
    weights_hash: str = ""
    clock: Clock = field(default_factory=MonotonicClock)
    group: RankGroup | None = None
    caches: "dict[str, ReferencePages] | None" = None
    states: "dict[str, ReferenceSlots] | None" = None

    def __post_init__(self) -> None:
        self.take_fingerprint_of(self.program)
        self.guesser: GuessingExecutable | None = None  # see `backends.base.KeepsHidden`
        self._begun = self._hidden = np.zeros((0, 0), np.float32)
        self.vocab_size = self.program.types()[self.program.logits].width
        self.page_bytes = sum(PAGE_TOKENS * group.token_bytes for group in self.program.kv_groups.values())
        self.slot_bytes = sum(group.slot_bytes for group in self.program.state_groups.values())
        assert not self.slot_bytes or self.limits.state_slots, "a model with recurrent state and no slots for it"
        self.batch = Batch(self.limits)
        self.exact = all(map(_ordered, self.program.body))
        self._interpreter = Interpreter(self.program, self.read, self.group)
        groups = self.program.kv_groups.items()
        self._caches = self.caches or {name: ReferencePages(group, self.num_pages) for name, group in groups}
        states = self.program.state_groups.items()
        self._states = self.states or {name: ReferenceSlots(group, self.limits.state_slots) for name, group in states}
        self._prices = StepPrices(PriceTable.of(self.program), roofs=None, working_set=0)
        self.adapters = AdapterSlots(self.program)
        self._logits = np.zeros((0, self.vocab_size), np.float32)

    def take_fingerprint_of(self, program: Program) -> None:
        """Take the fingerprint of a Program of these weights that gives the same bits."""
        facts = f"reference {program_hash(program)} {self.weights_hash}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()

    def variant(
        self, program: Program, limits: BatchLimits, num_pages: int, group: "RankGroup | None" = None
    ) -> "ReferenceExecutable":
        return ReferenceExecutable(
            program=program,
            read=self.read,
            limits=limits,
            num_pages=num_pages,
            max_context=self.max_context,
            weights_hash=self.weights_hash,
            group=group,
        )

    def headless(self) -> "ReferenceExecutable":
        """See `backends.base.GivesHidden`."""
        from roofline.program.passes.headless import headless
        from roofline.program.passes.plan import plan

        if self.group is not None:
            raise UnsupportedError("hidden states of a share of a model", "its ranks compute logits alone")
        program, limits = plan(headless(self.program)), replace(self.limits, rows=self.limits.tokens)
        return replace(self, program=program, limits=limits, caches=self._caches, states=self._states)

    @property
    def causal(self) -> bool:
        return all(instr.attr("causal") for instr in self.program.body if instr.op == "attend")

    def forward(self) -> None:
        self._logits = self.run({}).numpy()

    def run(self, carried: "Mapping[str, Tensor]") -> "Tensor":
        import torch

        batch = self.batch
        stores: dict[str, ReferencePages | ReferenceSlots] = {**self._caches, **self._states}
        for store in stores.values():
            store.begin(batch)
        fields = {
            "ids": batch.ids[: batch.tokens],
            "positions": batch.positions[: batch.tokens],
            "logit_rows": batch.logit_rows[: batch.rows],
        }
        assert int(fields["positions"].max(initial=0)) < self.max_context, "a position beyond the context"
        tensors = {name: torch.from_numpy(view.astype(np.int64)) for name, view in fields.items()}
        slots = batch.adapters[: batch.tokens].copy()
        rows = AdaptedRows(slots, fields["logit_rows"], self.adapters.placed)
        named = {f"{name}.0": store for name, store in stores.items()}
        begun = {HIDDEN: torch.from_numpy(self._begun)}
        values = self._interpreter.run({**tensors, **carried, **named, **begun, ADAPTERS: rows})
        result: Tensor = values[self.program.logits]
        if self.program.hidden is not None:
            self._hidden = values[self.program.hidden].numpy()
        return result

    def hidden(self) -> np.ndarray:
        """See `backends.base.KeepsHidden`."""
        return self._hidden

    def take_hidden(self, rows: np.ndarray) -> None:
        """See `backends.base.GuessingExecutable`."""
        self._begun = rows.copy()

    def observe(self, observer: Observer | None) -> None:
        """Have each instruction and its operands shown before it is computed: what comes in is what weights meet."""
        self._interpreter.observer = observer

    def logits(self) -> np.ndarray:
        return self._logits

    def sample(self, rows: SampleRows) -> Sampled:
        return sample(self._logits, rows)

    def sample_of(self, logits: "Tensor", rows: SampleRows) -> Sampled:
        return sample(logits.numpy(), rows)

    @property
    def weights_identity(self) -> str:
        return self.weights_hash

    def damaged_tensor(self) -> str | None:
        return damaged_tensor(self.program, self.read)

    def step_cost(self) -> StepCost:
        return self._prices.of(self.batch)

    def close(self) -> None:
        self._caches, self._states = {}, {}


def _ordered(instr: Instr) -> bool:
    """Whether an instruction adds in an order that the step does not change: torch chooses where none of the CPU's is
    asked for."""
    return not instr.has(Trait.LONG_SUM) or instr.attr("order") not in ("", *GPU_ORDERS)
