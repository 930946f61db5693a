"""The run of a command that trains a model on data of the user's: from its options to the server of the result."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.env import foreign
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.cli.training.before_after import ServedModels
    from roofline.cli.training.told_data import Kind
    from roofline.train.config.schema import TrainConfig
    from roofline.train.finetune.encode import Encoder
    from roofline.train.finetune.options import FinetuneOptions
    from roofline.train.finetune.prepare import Data, Prepared, Write

PROGRESS = 5.0  # seconds
FEW_STEPS = 10


@dataclass(frozen=True)
class TuningTask:
    """What a command does otherwise than the others.

    options: as `roofline finetune` has them. form: of the data, None where it is to be told from them. configure: the
    configuration, made of the model, what was prepared, the run's folder and the precision. show: lines of the first so
    many records, perhaps in colour. write: writes rows, None: of samples. rewarded: answers have rewards, and those of
    the data, if there are any, are not looked at.
    """

    options: "FinetuneOptions"
    form: str | None
    kind: "Kind"
    configure: "Callable[[str, Prepared, Path, str], JsonObject]"
    show: "Callable[[Data, Encoder, int, bool], Iterator[str]]"
    write: "Write | None" = None
    rewarded: bool = False


@dataclass(frozen=True)
class TunedRun:
    """A run of a command. source: the model, as the call names it; place: of the data."""

    source: str
    place: Path
    task: TuningTask

    @property
    def model(self) -> str:
        """The model's name, or its path from the root."""
        return str(Path(self.source).resolve()) if Path(self.source).exists() else self.source

    @property
    def folder(self) -> Path:
        return self.task.options.out or Path("runs", f"{Path(self.model).stem}-{self.place.stem}")

    def train(self, nproc: int, changes: Sequence[str], as_json: bool) -> int:
        """Prepare the data, train, and say how to serve the result; the exit status."""
        from roofline.bundle import load_text_of
        from roofline.cli.run.prepare import pull
        from roofline.cli.training.before_after import BeforeAfter, run
        from roofline.train.config.read import parse_config
        from roofline.train.finetune import plan
        from roofline.train.finetune.encode import Encoder
        from roofline.train.finetune.prepare import prepare, read_prompts
        from roofline.train.parallel.placement import ProcessPlacement, meeting_place

        options, task, folder = self.task.options, self.task, self.folder
        pull(self.model)
        data = self._data()
        precision, notes = options.precision, list[str]()
        if not options.show:  # which needs no torch
            if nproc == 1:
                meeting_place(ProcessPlacement.from_environment().size)
            precision, notes = plan.precision_of(options, plan.computes_on_cpu())
        # What is wrong with the options is said before minutes of preparation.
        stand_in = task.configure(self.model, plan.stand_in(data.length), folder, precision)
        served = self._served(parse_config(stand_in, "", changes))
        text = load_text_of(self.model)
        if options.show:
            for line in task.show(data, Encoder(*text, data.length, data.drop), options.show, _has_colours()):
                print(line)
            return 0
        from roofline.train.run.owner import reserve

        with closing(reserve(folder)):
            may_replace = not plan.has_begun(folder)
            prepared = prepare(data, folder / plan.DATA, *text, task.write, _Progress(), may_replace)
            path = plan.write(task.configure(self.model, prepared, folder, precision), folder)
            for line in [*self._told(data, prepared, text[1].is_default), *notes, *self._notes(served)]:
                print(line, file=sys.stderr)
            prompts = read_prompts(folder / plan.DATA, 0 if served.merged else options.ask)
            around = BeforeAfter(served, prompts, folder, task.rewarded)
            status = run(around, path, changes, nproc=nproc, as_json=as_json)
        if options.serve and not status:
            served.start()
        return status

    def _data(self) -> "Data":
        from dataclasses import replace

        from roofline.train.finetune import plan
        from roofline.weights.checkpoint import read_config
        from roofline.weights.sources import resolve

        longest = int(read_config(resolve(self.model))["max_position"])
        return replace(plan.data_of(self.place, self.task.options, longest), form=self.task.form)

    def _served(self, config: "TrainConfig") -> "ServedModels":
        """How the result will be served. Raises ConfigError for --serve where it is not, UnsupportedError."""
        from roofline.cli.training.before_after import ServedModels
        from roofline.ops.adapters import served_merged
        from roofline.train.model.adaptation import forms
        from roofline.train.model.shapes import model_config

        options, section = self.task.options, config.adapter
        assert section is not None, "what commands configure has one"
        # How the base is kept is looked at when the run begins, which warns of what it keeps otherwise.
        plain = config.model_copy(update={"adapter": section.model_copy(update={"base": "bf16"})})
        planned = forms(plain, model_config(config.model, config.max_seq_len))
        parts = dict.fromkeys(served_merged(name) for name, form in planned.items() if form.rank)
        merged = " and of ".join(filter(None, parts))
        if merged and options.serve:
            remedy = "leave it out and merge the adapter afterwards, or name other --targets"
            raise ConfigError(f"--serve: adapters of {merged} are not served: {remedy}")
        outcome = self.folder / ("model" if section.method == "full" else "adapter")
        return ServedModels(self.model, outcome, options.port, section.rank, merged)

    def _told(self, data: "Data", prepared: "Prepared", is_default: bool) -> list[str]:
        from roofline.cli.training.told_data import told, told_of_model
        from roofline.train.finetune import plan

        options = self.task.options
        steps = plan.steps_of(options, prepared)
        batch = plan.batch_of(options, prepared)
        lines = told(data, prepared, self.task.kind, steps, batch)
        lines += told_of_model(prepared, options.max_seq_len, is_default)
        if options.steps is None and steps < FEW_STEPS:
            means = ["more samples", "--epochs"]
            means += ["a smaller --batch"] if batch > 1 else []
            means += ["--no-pack"] if prepared.train.rows < prepared.train.samples else []
            lines.append(f"so few steps teach little: {', '.join(means[:-1])} or {means[-1]} make more")
        return lines

    def _notes(self, served: "ServedModels") -> list[str]:
        """What a user may not expect of the base, and of the result."""
        from roofline.train.finetune import plan
        from roofline.weights.checkpoint import open_checkpoint
        from roofline.weights.sources import resolve

        notes = plan.notes_of_base(self.task.options, open_checkpoint(resolve(self.model)))
        if served.merged:
            notes.append(f"adapters of {served.merged} are not served: the model is not asked before and after the run")
        return notes


def _has_colours() -> bool:
    """Whether what is printed is read on a terminal that shows colours."""
    return sys.stdout.isatty() and foreign("NO_COLOR") is None and foreign("TERM") != "dumb"


class _Progress:
    """Says every few seconds how many records are prepared."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, records: int) -> None:
        if time.monotonic() - self._last > PROGRESS:
            self._last = time.monotonic()
            print(f"{records:,} records prepared", file=sys.stderr)
