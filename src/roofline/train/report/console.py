"""Shows the progress of a run: a bar, or a line every few steps with the remaining time."""

import datetime
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.json_types import JsonObject
from roofline.common.units import human_bytes
from roofline.train.config.schema import TrainConfig
from roofline.train.report import cards

if TYPE_CHECKING:
    from rich.progress import Progress

    from roofline.train.run.loop import Finished


class Console:
    """Shows lines of the log: as a bar on a terminal (progress_bar), as text with log_to_console or without a bar."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.started = time.monotonic()
        self._bar: Progress | None = None

    def begin(self, about: JsonObject) -> None:
        """Show the size of the run, before its first step."""
        self.about = about
        print(
            f"{about['parameters']:,} parameters, {about['steps']:,} steps of {about['batch_tokens']:,} tokens, "
            f"{about['processes']} process{'es' if about['processes'] > 1 else ''} on {about['device']}"
            + (f"; {human_bytes(about['memory']['predicted'])} of memory predicted" if about["memory"] else ""),
            file=sys.stderr,
        )
        if self.config.progress_bar and sys.stderr.isatty():
            from rich.console import Console as Terminal
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Terminal(stderr=True))
            self._task: TaskID = self._bar.add_task("", total=about["steps"], completed=about["step"])
            self._bar.start()

    def show(self, line: JsonObject) -> None:
        """Show a line of the log."""
        if "about" in line:
            self.begin(line["about"])
            return
        evaluated, step, steps = "eval_loss" in line, line["step"], self.about["steps"]
        if evaluated:
            text = f"held-out loss {line['eval_loss']:.4f}, perplexity {line['perplexity']:.2f}"
        else:
            share = self.about["share"]
            against = f" ({line['tokens_per_s'] * share['per_token_s']:.1%} {share['name']})"
            text = f"loss {line['loss']:.4f}, lr {line['lr']:.3g}, {line['tokens_per_s']:,.0f} tokens/s{against}"
        if self._bar is not None and evaluated:
            self._bar.console.print(text)
        elif self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        due = evaluated or step == steps or step % self.about["show_every"] == 0
        if due and (self.config.log_to_console or self._bar is None):
            remaining = "" if evaluated else self._remaining(line)
            print(f"step {step}/{steps}: {text}{remaining}", file=sys.stderr)

    def end(self, finished: "Finished") -> None:
        """Show the result of the run."""
        if self._bar is not None:
            self._bar.stop()
        if math.isnan(finished.loss):
            print(f"{finished.folder}: all {finished.steps:,} steps were done already")
            return
        held_out = "" if finished.evaluation is None else f", held-out loss {finished.evaluation:.4f}"
        print(
            f"{finished.steps:,} steps, loss {finished.loss:.4f}{held_out}, {_memory(finished.folder)}{finished.folder}"
        )

    def _remaining(self, line: JsonObject) -> str:
        """The time to the end of the run, at the speed of the last steps."""
        steps = self.about["steps"] - line["step"]
        seconds = steps * self.about["batch_tokens"] / line["tokens_per_s"]
        return f", {datetime.timedelta(seconds=round(seconds))} left" if steps else ""


def _memory(folder: Path) -> str:
    """The memory that the run used, from its card."""
    memory = cards.read(str(folder))["memory"]
    predicted, measured = memory["predicted"], memory["measured"]
    if measured is None:
        return ""
    against = f" (predicted {human_bytes(predicted['total'])})" if predicted else ""
    return f"{human_bytes(measured)} of memory{against}, "
