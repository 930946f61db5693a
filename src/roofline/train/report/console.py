"""What a run shows while it goes: a progress bar, or a line every few steps, with the time that is left."""

import datetime
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.common.json_types import JsonObject
from roofline.common.units import human_bytes
from roofline.train.config.schema import TrainConfig
from roofline.train.report import cards

if TYPE_CHECKING:
    from roofline.train.run.loop import Finished


class Console:
    """Shows lines of the log: on a terminal as a bar (progress_bar), as lines where log_to_console says so or where
    there is no terminal."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def begin(self, about: JsonObject) -> None:
        """The run's size, before its first step."""
        self.about = about
        print(
            f"{about['parameters']:,} parameters, {about['steps']:,} steps of {about['batch_tokens']:,} tokens, "
            f"{about['processes']} process{'es' if about['processes'] > 1 else ''} on {about['device']}"
            + (f"; {human_bytes(about['memory']['predicted'])} of memory predicted" if about["memory"] else ""),
            file=sys.stderr,
        )
        if self.config.progress_bar and sys.stderr.isatty():
            from rich.console import Console as Terminal
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Terminal(stderr=True))
            self._task = self._bar.add_task("", total=about["steps"], completed=about["step"])
            self._bar.start()

    def show(self, line: JsonObject) -> None:
        """A line of the log."""
        if "about" in line:
            self.begin(line["about"])
            return
        said = self._evaluation(line) if "eval_loss" in line else self._step(line)
        if self._bar is not None:
            if "eval_loss" in line:
                self._bar.console.print(said)
            else:
                self._bar.update(self._task, completed=line["step"], description=said)
        if self.config.log_to_console or self._bar is None:
            last = line["step"] == self.about["steps"]
            if "eval_loss" in line or last or line["step"] % self.about["show_every"] == 0:
                left = "" if "eval_loss" in line else self._left(line)
                print(f"step {line['step']}/{self.about['steps']}: {said}{left}", file=sys.stderr)

    def end(self, finished: "Finished") -> None:
        """The run is done."""
        if self._bar is not None:
            self._bar.stop()
        if math.isnan(finished.loss):
            print(f"{finished.folder}: all {finished.steps:,} steps were done already")
            return
        held = "" if finished.evaluation is None else f", held-out loss {finished.evaluation:.4f}"
        print(f"{finished.steps:,} steps, loss {finished.loss:.4f}{held}, {_memory(finished.folder)}{finished.folder}")

    def _left(self, line: JsonObject) -> str:
        """At the speed of the last steps, to the end of the run."""
        steps = self.about["steps"] - line["step"]
        seconds = steps * self.about["batch_tokens"] / line["tokens_per_s"]
        return f", {datetime.timedelta(seconds=round(seconds))} left" if steps else ""

    def _step(self, line: JsonObject) -> str:
        share = self.about["share"]
        against = f" ({line['tokens_per_s'] * share['per_token_s']:.1%} {share['name']})"
        return f"loss {line['loss']:.4f}, lr {line['lr']:.3g}, {line['tokens_per_s']:,.0f} tokens/s{against}"

    @staticmethod
    def _evaluation(line: JsonObject) -> str:
        return f"held-out loss {line['eval_loss']:.4f}, perplexity {line['perplexity']:.2f}"


def _memory(folder: Path) -> str:
    """How much memory the run took, as its card says."""
    memory = cards.read(str(folder))["memory"]
    predicted, taken = memory["predicted"], memory["measured"]
    if taken is None:
        return ""
    against = f" (predicted {human_bytes(predicted['total'])})" if predicted else ""
    return f"{human_bytes(taken)} of memory{against}, "
