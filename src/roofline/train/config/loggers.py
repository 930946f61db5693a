"""The `loggers` section of the configuration: the options of TensorBoard, Weights & Biases and MLflow, checked."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Logger(BaseModel):
    """Options of one logger; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank_zero_only: Literal[True] = True


class TensorboardLogger(Logger):
    """log_dir: default RUN_FOLDER/tensorboard; flush_interval: seconds between writes at the most."""

    log_dir: str | None = None
    flush_interval: Annotated[int, Field(ge=1)] = 120


class WandbLogger(Logger):
    """Options of wandb.init. name: default the run's; dir: default the run's folder; id: of a run to continue."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    dir: str | None = None
    id: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    log_artifacts: Literal[False] = False


class MlflowLogger(Logger):
    """tracking_uri: default MLflow's own; experiment_name; run_name: default the run's; flush_interval: seconds."""

    tracking_uri: str | None = None
    experiment_name: str = "roofline"
    run_name: str | None = None
    tags: dict[str, str] = {}
    flush_interval: Annotated[float, Field(ge=0)] = 10
    log_system_metrics: Literal[False] = False


class LoggersSection(BaseModel):
    """Each logger that has a section gets every number of the log; null: it is not used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: TensorboardLogger | None = None
    wandb: WandbLogger | None = None
    mlflow: MlflowLogger | None = None
