"""Pairs of answers in a run (DPO): their log-probabilities under the reference, which is the model as the run begins.

They are computed once, before the first step, of all samples that the run reads, and kept in the run's folder: a run
that goes on from a checkpoint no longer has the model that it began with.
"""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.config.objectives import DpoSection
from roofline.train.data.order import share
from roofline.train.data.row_arrays import RowArrays
from roofline.train.parallel.processes import reshard
from roofline.train.preference.dpo import PairLoss
from roofline.train.preference.objective import Facts
from roofline.train.preference.scores import scored

if TYPE_CHECKING:
    from roofline.train.data.loader import Rows
    from roofline.train.run.loop import Run

REFERENCE = (
    "reference.json"  # label of a data set (TRAIN, or an evaluation's) -> sample -> its pairs' log-probabilities
)
TRAIN = ""
_Values = dict[int, list[float]]  # of each sample: chosen and rejected of its pairs in turn


class PairTraining:
    """What a run of DPO has beside others.

    Attributes:
        objective: for `Gradients`. updates: of the parameters in a step.
    """

    updates = 1

    def __init__(self, run: "Run", section: DpoSection) -> None:
        self.run, self.objective = run, PairLoss(section)
        self._values: dict[str, _Values] = {}

    @property
    def figures(self) -> dict[str, float]:
        """None beside the objective's."""
        return {}

    def begin(self) -> JsonObject:
        """Compute the reference's log-probabilities, or read them where the run goes on; facts for the log."""
        run, path = self.run, self.run.folder / REFERENCE
        if run.progress.step:
            self._values = run.world.share(run.world.first(self._read) or {})
            return {}
        started = time.perf_counter()
        ids = np.unique(np.concatenate([run.order.batch(step) for step in range(run.total)]))
        self._values = {TRAIN: self._computed(TRAIN, ids)}
        for label, source in run.held_out.items():
            limit = run.config.eval_subset_num_batches
            count = len(source) if limit < 0 else min(len(source), limit * run.config.device_eval_batch_size)
            self._values[label] = self._computed(label, np.arange(count))
        if run.world.rank == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(self._values) + "\n")
        rows = sum(map(len, self._values.values()))
        return {"reference": {"rows": rows, "seconds": time.perf_counter() - started}}

    def prepare(self, rows: "Rows") -> tuple["Rows", list[Facts]]:
        """A batch, and what the objective has to know of each of its parts."""
        return rows, [self._facts(TRAIN, share(rows.ids, *part)) for part in self.run.shares]

    def evaluate(self, label: str) -> tuple[float, int, dict[str, float]]:
        """The mean loss of held-out pairs, how many they are, and figures."""
        run = self.run
        loss, pairs = run.held_out_loss(label, lambda numbers: self._facts(label, numbers))
        return loss, pairs, run.gradients.means(pairs)

    def close(self) -> None:
        """Nothing is open."""

    def _facts(self, label: str, numbers: np.ndarray) -> Facts:
        of_label = self._values.get(label, {})
        missing = [int(number) for number in numbers if int(number) not in of_label]
        if missing:
            raise ConfigError(
                f"{self.run.folder / REFERENCE} lacks sample {missing[0]} of {label or 'train_loader'}: the run began "
                "with fewer steps or another evaluation. Begin a new run; load_path and load_weights_only=true take "
                "the weights along"
            )
        values = [of_label[int(number)] for number in numbers]
        most = max([1, *(len(value) // 2 for value in values)])
        reference = np.zeros((len(values), most, 2))
        for row, each in enumerate(values):
            reference[row].reshape(-1)[: len(each)] = each
        return {"pairs": np.array([len(value) // 2 for value in values], np.int64), "reference": reference}

    def _read(self) -> dict[str, _Values]:
        path = self.run.folder / REFERENCE
        try:
            read = json.loads(path.read_text("utf-8"))
            return {label: {int(number): values for number, values in of.items()} for label, of in read.items()}
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is missing, the log-probabilities under the model that the run began with: put it back from "
                "the folder of the checkpoint's run"
            ) from error
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): begin the run anew with save_overwrite=true") from error

    def _computed(self, label: str, numbers: np.ndarray) -> _Values:
        """The log-probabilities of samples, computed by all ranks together, row by row so that none changes another."""
        run = self.run
        source = run.source if label == TRAIN else run.held_out[label]
        own, most = share(numbers, run.world.data_rank, run.world.data_size), -(-len(numbers) // run.world.data_size)
        values = []
        for at in range(most):
            rows = source.rows(own[at : at + 1])
            scores = scored(run.gradients, rows)
            if len(rows.tokens):
                count = 2 * _pairs(rows, f"sample {own[at]}")
                values.append(
                    [float(scores[rows.documents == number].sum(dtype=np.float64)) for number in range(count)]
                )
        reshard(run.model, run.world)
        return self._gathered(own, values, most)

    def _gathered(self, own: np.ndarray, rows: Sequence[Sequence[float]], most: int) -> _Values:
        """The values of all ranks' rows; own: the numbers of this rank's; most: rows of any of them."""
        width = int(self.run.world.most([max([0, *map(len, rows)])])[0])
        table = np.zeros((most, 2 + width))  # number, how many values there are, the values
        for line, number, values in zip(table, own, rows, strict=False):
            line[: 2 + len(values)] = [number, len(values), *values]
        every = np.array(self.run.world.gather(table.reshape(-1).tolist())).reshape(-1, 2 + width)
        return {int(line[0]): line[2 : 2 + int(line[1])].tolist() for line in every if line[1]}


def _pairs(rows: RowArrays, name: str) -> int:
    """The pairs of one row. Raises ConfigError for a row that has none."""
    assert rows.documents is not None
    count = int(rows.documents.max() + 1) // 2
    if not count:
        raise ConfigError(f"{name} of the data set is no pair of answers: `roofline prefer` writes such rows")
    return count
