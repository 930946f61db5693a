"""Shows the progress of a run: a bar, or a line every few steps with the remaining time."""

import datetime
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.json_types import JsonObject
from roofline.common.units import counted, human_bytes
from roofline.hardware.roofs import TOLERANCE
from roofline.train.config.schema import TrainConfig
from roofline.train.report import cards

if TYPE_CHECKING:
    from rich.progress import Progress

    from roofline.train.run.progress import Finished


FIGURES = ("perplexity", "accuracy", "reward")  # that are shown beside a loss
NOT_SAVED = "not saved: the place of its checkpoints holds those of another run, and no save_interval is set"


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
            f"{about['parameters']:,} parameters, {counted(about['steps'], 'step')} of "
            f"{about['batch_tokens']:,} tokens, "
            f"{about['processes']} process{'es' if about['processes'] > 1 else ''} on {about['device']}"
            + (_predicted_memory(about["memory"], about["processes"]) if about["memory"] else ""),
            file=sys.stderr,
        )
        if about.get("saves") is False:
            print(
                "nothing of the weights will be saved: set save_interval or save_folder to keep checkpoints",
                file=sys.stderr,
            )
        if about.get("leak_proof"):
            print(
                "packed rows: other tokens in one document change nothing in those beside it, neither logits nor "
                f"gradients (tried in {about['leak_proof']['seconds']:.2g} s)",
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
        if "samples" in line:
            self._show_samples(line)
            return
        evaluated, step, steps = "eval_loss" in line, line["step"], self.about["steps"]
        if evaluated:
            of = f" of {line['label']}" if "label" in line else ""
            text = f"held-out loss{of} {line['eval_loss']:.4f}{_figures(line)}"
        else:
            share = self.about["share"]
            padding = line.get("computed", 1) / line.get("real", 1)  # is computed, too
            reached = line["tokens_per_s"] * padding * share["per_token_s"]
            # The roof was measured before the first step, perhaps beside other programs: the card measures it again.
            against = f"{reached:.1%} {share['name']}" if reached <= TOLERANCE else f"{share['name']}: not known"
            loss, speed = (
                f"loss {line['loss']:.4f}{_figures(line)}",
                f"{line['tokens_per_s']:,.0f} tokens/s ({against})",
            )
            text = f"{loss}, lr {line['lr']:.3g}, {speed}"
        if self._bar is not None and evaluated:
            self._bar.console.print(text)
        elif self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        due = evaluated or step == steps or step % self.about["show_every"] == 0
        if due and (self.config.log_to_console or self._bar is None):
            remaining = "" if evaluated else self._remaining(line)
            print(f"step {step}/{steps}: {text}{remaining}", file=sys.stderr)

    def _show_samples(self, line: JsonObject) -> None:
        for sample in line["samples"]:
            text = f"step {line['step']}: {json.dumps(sample['prompt'])} -> {json.dumps(sample['text'])}"
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr)

    def end(self, finished: "Finished") -> None:
        """Show the result of the run."""
        if self._bar is not None:
            self._bar.stop()
        if finished.signal:
            how = "the same command" if self.config.autoresume else "autoresume=true"
            print(
                f"{signal.Signals(finished.signal).name}: stopped after step {finished.steps:,}, "
                + (f"saved in {finished.saved}; {how} goes on from there" if finished.saved else NOT_SAVED)
            )
            return
        if finished.reason is not None:
            print(f"ended after step {finished.steps:,} by {finished.reason}")
        if math.isnan(finished.loss):
            if finished.reason is None:
                done = f"all {finished.steps:,} steps were" if finished.steps != 1 else "its step was"
                print(f"{finished.folder}: {done} done already")
            return
        several = len(finished.evaluations) > 1
        held_out = "".join(
            f", held-out loss{f' of {label}' if several else ''} {loss:.4f}"
            for label, loss in finished.evaluations.items()
        )
        print(
            f"{counted(finished.steps, 'step')}, loss {finished.loss:.4f}{held_out}, "
            f"{_memory(finished.folder)}{finished.folder}"
        )
        if finished.written:
            print(finished.written)

    def _remaining(self, line: JsonObject) -> str:
        """The time to the end of the run, at the speed of the last steps."""
        steps = self.about["steps"] - line["step"]
        seconds = steps * line.get("real", self.about["batch_tokens"]) / line["tokens_per_s"]
        return f", {datetime.timedelta(seconds=round(seconds))} left" if steps else ""


def _figures(line: JsonObject) -> str:
    return "".join(f", {name} {line[name]:.2f}" for name in line if name in FIGURES)


def _memory(folder: Path) -> str:
    """The memory that the run used, from its card."""
    memory = cards.read(str(folder))["memory"]
    predicted, measured = memory["predicted"], memory["measured"]
    if measured is None:
        return ""
    against = f" (predicted {human_bytes(predicted['total'])})" if predicted else ""
    return f"{human_bytes(measured)} of memory{against}, "


def _predicted_memory(memory: JsonObject, processes: int) -> str:
    """Say what is predicted beside what the machine has."""
    text = f"; {human_bytes(memory['predicted'])} of memory predicted{' for each' if processes > 1 else ''}"
    text += f" at {counted(memory['rows'], 'row')} at a time"
    free = memory.get("free")
    return text if free is None else f"{text}, {human_bytes(free)} are free"
