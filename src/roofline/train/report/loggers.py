"""Loggers of others: TensorBoard, Weights & Biases, MLflow. Each gets every number that the log gets.

The log in the run's folder is what counts: a logger that fails while a run goes on is left out with a warning. One that
cannot start ends the run before its first step.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from roofline.common import log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.config.loggers import LoggersSection, MlflowLogger, TensorboardLogger, WandbLogger
from roofline.train.config.schema import TrainConfig

IDS = "loggers.json"  # in the run's folder: the runs of others that belong to it
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_log = log.get("train")


class Sink(Protocol):
    """Takes numbers by name."""

    id: str | None

    def put(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check(section: LoggersSection) -> None:
    """Raises UnsupportedError for a logger whose package is not installed."""
    for name, package in PACKAGES.items():
        if getattr(section, name) is not None and find_spec(name) is None:
            what = f"loggers.{name}"
            raise UnsupportedError(what, f"the package {package} is not installed", [f"pip install {package}"])


class Loggers:
    """Those of a configuration, opened for a run that goes on behind `step`; rank 0 has them.

    Raises ConfigError: one cannot start.
    """

    def __init__(self, config: TrainConfig, folder: Path, step: int) -> None:
        known = _ids(folder) if step else {}
        self._sinks: dict[str, Sink] = {}
        makers: JsonObject = {"tensorboard": Tensorboard, "wandb": Wandb, "mlflow": Mlflow}
        for name, make in makers.items():
            section = getattr(config.loggers, name)
            if section is None:
                continue
            try:
                self._sinks[name] = make(section, config, folder, step, known.get(name))
            except Exception as error:  # of a package that may raise anything
                self.close()
                raise ConfigError(f"loggers.{name} cannot start: {_said(error)}") from error
        ids = {name: sink.id for name, sink in self._sinks.items() if sink.id is not None}
        if ids:
            write_atomically(folder / IDS, json.dumps(ids) + "\n")

    def put(self, line: JsonMapping) -> None:
        """A line of the log, as numbers train/NAME or eval/NAME of its step; one without a step has none."""
        if "step" not in line:
            return
        kind = "eval" if "eval_loss" in line else "train"
        numbers = {
            f"{kind}/{key.removeprefix('eval_')}": float(value)
            for key, value in line.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, sink in list(self._sinks.items()):
            self._tried(name, partial(sink.put, line["step"], numbers))

    def close(self) -> None:
        """Send what waits and end."""
        for name, sink in list(self._sinks.items()):
            self._tried(name, sink.close)
        self._sinks.clear()

    def _tried(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            del self._sinks[name]
            _log.warning("loggers.%s failed and is left out from here on: %s", name, _said(error))


class Tensorboard:
    """Events for TensorBoard."""

    id = None

    def __init__(self, section: TensorboardLogger, config: TrainConfig, folder: Path, step: int, _: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = section.log_dir or str(folder / "tensorboard")
        # What an earlier attempt wrote behind this step is not shown.
        self._writer: Any = SummaryWriter(
            place, flush_secs=section.flush_interval, purge_step=step + 1 if step else None
        )
        if not step:
            described = json.dumps(config.model_dump(mode="json"), indent=1)
            self._writer.add_text("config", f"<pre>{described}</pre>")

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, section: WandbLogger, config: TrainConfig, folder: Path, step: int, known: str | None) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        given = section.model_dump(exclude={"rank_zero_only", "log_artifacts"}, exclude_none=True)
        given |= {
            "name": section.name or config.run_name,
            "dir": section.dir or str(folder),
            "tags": list(section.tags),
        }
        run_id = section.id or known
        given |= {"id": run_id, "resume": "allow"} if run_id else {}
        self._run: Any = wandb.init(config=config.model_dump(mode="json"), **given)
        self.id: str | None = self._run.id

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        # Its own step would only go up: an evaluation belongs to a step whose numbers are there already.
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow; numbers wait for `flush_interval` seconds and travel together."""

    def __init__(self, section: MlflowLogger, config: TrainConfig, folder: Path, step: int, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, self._every = Metric, section.flush_interval
        self._client: Any = MlflowClient(section.tracking_uri)
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        if known is not None:
            self.id: str | None = known
            self._client.update_run(known, "RUNNING")
            return
        found = self._client.get_experiment_by_name(section.experiment_name)
        experiment = found.experiment_id if found else self._client.create_experiment(section.experiment_name)
        made = self._client.create_run(experiment, run_name=section.run_name or config.run_name, tags=section.tags)
        self.id = made.info.run_id
        for name, value in _flat(config.model_dump(mode="json")):
            self._client.log_param(self.id, name, value)

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in numbers.items()]
        if time.monotonic() - self._sent >= self._every:
            self._send()

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self.id)

    def _send(self) -> None:
        most = 1000  # of one call
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:most])
            del self._waiting[:most]
        self._sent = time.monotonic()


def _flat(given: JsonMapping, stem: str = "") -> list[tuple[str, str]]:
    """What is set, by names with dots; MLflow takes no longer values than these."""
    found = []
    for key, value in given.items():
        if isinstance(value, dict):
            found += _flat(value, f"{stem}{key}.")
        elif value is not None:
            found.append((f"{stem}{key}", str(value)[:500]))
    return found


def _ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
