"""Which preference method a run is configured with."""

from typing import TYPE_CHECKING, Protocol

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.train.preference.objective import Facts, RowObjective
from roofline.train.preference.pairs import PairTraining
from roofline.train.preference.rollouts import Rollouts
from roofline.train.preference.sampler import MakeSampler

if TYPE_CHECKING:
    from roofline.train.data.loader import Rows
    from roofline.train.run.loop import Run


class Preference(Protocol):
    """What a run with a preference method has beside others.

    objective: for `Gradients`. updates: of the parameters in a step. figures: of the last batch, for the log.
    """

    @property
    def objective(self) -> RowObjective: ...

    @property
    def figures(self) -> dict[str, float]: ...

    @property
    def updates(self) -> int: ...

    def begin(self) -> JsonObject:
        """Prepare before the first step, on all ranks together; facts for the log's first line."""

    def prepare(self, rows: "Rows") -> tuple["Rows", list[Facts]]:
        """The rows that a batch is trained on, and what the objective has to know of each part of them."""

    def evaluate(self, label: str) -> tuple[float, int, dict[str, float]]:
        """The mean loss on a held-out data set, what it is the mean over, and figures."""

    def close(self) -> None:
        """Free what it has."""


def preference_of(run: "Run", make_sampler: MakeSampler | None) -> Preference | None:
    """The method of a run's configuration. Raises ConfigError where it samples and cannot."""
    config = run.config
    if config.dpo is not None:
        return PairTraining(run, config.dpo)
    if config.grpo is None:
        return None
    if make_sampler is None or run.world.size > 1:
        raise ConfigError(
            "grpo samples with an engine in its own process: `roofline reinforce` or `roofline train` "
            "begin such a run, without --nproc"
        )
    return Rollouts(run, config.grpo, make_sampler)
