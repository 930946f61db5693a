"""Other loggers: every number reaches them, what they lack is said before training, and none ends a run."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.report import loggers  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.run.preflight import faults  # noqa: E402
from tests.judges import require  # noqa: E402
from tests.train.small import config, mapping, write_rows  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train", 50)


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


def test_the_error_of_a_logger_is_one_line() -> None:
    assert loggers._one_line(ValueError("no\n access ")) == "no access"
    assert loggers._one_line(ValueError("x" * 400)) == "x" * 300
    assert loggers._one_line(ValueError()) == "ValueError"


def test_a_logger_that_cannot_start_is_said(data: Path, tmp_path: Path, wandb: list[FakeRun]) -> None:
    with pytest.raises(ConfigError, match=r"^loggers\.wandb cannot start: no access to forbidden$"):
        train(config(data, tmp_path, loggers={"wandb": {"project": "forbidden"}}))
    assert not (tmp_path / "card.json").exists()


def test_mlflow_is_told_what_works(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow-skinny alone reaches a server, and cannot keep runs on this machine."""

    def broken(*_: object) -> None:
        raise RuntimeError("Model registry functionality is unavailable")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(loggers, "find_spec", lambda name: object())
    monkeypatch.setattr(loggers, "Mlflow", broken)
    near, far = {"mlflow": {}}, {"mlflow": {"tracking_uri": "http://somewhere:5000"}}
    with pytest.raises(
        ConfigError, match=r"unavailable\. MLflow keeps runs .*: pip install mlflow, or set tracking_uri"
    ):
        train(config(data, tmp_path / "a", loggers=near))
    with pytest.raises(ConfigError, match=r"functionality is unavailable$"):
        train(config(data, tmp_path / "b", loggers=far))
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    for section, package in ((near, "mlflow"), (far, "mlflow-skinny")):
        with pytest.raises(ConfigError, match=rf"pip install {package}\.$"):
            train(config(data, tmp_path / "c", loggers=section))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://somewhere")
    with pytest.raises(ConfigError, match=r"pip install mlflow-skinny\.$"):
        train(config(data, tmp_path / "c", loggers=near))


@pytest.mark.parametrize("name", loggers.PACKAGES)
def test_a_missing_package_is_said_first(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda asked: None)
    package = loggers.PACKAGES[name]
    with pytest.raises(ConfigError, match=rf"loggers\.{name} .* {package} is not installed.*pip install {package}"):
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
    require("tensorboard")
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
    require("mlflow")
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


class FakeWriter:
    """What we call of torch's SummaryWriter, written down."""

    made: list["FakeWriter"]

    def __init__(self, place: str, **options: Any) -> None:
        self.place, self.options, self.calls = place, options, list[tuple[Any, ...]]()
        self.made.append(self)

    def add_text(self, *given: Any) -> None:
        self.calls.append(given)

    def add_scalar(self, *given: Any) -> None:
        self.calls.append(given)

    def close(self) -> None:
        self.calls.append(("close",))


def test_tensorboard_is_told_where_a_run_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWriter.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=FakeWriter))
    monkeypatch.setattr(loggers, "find_spec", lambda name: object())
    sections = {"log_dir": "elsewhere", "flush_interval": 9}, {}
    for step, section in zip((0, 4), sections, strict=True):
        opened = loggers.Loggers(config(data, tmp_path, loggers={"tensorboard": section}), tmp_path, step)
        opened.put({"step": step + 1, "loss": 2.5})
        opened.close()
        opened.close()
    first, second = FakeWriter.made
    assert (first.place, first.options["flush_secs"], first.options["purge_step"]) == ("elsewhere", 9, None)
    assert (second.place, second.options["purge_step"]) == (str(tmp_path / "tensorboard"), 5)
    (name, text), *calls = first.calls
    assert name == "config"
    assert text.startswith("<pre>{\n ")
    assert calls == [("train/loss", 2.5, 1), ("close",)]
    assert second.calls == [("train/loss", 2.5, 5), ("close",)]


