"""Writes the log of a run: a line of JSON for each step and each evaluation, also sent to configured loggers."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from roofline.common.json_types import JsonObject
from roofline.train.config.schema import TrainConfig
from roofline.train.parallel.processes import World
from roofline.train.report.loggers import Loggers
from roofline.train.run_folder import LOG, keep_lines


class RunLog:
    """The log of a run; only rank 0 writes it.

    The line of a step has: step (steps done), tokens (so far), loss (mean over the global batch's tokens, in nats), lr,
    grad_norm (before clipping), seconds, wait (for data, part of seconds), microbatch (rows), tokens_per_s (over
    speed_monitor's window), and for fine-tuning the tokens of the step: real, computed (with padding), trained. That of
    an evaluation: step, label (if its loader has one), eval_loss, perplexity, eval_tokens, seconds. That of samples:
    step, samples (each a prompt and the text after it), seconds. A number that is not finite is null in the file. The
    last line has the predicted and the measured memory.
    """

    def __init__(
        self, folder: Path, world: World, config: TrainConfig, watch: Callable[[JsonObject], None] | None
    ) -> None:
        self.folder, self.watch, self.writes, self.config = folder, watch, world.rank == 0, config
        self._window: deque[tuple[float, int]] = deque(maxlen=config.callbacks.speed_monitor.window_size + 1)
        self._file: IO[str] | None = None
        self._loggers: Loggers | None = None

    def open(self, step: int, tokens: int) -> None:
        """Start to write behind `step`; lines of later steps, from an earlier attempt, are dropped."""
        self._window.append((time.perf_counter(), tokens))
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        keep_lines(self.folder / LOG, step)
        self._loggers = Loggers(self.config, self.folder, step)
        self._file = (self.folder / LOG).open("a")

    def about(self, **facts: object) -> None:
        """Write the first line, which describes the run."""
        self._write({"about": facts})

    def step(self, step: int, tokens: int, **figures: object) -> JsonObject:
        """Write the line of a step, and return it."""
        self._window.append((time.perf_counter(), tokens))
        (begin, before), (end, after) = self._window[0], self._window[-1]
        return self._write(
            {"step": step, "tokens": tokens, **figures, "tokens_per_s": (after - before) / (end - begin)}
        )

    def evaluation(self, label: str | None, step: int, loss: float, tokens: int, seconds: float) -> JsonObject:
        """Write the line of an evaluation, and return it."""
        line: JsonObject = {"label": label} if label is not None else {}
        line |= {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "eval_tokens": tokens}
        written = self._write({"step": step, **line, "seconds": seconds})
        self.pause()
        return written

    def samples(self, step: int, texts: Sequence[tuple[str, str]], seconds: float) -> None:
        """Write the line of what the model wrote after each prompt."""
        answers = [{"prompt": prompt, "text": text} for prompt, text in texts]
        self._write({"step": step, "samples": answers, "seconds": seconds})
        self.pause()

    def pause(self) -> None:
        """Start to measure speeds anew: the time since the last step was spent on something else."""
        tokens = self._window[-1][1]
        self._window.clear()
        self._window.append((time.perf_counter(), tokens))

    def memory(self, memory: JsonObject) -> None:
        """Write the predicted and the measured memory, into the file only."""
        if self._file is not None:
            self._file.write(_text({"memory": memory}))

    def close(self) -> None:
        """Close the file, and other loggers."""
        if self._file is not None:
            self._file.close()
        if self._loggers is not None:
            self._loggers.close()

    def _write(self, line: JsonObject) -> JsonObject:
        if self._file is not None:
            self._file.write(_text(line))
            self._file.flush()
            if self._loggers is not None:
                self._loggers.put(line)
            if self.watch is not None:
                self.watch(line)
        return line


def _text(line: JsonObject) -> str:
    """A line of JSON, with null for what is not finite."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(plain, allow_nan=False) + "\n"
