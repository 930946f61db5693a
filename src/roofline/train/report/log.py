"""What a run writes down: a line of JSON for each step and each evaluation, always; other loggers where configured."""

import json
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.config.schema import TrainConfig
from roofline.train.parallel.processes import World
from roofline.train.report.loggers import Loggers

LOG = "log.jsonl"


class RunLog:
    """The log of a run; only rank 0 writes.

    A step's line: step (steps done), tokens (seen until then), loss (mean over the global batch's tokens, in nats), lr,
    grad_norm (before clipping), seconds and of them wait (for data), microbatch (rows), tokens_per_s (over the last
    steps of speed_monitor's window). An evaluation's: step, eval_loss, perplexity, eval_tokens, seconds. A number that
    is not finite is null in the file, whose last line says how much memory was predicted and taken.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        config: TrainConfig,
        watch: Callable[[JsonObject], None] | None,
    ) -> None:
        self.folder, self.watch, self.writes, self.config = folder, watch, world.rank == 0, config
        self._window: deque[tuple[float, int]] = deque(maxlen=config.callbacks.speed_monitor.window_size + 1)
        self._file: IO[str] | None = None
        self._loggers: Loggers | None = None

    def open(self, step: int, tokens: int) -> None:
        """Start writing behind `step`: later lines of an earlier attempt are dropped, those steps are taken again."""
        self._window.append((time.perf_counter(), tokens))
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LOG
        kept = [line for line in read(path) if line.get("step", 0) <= step] if path.exists() and step else []
        write_atomically(path, "".join(_text(line) for line in kept))
        self._loggers = Loggers(self.config, self.folder, step)
        self._file = path.open("a")

    def about(self, **facts: Any) -> None:
        """What the run is, for whoever watches; the file begins with it."""
        self._write({"about": facts})

    def step(self, **line: Any) -> None:
        """A step that was done."""
        self._window.append((time.perf_counter(), line["tokens"]))
        (begin, before), (end, after) = self._window[0], self._window[-1]
        self._write({**line, "tokens_per_s": (after - before) / (end - begin)})

    def evaluation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Held-out text was read."""
        line = {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "eval_tokens": tokens}
        self._write({"step": step, **line, "seconds": seconds})
        self.pause()

    def pause(self) -> None:
        """What was done since the last step was no step: speeds begin anew."""
        seen = self._window[-1][1]
        self._window.clear()
        self._window.append((time.perf_counter(), seen))

    def memory(self, found: JsonObject) -> None:
        """What was predicted and what was taken; for the file alone, whoever watches has seen steps."""
        if self._file is not None:
            self._file.write(_text({"memory": found}))

    def close(self) -> None:
        """Close the file, and other loggers."""
        if self._file is not None:
            self._file.close()
        if self._loggers is not None:
            self._loggers.close()

    def _write(self, line: JsonObject) -> None:
        if self._file is not None:
            self._file.write(_text(line))
            self._file.flush()
            if self._loggers is not None:
                self._loggers.put(line)
            if self.watch is not None:
                self.watch(line)


def _text(line: JsonObject) -> str:
    """A line of JSON, which has no word for infinity."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def read(path: Path) -> list[JsonObject]:
    """The lines of a log; one that a crash cut is left out."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines
