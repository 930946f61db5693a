"""Several evaluation loaders: each has a label in the log, the card, on the page and for callbacks."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint import manifest  # noqa: E402
from roofline.train.config.observers import LoggersSection  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.report.loggers import Loggers  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.storage.open import open_store  # noqa: E402
from tests.train.small import config, log_of, mapping, write_rows  # noqa: E402

STOPPER = {"monitor": "LanguageCrossEntropy", "patience": "1ba", "min_delta": 9}


def loaders(tmp_path: Path) -> dict[str, Any]:
    near, far = write_rows(tmp_path / "near", 13, seed=1), write_rows(tmp_path / "far", 7, seed=2)
    sections = [{"label": "near", "dataset": {"local": str(near)}}, {"label": "far.1", "dataset": {"local": str(far)}}]
    return {"eval_loader": sections, "eval_interval": "2ba", "max_duration": "4ba"}


def test_each_loader_is_evaluated_under_its_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, several = write_rows(tmp_path / "data", 30), loaders(tmp_path)
    settings = config(data, tmp_path / "run", **several)
    assert parse_config(settings.model_dump(mode="json")) == settings
    console = Console(settings)
    console.end(finished := train(settings, console.show))
    lines = [line for line in log_of(tmp_path / "run") if "eval_loss" in line]
    assert [(line["step"], line["label"], line["eval_tokens"]) for line in lines] == [
        (2, "near", 13 * 15), (2, "far.1", 7 * 15), (4, "near", 13 * 15), (4, "far.1", 7 * 15),
    ]  # fmt: skip
    for label, section in zip(("near", "far.1"), several["eval_loader"], strict=True):
        one = {**several, "eval_loader": {"dataset": section["dataset"]}}
        alone = train(config(data, tmp_path / label, **one)).evaluations
        assert list(alone) == ["eval"]
        assert alone["eval"] == finished.evaluations[label] == lines[-1 if label == "far.1" else -2]["eval_loss"]
        assert all("label" not in line for line in log_of(tmp_path / label))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert {label: each["loss"] for label, each in card["evaluations"].items()} == finished.evaluations
    page = (tmp_path / "run" / "run.html").read_text()
    assert '"eval_loss near":[[2,' in page
    assert "held-out loss, far.1" in page
    shown = capsys.readouterr()
    assert f"held-out loss of far.1 {finished.evaluations['far.1']:.4f}" in shown.out
    assert "held-out loss of near" in shown.err


def test_other_loggers_get_them_by_label(tmp_path: Path) -> None:
    put: list[Any] = []

    class Sink:
        id = None

        def put(self, step: int, numbers: dict[str, float]) -> None:
            put.append((step, numbers))

    sinks = Loggers(config(tmp_path, tmp_path, loggers=LoggersSection().model_dump()), tmp_path, 0)
    sinks._sinks["fake"] = Sink()  # type: ignore[assignment]
    sinks.put({"step": 3, "label": "near", "eval_loss": 2.0})
    sinks.put({"step": 3, "eval_loss": 2.0})
    assert put == [(3, {"eval/near/loss": 2.0}), (3, {"eval/loss": 2.0})]


@pytest.mark.parametrize("label", ["far.1", "eval/far.1"])
def test_a_callback_watches_one_of_them(tmp_path: Path, label: str) -> None:
    changes = loaders(tmp_path) | {"max_duration": "9ba", "callbacks": {}}
    changes["callbacks"]["early_stopper"] = {**STOPPER, "dataloader_label": label}
    finished = train(config(write_rows(tmp_path / "data", 30), tmp_path / "run", **changes))
    assert finished.steps == 4
    assert f"LanguageCrossEntropy of {label} was best" in str(finished.reason)
    assert set(finished.evaluations) == {"near", "far.1"}


def test_a_data_set_that_was_swapped_is_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    """By the rows themselves where the index is the same; under another label it is another evaluation."""
    data, changes = write_rows(tmp_path / "data", 30), loaders(tmp_path) | {"save_interval": "2ba", "autoresume": True}
    train(config(data, tmp_path / "run", **changes | {"max_duration": "2ba"}))
    near, far = changes["eval_loader"]
    same, more = (write_rows(tmp_path / name, rows, seed=9) for name, rows in (("same", 13), ("more", 14)))
    assert (same / "index.json").read_bytes() == (tmp_path / "near" / "index.json").read_bytes()
    for other, what in ((same, "rows"), (more, "shards")):
        changed = {**near, "dataset": {"local": str(other)}}
        with pytest.raises(
            ConfigError, match=f"^the eval_loader labelled near has other {what} than in the checkpoint"
        ):
            train(config(data, tmp_path / "run", **changes | {"eval_loader": [changed, far]}))
    renamed = {"label": "new", "dataset": {"local": str(same)}}
    assert list(train(config(data, tmp_path / "run", **changes | {"eval_loader": [renamed, far]})).evaluations) == [
        "new",
        "far.1",
    ]
    facts = manifest.facts(open_store(tmp_path / "run" / "checkpoints"), 4)
    assert list(facts["evaluations"]) == ["new", "far.1"]
    stored = manifest.read(open_store(tmp_path / "run" / "checkpoints"), 4)
    del stored["facts"]["evaluations"]  # as older versions wrote it
    place = tmp_path / "run" / "checkpoints" / "step-00000004" / manifest.MANIFEST
    place.write_bytes(manifest.encode(4, stored["facts"], stored["tensors"]))
    assert train(config(data, tmp_path / "run", **changes | {"max_duration": "5ba"})).steps == 5


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([{"label": "a"}, {}], "each of several needs a label of its own"),
        ([{"label": "a"}, {"label": "a"}], "each of several needs a label of its own"),
        ([], "each of several needs a label of its own"),
        ([{"label": "a/b"}], r"^configuration: eval_loader\.0\.label = a/b: string should match pattern"),
        ([{"label": "a", "datasett": {}}], r"unknown key eval_loader\.0\.datasett; did you mean 'dataset'\?$"),
        ({"datasett": {}}, r"^configuration: unknown key eval_loader\.datasett; did you mean 'dataset'\?$"),
    ],
)
def test_labels_and_keys_are_checked(sections: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(mapping(Path("data"), Path("run"), eval_loader=sections))