class FakeClient:
    """What we call of mlflow's client, written down; one experiment is there."""

    calls: list[tuple[Any, ...]]

    def __init__(self, uri: str | None) -> None:
        self.calls.append(("client", uri))

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if name == "there" else None

    def create_experiment(self, name: str) -> str:
        return f"new {name}"

    def create_run(self, experiment: str, **options: Any) -> Any:
        self.calls.append(("run", experiment, options["run_name"], options["tags"]))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, *given: Any) -> None:
        self.calls.append(("update", *given))

    def log_param(self, run: str, name: str, value: str) -> None:
        self.calls.append(("param", run, name, value))

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        self.calls.append(("batch", run, *metrics))

    def set_terminated(self, run: str) -> None:
        self.calls.append(("end", run))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of an mlflow of ours."""
    FakeClient.calls = []
    entities = SimpleNamespace(Metric=lambda name, value, now, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeClient))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(loggers, "find_spec", lambda name: object())
    return FakeClient.calls


def test_mlflow_gets_a_run_and_its_settings(
    data: Path, tmp_path: Path, mlflow: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"tracking_uri": "http://m", "experiment_name": "there", "run_name": "mine", "tags": {"a": "b"}}
    long = config(data, tmp_path / ("d" * 200) / ("e" * 200) / ("f" * 200), loggers={"mlflow": section})
    loggers.Loggers(long, tmp_path, 0).close()
    assert mlflow[:2] == [("client", "http://m"), ("run", "7", "mine", {"a": "b"})]
    settings = {call[2]: call[3] for call in mlflow if call[0] == "param"}
    assert settings["optimizer.name"] == "adamw"
    assert "None" not in settings.values()
    assert len(settings["run_folder"]) == 500
    assert mlflow[-1] == ("end", "r1")
    assert json.loads((tmp_path / loggers.IDS).read_text()) == {"mlflow": "r1"}
    mlflow.clear()
    loggers.Loggers(long, tmp_path, 3).close()
    assert mlflow == [("client", "http://m"), ("update", "r1", "RUNNING"), ("end", "r1")]
    mlflow.clear()
    other = config(
        data, tmp_path, run_name="of the run", loggers={"mlflow": section | {"experiment_name": "x", "run_name": None}}
    )
    loggers.Loggers(other, tmp_path, 0).close()
    assert mlflow[1] == ("run", "new x", "of the run", {"a": "b"})


def test_mlflow_s_numbers_travel_together(
    data: Path, tmp_path: Path, mlflow: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    section = {"tracking_uri": "http://m", "flush_interval": 10.0}
    opened = loggers.Loggers(config(data, tmp_path, loggers={"mlflow": section}), tmp_path, 0)
    mlflow.clear()
    for step, at in enumerate((101.0, 109.9, 110.0, 119.9, 120.0), 1):
        now[0] = at
        opened.put({"step": step, "loss": float(step)})
    assert mlflow == [
        ("batch", "r1", *(("train/loss", float(step), step) for step in steps)) for steps in ((1, 2, 3), (4, 5))
    ]
    mlflow.clear()
    opened.put({"step": 6} | {f"n{i}": 1.0 for i in range(2001)})
    opened.close()
    assert [len(call) - 2 for call in mlflow if call[0] == "batch"] == [1000, 1000, 1]
    assert mlflow[-1] == ("end", "r1")


def test_a_missing_package_is_among_the_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping(tmp_path, tmp_path / "run", loggers={"tensorboard": {}, "mlflow": {}}), further=faults)
    lines = str(caught.value).split("\n  ")
    for name in ("tensorboard", "mlflow"):
        expected = f"configuration: loggers.{name} is not supported: the package {name} is not installed. Use instead: "
        assert f"{expected}pip install {name}." in lines
    assert any(line.startswith("configuration: train_loader.dataset") for line in lines)
