"""Sends every number of the log to TensorBoard, Weights & Biases and MLflow.

The log in the run's folder is authoritative: a logger that fails during a run is dropped with a warning. A logger that
cannot start ends the run before its first step.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from roofline.common import env, log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonMapping
from roofline.train.config.flatten import flatten
from roofline.train.config.observers import LoggersSection, MlflowLogger, TensorboardLogger, WandbLogger
from roofline.train.config.schema import TrainConfig

IDS = "loggers.json"  # in the run's folder: the ids of its runs in other loggers
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
MLFLOW_REMEDY = (
    "MLflow keeps runs on this machine in a database, which the package mlflow has and mlflow-skinny has not: "
    "pip install mlflow, or set tracking_uri to the URL of a server"
)
_log = log.get("train")


class Sink(Protocol):
    """A logger. id: of the run there, to continue it."""

    id: str | None

    def put(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check(section: LoggersSection) -> None:
    """Raise UnsupportedError for a configured logger whose package is not installed."""
    for error in missing(section):
        raise error


def missing(section: LoggersSection) -> Iterator[UnsupportedError]:
    """The error of each configured logger whose package is not installed; `what` is its key."""
    for name, package in PACKAGES.items():
        if getattr(section, name) is not None and find_spec(name) is None:
            if section.mlflow is not None and name == "mlflow" and _is_server(section.mlflow.tracking_uri):
                package = "mlflow-skinny"
            what = f"loggers.{name}"
            yield UnsupportedError(what, f"the package {package} is not installed", [f"pip install {package}"])


class Loggers:
    """The configured loggers on rank 0, opened for a run that continues behind `step`.

    Raises ConfigError if one cannot start.
    """

    def __init__(self, config: TrainConfig, folder: Path, step: int) -> None:
        earlier_ids = _ids(folder) if step else {}
        self._sinks: dict[str, Sink] = {}
        makers: dict[str, Callable[..., Sink]] = {"tensorboard": Tensorboard, "wandb": Wandb, "mlflow": Mlflow}
        for name, make in makers.items():
            section = getattr(config.loggers, name)
            if section is None:
                continue
            try:
                self._sinks[name] = make(section, config, folder, step, earlier_ids.get(name))
            except Exception as error:  # the packages may raise anything
                self.close()
                remedy = f". {MLFLOW_REMEDY}" if name == "mlflow" and not _is_server(section.tracking_uri) else ""
                raise ConfigError(f"loggers.{name} cannot start: {_one_line(error)}{remedy}") from error
        ids = {name: sink.id for name, sink in self._sinks.items() if sink.id is not None}
        if ids:
            write_atomically(folder / IDS, json.dumps(ids) + "\n")

    def put(self, line: JsonMapping) -> None:
        """Send the numbers of a log line with a step, named train/NAME, eval/NAME or eval/LABEL/NAME."""
        if "step" not in line or "samples" in line:
            return
        kind = "/".join(["eval", line["label"]] if "label" in line else ["eval" if "eval_loss" in line else "train"])
        numbers = {
            f"{kind}/{key.removeprefix('eval_')}": float(value)
            for key, value in line.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, sink in list(self._sinks.items()):
            self._try(name, partial(sink.put, line["step"], numbers))

    def close(self) -> None:
        """Send waiting numbers and close the loggers."""
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)
        self._sinks.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            del self._sinks[name]
            _log.warning("loggers.%s failed and is left out from here on: %s", name, _one_line(error))


class Tensorboard:
    """Writes event files for TensorBoard."""

    id: str | None = None

    def __init__(self, section: TensorboardLogger, config: TrainConfig, folder: Path, step: int, _: object) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = section.log_dir or str(folder / "tensorboard")
        purge = step + 1 if step else None  # hides what an earlier attempt wrote behind this step
        self._writer = SummaryWriter(place, flush_secs=section.flush_interval, purge_step=purge)
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

    def __init__(self, section: WandbLogger, config: TrainConfig, folder: Path, step: int, run_id: str | None) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        options = section.model_dump(exclude={"rank_zero_only", "log_artifacts"}, exclude_none=True)
        options |= {"name": section.name or config.run_name, "dir": section.dir or str(folder)}
        options["tags"] = list(section.tags)
        run_id = section.id or run_id
        options |= {"id": run_id, "resume": "allow"} if run_id else {}
        self._run = wandb.init(config=config.model_dump(mode="json"), **options)
        self.id: str | None = self._run.id

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        # wandb's own step cannot go back, but an evaluation belongs to a step that has been logged already.
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow; numbers wait for `flush_interval` seconds and travel together."""

    def __init__(self, section: MlflowLogger, config: TrainConfig, folder: Path, step: int, run_id: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, self._interval = Metric, section.flush_interval
        self._client = MlflowClient(section.tracking_uri)
        self._waiting: list[Metric] = []
        self._sent = time.monotonic()
        if run_id is not None:
            self.id: str | None = run_id
            self._client.update_run(run_id, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(section.experiment_name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(section.experiment_name)
        run = self._client.create_run(number, run_name=section.run_name or config.run_name, tags=section.tags)
        self.id = run.info.run_id
        for name, value in flatten(config.model_dump(mode="json")):
            if value is not None:
                self._client.log_param(self.id, name, str(value)[:500])  # MLflow accepts no longer values

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in numbers.items()]
        if time.monotonic() - self._sent >= self._interval:
            self._send()

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self.id)

    def _send(self) -> None:
        max_points = 1000  # of one call
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:max_points])
            del self._waiting[:max_points]
        self._sent = time.monotonic()


def _ids(folder: Path) -> dict[str, str]:
    try:
        ids = json.loads((folder / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in ids.items() if isinstance(value, str)} if isinstance(ids, dict) else {}


def _is_server(uri: str | None) -> bool:
    """Whether runs go to a server, which mlflow-skinny reaches; without a URI, MLflow takes its variable's."""
    uri = uri or env.foreign("MLFLOW_TRACKING_URI") or ""
    return uri.startswith(("http:", "https:", "databricks"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
