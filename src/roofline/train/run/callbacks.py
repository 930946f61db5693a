"""The callbacks of a run, ours and those of other packages, and how all processes agree on what they say."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from roofline.common import log
from roofline.common.errors import RooflineError, describe_error
from roofline.common.json_types import JsonMapping
from roofline.train.callback import Callback
from roofline.train.config.duration import DurationUnits, batches
from roofline.train.config.observers import CallbacksSection, EarlyStopperSection, LossSpikeSection, own_callback
from roofline.train.parallel.processes import World
from roofline.train.run_folder import LOG, read_lines

_log = log.get("train")


class EarlyStopper(Callback):
    """Ends the run when a loss has been without a new best value for more than `patience` batches."""

    def __init__(self, section: EarlyStopperSection, patience: int) -> None:
        self.section, self.patience = section, patience
        self._best, self._best_step = math.nan, 0

    def earlier(self, lines: Sequence[JsonMapping]) -> str | None:
        return [None, *map(self._judge, lines)][-1]

    def step(self, line: JsonMapping) -> str | None:
        return self._judge(line)

    def evaluation(self, line: JsonMapping) -> str | None:
        return self._judge(line)

    def _judge(self, line: JsonMapping) -> str | None:
        """The reason to stop after this line, if it has the figure that is watched."""
        section, on_train = self.section, self.section.dataloader_label == "train"
        value = line.get("loss" if on_train else "eval_loss")
        if value is None or (not on_train and line.get("label", "eval") != section.label):
            return None
        if section.monitor == "LanguagePerplexity":
            value = math.exp(min(value, 700.0))
        gain = self._best - value if section.comp == "less" else value - self._best
        if math.isnan(self._best) or gain > section.min_delta:
            self._best, self._best_step = value, line["step"]
        elif line["step"] - self._best_step > self.patience:
            return (
                f"{section.monitor} of {section.dataloader_label} was best ({self._best:.4g}) at step {self._best_step}"
            )
        return None


class LossSpike(Callback):
    """Ends the run, or warns, when the loss stays far above its mean of the last steps, or above a limit."""

    def __init__(self, section: LossSpikeSection) -> None:
        self.section = section
        self._window: deque[float] = deque(maxlen=section.window_size)
        self._outliers = 0

    def earlier(self, lines: Sequence[JsonMapping]) -> str | None:
        for line in lines:
            if line.get("loss") is not None:
                self._judge(line["loss"])
        return None

    def step(self, line: JsonMapping) -> str | None:
        spike = self._judge(line["loss"])
        if spike is None:
            return None
        text = f"step {line['step']}: {spike}"
        if not self.section.log_only:
            raise RooflineError(
                f"callbacks.killlossspike, {text}. Lower optimizer.lr or leave out the data of these steps; "
                "autoresume=true goes on from the last checkpoint"
            )
        _log.warning("%s", text)
        return None

    def _judge(self, loss: float) -> str | None:
        """Return what is wrong with the losses up to this one."""
        window, section = self._window, self.section
        ready, mean = len(window) == section.window_size, sum(window) / max(1, len(window))
        self._outliers = self._outliers + 1 if ready and loss >= mean * section.outlier_multiplier else 0
        window.append(loss)
        if self._outliers > section.patience:
            times = f"{section.outlier_multiplier:g} times {mean:.4g}, the mean of the {section.window_size} before"
            return f"the loss of {self._outliers} steps, now {loss:.4g}, is above {times}"
        cap = section.loss_cap
        if ready and cap is not None and 2 * sum(seconds > cap for seconds in window) >= len(window):
            return f"half of the last {len(window)} losses are above loss_cap={cap:g}"
        return None


class Callbacks:
    """The configured callbacks: they are called in the first process, and every process does what comes of it."""

    def __init__(self, section: CallbacksSection, run: DurationUnits, world: World) -> None:
        self.section, self.world, self.units = section, world, run
        self.any = bool(section.own) or section.early_stopper is not None or section.killlossspike is not None
        self._callbacks: dict[str, Callback] = {}
        self._agree(self._make)

    def begin(self, folder: Path, step: int) -> str | None:
        """Show the lines of a run that goes on behind `step`, which the log has; a reason to stop, or None."""
        if not step:
            return None
        return self._agree(lambda: self._each(lambda callback: callback.earlier(self._lines(folder))))

    def step(self, line: JsonMapping) -> str | None:
        """Call the hooks of a step; the reason if the run is to stop. Raises RooflineError."""
        return self._agree(lambda: self._each(lambda callback: callback.step(line)))

    def evaluation(self, line: JsonMapping) -> str | None:
        """Call the hooks of an evaluation; the reason if the run is to stop. Raises RooflineError."""
        return self._agree(lambda: self._each(lambda callback: callback.evaluation(line)))

    def close(self) -> None:
        """Close all of them, even if one fails."""
        with ExitStack() as stack:
            for callback in self._callbacks.values():
                stack.callback(callback.close)

    def _make(self) -> None:
        stopper, spike = self.section.early_stopper, self.section.killlossspike
        if stopper is not None:
            patience = batches("callbacks.early_stopper.patience", stopper.patience, self.units)
            self._callbacks["early_stopper"] = EarlyStopper(stopper, patience)
        if spike is not None:
            self._callbacks["killlossspike"] = LossSpike(spike)
        for name, options in self.section.own.items():
            try:
                self._callbacks[name] = own_callback(name)(**options)
            except Exception as error:
                raise _of(name, error) from error

    def _each(self, hook: Callable[[Callback], str | None]) -> str | None:
        reasons = []
        for name, callback in self._callbacks.items():
            try:
                reason = hook(callback)
            except Exception as error:
                raise error if name not in self.section.own else _of(name, error) from error
            if reason:
                reasons.append(f"callbacks.{name}: {reason}")
        return "; ".join(reasons) or None

    def _agree(self, act: Callable[[], str | None]) -> str | None:
        """What `act` gives in the first process; what it raises there is raised in all."""
        if not self.any:
            return None
        return self.world.share(self.world.first(act))

    def _lines(self, folder: Path) -> list[JsonMapping]:
        return [line for line in read_lines(folder / LOG) if "step" in line]


def _of(name: str, error: Exception) -> RooflineError:
    """The error of a callback from another package, with its name."""
    return RooflineError(f"callbacks.{name}: {describe_error(error)}")
