"""Other loggers: every number reaches them, what they lack is said before training, and none ends a run."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.train.report import loggers  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.train.small import config, write_rows  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train", 50)


def needed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


class FakeRun:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.logged, self.finished = given, list[dict[str, Any]](), False
        self.id = given.get("id") or "run-1"
        self.fails_at: int | None = None

    def log(self, numbers: dict[str, Any]) -> None:
        if self.fails_at is not None and len(self.logged) >= self.fails_at:
            raise ConnectionError("the server\nis gone")
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A wandb of ours: the runs that it was asked for."""
    runs: list[FakeRun] = []

    def init(**given: Any) -> FakeRun:
        if given.get("project") == "forbidden":
            raise PermissionError("no access to\nforbidden")
        runs.append(FakeRun(given))
        return runs[-1]

    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(loggers, "find_spec", lambda name: name == "wandb" or importlib.util.find_spec(name))
    return runs


def test_wandb_gets_every_number(data: Path, tmp_path: Path, wandb: list[FakeRun]) -> None:
    lines: list[dict[str, Any]] = []
    made = config(
        data,
        tmp_path,
        max_duration="6ba",
        run_name="mine",
        eval_loader={"dataset": {"local": str(data)}},
        eval_interval="3ba",
        loggers={"wandb": {"project": "p", "tags": ["a", "b"]}},
    )
    train(made, lines.append)
    (run,) = wandb
    assert (run.given["project"], run.given["name"], run.given["tags"]) == ("p", "mine", ["a", "b"])
    assert run.given["config"]["model"]["d_model"] == 32
    assert "entity" not in run.given
    assert run.finished
    steps = [line for line in lines[1:] if "loss" in line]
    trained = [found for found in run.logged if "train/loss" in found]
    assert [(f["step"], f["train/loss"], f["train/lr"]) for f in trained] == [
        (s["step"], s["loss"], s["lr"]) for s in steps
    ]
    assert set(trained[0]) == {"step", *(f"train/{key}" for key in steps[0] if key != "step")}
    held = [found for found in run.logged if "eval/loss" in found]
    assert [found["step"] for found in held] == [3, 6]
    assert set(held[0]) == {"step", "eval/loss", "eval/perplexity", "eval/tokens", "eval/seconds"}


def test_a_run_that_goes_on_stays_one_run(data: Path, tmp_path: Path, wandb: list[FakeRun]) -> None:
    common: dict[str, Any] = {"save_interval": "1dur", "autoresume": True, "max_duration": "6ba"}
    train(config(data, tmp_path, **common, stop_after="2ba", loggers={"wandb": {"id": "abc"}}))
    train(config(data, tmp_path, **common, loggers={"wandb": {}}))
    assert [run.given.get("id") for run in wandb] == ["abc", "abc"]
    assert wandb[1].given["resume"] == "allow"
    assert [found["step"] for found in wandb[1].logged] == [3, 4, 5, 6]
    train(config(data, tmp_path / "other", max_duration="1ba", loggers={"wandb": {}}))
    assert "id" not in wandb[2].given


def test_a_logger_that_fails_later_ends_nothing(
    data: Path, tmp_path: Path, wandb: list[FakeRun], caplog: pytest.LogCaptureFixture
) -> None:
    def watch(line: dict[str, Any]) -> None:
        if "about" in line:
            wandb[0].fails_at = 2

    finished = train(config(data, tmp_path, max_duration="5ba", loggers={"wandb": {}}), watch)
    assert (finished.steps, len(wandb[0].logged)) == (5, 2)
    assert [record.message for record in caplog.records if "loggers" in record.message] == [
        "loggers.wandb failed and is left out from here on: the server is gone"
    ]


def test_a_logger_that_cannot_start_is_said(data: Path, tmp_path: Path, wandb: list[FakeRun]) -> None:
    with pytest.raises(ConfigError, match=r"^loggers\.wandb cannot start: no access to forbidden$"):
        train(config(data, tmp_path, loggers={"wandb": {"project": "forbidden"}}))
    assert not (tmp_path / "card.json").exists()


@pytest.mark.parametrize("name", loggers.PACKAGES)
def test_a_missing_package_is_said_first(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda asked: None)
    package = loggers.PACKAGES[name]
    with pytest.raises(
        UnsupportedError, match=rf"loggers\.{name} .* {package} is not installed.*pip install {package}"
    ):
        train(config(data, tmp_path / "run", loggers={name: {}}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wandb": {"projekt": "p"}}, "unknown key loggers.wandb.projekt; did you mean 'project'"),
        ({"tensorboard": {"log_dir": 3}}, "loggers.tensorboard.log_dir = 3: input should be a valid string"),
        ({"mlflow": {"log_system_metrics": True}}, "loggers.mlflow.log_system_metrics = True: input should be False"),
        ({"tensorboard": {"flush_interval": 0}}, "loggers.tensorboard.flush_interval = 0: "),
    ],
)
def test_options_are_checked(given: dict[str, Any], said: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config(data, tmp_path, loggers=given)
    assert said in str(refused.value)


def test_what_is_no_number_goes_to_none(data: Path, tmp_path: Path, wandb: list[FakeRun]) -> None:
    made = config(data, tmp_path, loggers={"wandb": {}})
    opened = loggers.Loggers(made, tmp_path, 0)
    opened.put({"about": {"steps": 3}})
    opened.put({"step": 1, "loss": math.inf, "lr": 0.5, "microbatch": 3, "note": "x"})
    opened.close()
    assert wandb[0].logged == [{"step": 1, "train/lr": 0.5, "train/microbatch": 3.0}]
    assert json.loads((tmp_path / loggers.IDS).read_text()) == {"wandb": "run-1"}


def test_tensorboard_shows_the_run(data: Path, tmp_path: Path) -> None:
    needed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    common: dict[str, Any] = {"save_interval": "2ba", "autoresume": True, "max_duration": "6ba"}
    common |= {"loggers": {"tensorboard": {}}, "eval_loader": {"dataset": {"local": str(data)}}, "eval_interval": "3ba"}
    train(config(data, tmp_path, **common, stop_after="4ba"))
    lines: list[dict[str, Any]] = []
    train(config(data, tmp_path, **common), lines.append)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = found.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 7))
    assert losses[-1].value == pytest.approx(next(line["loss"] for line in lines if line.get("step") == 6))
    assert [event.step for event in found.Scalars("eval/perplexity")] == [3, 4, 6]
    assert "config/text_summary" in found.Tags()["tensors"]


def test_mlflow_shows_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its newest versions want a database, which needs more of it
    place = (tmp_path / "mlruns").as_uri()
    section = {"tracking_uri": place, "experiment_name": "e", "tags": {"who": "us"}, "flush_interval": 0.0}
    common: dict[str, Any] = {"save_interval": "2ba", "autoresume": True, "max_duration": "4ba"}
    common |= {"loggers": {"mlflow": section}, "run_name": "mine"}
    train(config(data, tmp_path / "run", **common, stop_after="2ba"))
    lines: list[dict[str, Any]] = []
    train(config(data, tmp_path / "run", **common), lines.append)
    client = MlflowClient(place)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("mine", "FINISHED", "us")
    assert run.data.params["optimizer.name"] == "adamw"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert history[-1].value == pytest.approx(next(line["loss"] for line in lines if line.get("step") == 4))
