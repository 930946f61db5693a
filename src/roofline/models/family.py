"""What a family is: the functions that every architecture has, and the batch that they receive."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from roofline.models.config import ModelConfig
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Symbol, Value

if TYPE_CHECKING:
    from roofline.ops.attention import KvCache
    from roofline.ops.rows import Rows, TurnedPositions
    from roofline.ops.state import StateStore
    from roofline.ops.state_rows import StateRows


@dataclass
class ForwardBatch:
    """One step as the families read it: torch tensors, or Symbols while tracing; None where a part of the model that is
    run by itself does not need it.

    ids, positions: int [tokens]; logit_rows: int [rows], or a slice of the tokens; cache: replaced at every write;
    state: likewise, of models whose layers keep recurrent state; further: caches of the second and later groups, of
    models whose layers write keys of several shapes (`ModelConfig.kv_group`).
    """

    ids: "Value | None"
    positions: "Value | TurnedPositions | None"
    logit_rows: "Value | slice"
    cache: "KvCache | Rows | Symbol | None"
    state: "StateStore | StateRows | Symbol | None" = None
    further: "list[KvCache | Rows | Symbol | None]" = field(default_factory=list)

    def cache_of(self, group: int) -> "KvCache | Rows | Symbol | None":
        """The cache of a group, as it is now."""
        return self.further[group - 1] if group else self.cache

    def keep(self, group: int, cache: "KvCache | Rows | Symbol | None") -> None:
        """Take what was written to a group's cache."""
        if group:
            self.further[group - 1] = cache
        else:
            self.cache = cache


class Family(Protocol):
    """One architecture: a check, a table of parameters, and three plain functions in the op vocabulary."""

    def check(self, cfg: ModelConfig) -> None: ...

    def spec(self, cfg: ModelConfig) -> tuple[Param, ...]: ...

    def embed(self, cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value: ...

    def block(self, cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value: ...

    def head(self, cfg: ModelConfig, w: Weights, x: Value, batch: ForwardBatch) -> Value: ...
