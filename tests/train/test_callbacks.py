"""Callbacks: what ends a run early, with what reason, and those of packages outside."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("torch", reason="training is torch")

from roofline.common import extensions  # noqa: E402
from roofline.common.errors import ConfigError, RooflineError, SaidElsewhere  # noqa: E402
from roofline.common.json_types import JsonMapping  # noqa: E402
from roofline.train.callback import Callback  # noqa: E402
from roofline.train.config import observers  # noqa: E402
from roofline.train.config.duration import DurationUnits  # noqa: E402
from roofline.train.config.observers import CallbacksSection, EarlyStopperSection, LossSpikeSection  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.run.callbacks import Callbacks, EarlyStopper, LossSpike  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.train.small import config, log_of, mapping, steps_of, write_rows  # noqa: E402


def stopper(patience: int, **options: Any) -> EarlyStopper:
    section = {"monitor": "LanguageCrossEntropy", "dataloader_label": "eval", **options}
    return EarlyStopper(EarlyStopperSection(**section), patience)


def end(stopper: EarlyStopper, losses: Sequence[float], every: int = 10) -> int | None:
    """The step at which evaluations with these losses end the run."""
    lines = ({"step": every * number, "eval_loss": loss} for number, loss in enumerate(losses, 1))
    return next((line["step"] for line in lines if stopper.evaluation(line)), None)


def test_early_stopping_waits_for_its_patience_behind_the_best() -> None:
    assert end(stopper(10), [3, 2, 2.5, 2.4, 2.3]) == 40
    assert end(stopper(20), [3, 2, 2.5, 2.4, 1.9]) is None
    assert end(stopper(0), [3, 2, 2]) == 30, "a value that is only as good is no better"
    assert end(stopper(10, min_delta=0.1), [3, 2.95, 2.92]) == 30
    assert end(stopper(10, monitor="LanguagePerplexity", comp="greater"), [2, 3, 2.9, 2.8]) == 40


def test_early_stopping_watches_what_it_names() -> None:
    on_train = stopper(1, dataloader_label="train")
    assert on_train.evaluation({"step": 1, "eval_loss": 1.0}) is None
    reasons = [on_train.step({"step": step, "loss": loss}) for step, loss in enumerate((3.0, 2.0, 2.5, 2.5), 1)]
    assert [bool(reason) for reason in reasons] == [False, False, False, True]
    assert "was best (2) at step 2" in str(reasons[-1])
    assert stopper(0).step({"step": 9, "loss": 9.0}) is None


def spike(losses: Sequence[float], **options: Any) -> str | None:
    callback = LossSpike(LossSpikeSection(**{"log_only": False, "window_size": 4, "patience": 1, **options}))
    try:
        for step, loss in enumerate(losses, 1):
            callback.step({"step": step, "loss": loss})
    except RooflineError as error:
        return str(error)
    return None


def test_a_spike_ends_a_run_when_it_lasts() -> None:
    assert spike([2, 2, 2, 2, 5, 2, 5, 2]) is None, "single outliers"
    assert spike([9, 2, 2, 2, 4, 4]) is None, "not above the mean of the window"
    message = spike([2, 2, 2, 2, 8, 8])
    assert message is not None
    assert "step 6" in message
    assert "autoresume=true" in message
    assert spike([2, 2, 2, 2, 8, 8], patience=2) is None
    assert "loss_cap=5" in str(spike([2, 6, 6, 6, 6], loss_cap=5, outlier_multiplier=9))


def test_a_loss_cap_looks_at_half_of_the_window() -> None:
    cap = {"loss_cap": 5, "outlier_multiplier": 9}
    assert spike([5, 5, 5, 5, 5, 5], **cap) is None, "not above the cap"
    assert spike([2, 2, 2, 2, 2, 6], **cap) is None, "one of four"
    assert "half of the last 4 losses" in str(spike([2, 2, 2, 2, 6, 6], **cap))
    assert spike([2, 2, 2, 2, 6], window_size=3, **cap) is None, "one of three"
    assert "half of the last 3 losses" in str(spike([2, 2, 2, 2, 6, 6], window_size=3, **cap))


def test_a_spike_only_warns_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert spike([2, 2, 2, 2, 8, 8], log_only=True) is None
    assert "step 6: the loss of 2 steps, now 8" in caplog.text


def test_a_run_ends_early_with_a_checkpoint_and_stays_ended(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", 30)
    changes: dict[str, Any] = {
        "eval_loader": {"dataset": {"local": str(data)}},
        "eval_interval": "2ba",
        "save_interval": "100ba",
        "optimizer__lr": 1e-9,
        "callbacks": {
            "early_stopper": {
                "monitor": "LanguageCrossEntropy",
                "dataloader_label": "eval",
                "min_delta": 0.1,
                "patience": "2ba",
            }
        },
    }
    finished = train(config(data, tmp_path / "run", **changes))
    assert finished.steps == 6
    assert str(finished.reason).startswith("callbacks.early_stopper: LanguageCrossEntropy of eval was best (")
    assert steps_of(tmp_path / "run" / "checkpoints") == [6]
    assert json.loads((tmp_path / "run" / "card.json").read_text())["ended_by"] == finished.reason
    assert "callbacks.early_stopper" in (tmp_path / "run" / "run.html").read_text()
    again = train(config(data, tmp_path / "run", autoresume=True, **changes))
    assert (again.steps, again.reason) == (6, finished.reason)
    changes["callbacks"]["early_stopper"]["patience"] = "4ba"
    assert train(config(data, tmp_path / "run", autoresume=True, **changes)).steps == 8


def test_early_stopping_without_an_evaluation_is_refused() -> None:
    section = {"early_stopper": {"monitor": "LanguageCrossEntropy", "dataloader_label": "eval"}}
    with pytest.raises(ConfigError, match=r"eval_loader is missing\n.*eval_interval is missing"):
        parse_config(mapping(Path("data"), Path("run"), callbacks=section))
    both = {"callbacks": section, "eval_loader": {}, "eval_interval": "2ba"}
    both["callbacks"] = {"early_stopper": {**section["early_stopper"], "dataloader_label": "other"}}
    with pytest.raises(ConfigError, match="dataloader_label=other is none of train, eval"):
        parse_config(mapping(Path("data"), Path("run"), **both))


class Talking(Callback):
    """Notes what it is told, ends the run where it is to."""

    notes: list[Any] = []  # noqa: RUF012

    def __init__(self, last: int = 0, fails: int = 0) -> None:
        self.last, self.fails = last, fails

    def earlier(self, lines: Sequence[JsonMapping]) -> None:
        self.notes.append([line["step"] for line in lines])

    def step(self, line: JsonMapping) -> str | None:
        self.notes.append(line["step"])
        if line["step"] == self.fails:
            raise ValueError("out of words")
        return "enough" if line["step"] == self.last else None

    def close(self) -> None:
        self.notes.append("closed")


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(observers, "_makers", {})
    monkeypatch.setattr(Talking, "notes", [])
    observers.register("talking", Talking)
    return Talking.notes


def test_a_callback_of_ones_own(talking: list[Any], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", 30)
    changes = {"callbacks": {"talking": {"last": 3}, "lr_monitor": {}}, "save_interval": "100ba"}
    settings = config(data, tmp_path / "run", **changes)
    assert parse_config(settings.model_dump(mode="json")) == settings
    finished = train(settings)
    assert (finished.steps, finished.reason) == (3, "callbacks.talking: enough")
    assert talking == [1, 2, 3, "closed"]
    talking.clear()
    again = config(data, tmp_path / "run", autoresume=True, callbacks={"talking": None}, max_duration="5ba")
    assert train(again).steps == 5
    assert talking == [[1, 2, 3], 4, 5, "closed"]


def test_a_callback_that_fails_ends_the_run_with_its_name(talking: list[Any], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", 30)
    with pytest.raises(RooflineError, match=r"^callbacks\.talking: ValueError: out of words$"):
        train(config(data, tmp_path / "run", callbacks={"talking": {"fails": 2}}))
    assert talking == [1, 2, "closed"]
    assert len(log_of(tmp_path / "run")) == 2
    with pytest.raises(RooflineError, match=r"callbacks\.talking: TypeError: .*volume"):
        train(config(data, tmp_path / "other", callbacks={"talking": {"volume": 2}}))


def test_names_of_callbacks_are_checked(talking: list[Any]) -> None:
    for name in ("talking", "speed_monitor", "own"):
        with pytest.raises(ConfigError, match=f"'{name}' is already registered"):
            observers.register(name, Talking)
    with pytest.raises(ConfigError, match=r"unknown key callbacks\.talkin"):
        parse_config(mapping(Path("data"), Path("run"), callbacks={"talkin": {}}))
    with pytest.raises(ConfigError, match="registers a callback named 'talkin'; did you mean 'talking'"):
        parse_config(mapping(Path("data"), Path("run"), callbacks={"own": {"talkin": {}}}))


def test_other_processes_do_what_the_first_says(talking: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process has no callback of its own; reasons and errors come from the first one's exchange."""
    section, said = CallbacksSection(own={"talking": {"last": 1, "fails": 2}}), []

    def share(world: World, value: Any) -> Any:
        if world.rank == 0:
            said.append(value)
        return value if world.rank == 0 else said.pop(0)

    monkeypatch.setattr(World, "share", share)
    first, second = (Callbacks(section, DurationUnits(1, 1, 1), World(rank=rank, size=2)) for rank in (0, 1))
    assert [each.step({"step": 1}) for each in (first, second)] == ["callbacks.talking: enough"] * 2
    for each, kind in ((first, RooflineError), (second, SaidElsewhere)):
        with pytest.raises(RooflineError, match="out of words") as caught:
            each.step({"step": 2})
        assert type(caught.value) is kind, "a user sees it once"
    assert talking == [1, 2]


MODULE = """
from roofline.extend import Callback, register_callback


class Enough(Callback):
    def __init__(self, steps):
        self.steps = steps

    def step(self, line):
        return "that is enough" if line["step"] == self.steps else None


def register():
    register_callback("enough", Enough)
"""


def test_a_callback_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, info = tmp_path / "site", tmp_path / "site" / "outside_package-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "outside_callback.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[roofline.extensions]\nenough = outside_callback:register\n")
    monkeypatch.setattr(observers, "_makers", {})
    monkeypatch.setattr(extensions, "_loaded", {})
    monkeypatch.setattr(extensions, "_registered", [])
    monkeypatch.syspath_prepend(str(site))
    settings = config(write_rows(tmp_path / "data", 30), tmp_path / "run", callbacks={"enough": {"steps": 2}})
    Console(settings).end(finished := train(settings))
    assert finished.steps == 2
    assert "ended after step 2 by callbacks.enough: that is enough" in capsys.readouterr().out
    assert [(entry.kind, entry.name) for entry in extensions.registered()] == [("callback", "enough")]
    assert extensions.key() == "", "bundles do not depend on it"
