"""`roofline parity`: what it prints, what it draws, and with which status it ends."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.command_line import call_roofline


def write(folder: Path, difference: float = 0.0, scatter: float = 0.002, steps: int = 160) -> Path:
    folder.mkdir()
    loss = 3 + 4 * np.exp(-np.arange(steps) / 40) + difference
    loss += scatter * np.random.default_rng(sum(folder.name.encode())).standard_normal(steps)
    lines = [{"step": step, "loss": float(value), "grad_norm": 1.0} for step, value in enumerate(loss, 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, difference, scatter in (("a", 0, 0), ("same", 0, 0), ("near", 0, 0.002), ("far", 0.5, 0.002)):
        write(tmp_path / name, difference, scatter)
    for name in ("again", "once-more"):
        write(tmp_path / name)
    return tmp_path


def said(*words: object) -> tuple[int, str]:
    result = call_roofline(["parity", *map(str, words)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("name", "options", "code", "verdict"),
    [
        ("same", (), 0, "identical: all losses and gradient norms of the 160 common steps"),
        ("near", (), 0, "equivalent: over 160 common steps B's loss less A's is"),
        ("near", ("--margin", "0.00001"), 1, "undecided: "),
        ("far", (), 1, "different: B's loss less A's is +0.5"),
        ("far", ("--margin", "1"), 0, "equivalent: "),
    ],
)
def test_the_status_says_whether_it_is_the_same_run(
    runs: Path, name: str, options: tuple[str, ...], code: int, verdict: str
) -> None:
    status, text = said(runs / "a", runs / name, *options)
    assert (status, text[: len(verdict)]) == (code, verdict)


def test_all_that_is_known_is_printed(runs: Path) -> None:
    legs = {"legs": [{"name": "cpu", "from": 0, "to": 80}, {"name": "2 processes", "from": 80, "to": 160}]}
    (runs / "near" / "relay.json").write_text(json.dumps(legs))
    status, text = said(runs / "a", runs / "near", "--repeat", runs / "again", "--repeat", runs / "once-more")
    assert status == 0
    for part in (
        "160 in common, 1 to 160",
        "nats on average, standard error",
        "over the last quarter",
        "(3 pairs)",
        "hand-over to 2 processes: ",
        "gradient norm  +0.00% on average",
        "one of the runs has no order receipts",
        "layers were not compared",
    ):
        assert part in text
    status, text = said(runs / "a", runs / "near", "--handover", 40, "--handover", 120)
    assert ("step 40" in text, "step 80" in text, "step 120" in text) == (True, True, True)
    assert max(map(len, text.splitlines()[1:])) < 120


def test_one_json_object(runs: Path) -> None:
    status, text = said(runs / "a", runs / "near", "--json", "--repeat", runs / "again")
    found = json.loads(text)
    assert status == 0
    assert (found["verdict"], found["equal"], found["steps"], found["margin"]) == ("equivalent", True, 160, 0.01)
    assert found["loss"]["mean"]["low"] < found["loss"]["mean"]["mean"] < found["loss"]["mean"]["high"]
    assert (found["noise"]["pairs"], found["layers"], found["samples"]) == (1, None, None)
    status, text = said(runs / "a", runs / "far", "--json")
    assert (status, json.loads(text)["verdict"], json.loads(text)["equal"]) == (1, "different", False)


def test_the_picture_is_a_file_that_browsers_read(runs: Path) -> None:
    (runs / "near" / "relay.json").write_text(
        '{"legs": [{"name": "x", "from": 0}, {"name": "<gpu> & co", "from": 70}]}'
    )
    status, text = said(runs / "a", runs / "near", "--repeat", runs / "again", "-o", runs / "out.svg")
    assert status == 0
    assert f"drawn in {runs / 'out.svg'}" in text
    drawn = (runs / "out.svg").read_text()
    root = ElementTree.fromstring(drawn)
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    for wanted in ("A a", "B near", "equivalent: a and near", "<gpu> & co", "margin", "95 % of repeats", "step", "160"):
        assert wanted in texts
    names = [node.get("class") for node in root.iter()]
    assert (names.count("hand"), names.count("line b"), names.count("nf")) == (2, 2, 2)  # both panels; line and legend
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    assert "nan" not in drawn
    assert "prefers-color-scheme:dark" in drawn
    width, height = (float(root.get(side) or 0) for side in ("width", "height"))
    for node in root.iter():
        if node.tag.endswith("}text") and node.get("x"):
            assert 0 <= float(node.get("x") or 0) <= width
            assert 0 <= float(node.get("y") or 0) <= height


@pytest.mark.parametrize("steps", [1, 2, 50, 3000])
def test_runs_of_any_length_are_drawn(tmp_path: Path, steps: int) -> None:
    a, b = write(tmp_path / "a", steps=steps), write(tmp_path / "b", steps=steps)
    text = (b / "log.jsonl").read_text().replace('"grad_norm": 1.0', '"grad_norm": Infinity', 1)
    (b / "log.jsonl").write_text(text + json.dumps({"step": steps + 1, "loss": float("nan"), "grad_norm": 1}) + "\n")
    said(a, b, "-o", tmp_path / "out.svg")
    drawn = (tmp_path / "out.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert len(drawn) < 60_000


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("a", "nothing"), "nothing holds no log.jsonl: name the folder of a training run"),
        (("a", "near", "--margin", "0"), "--margin 0: it must be above 0"),
        (("a", "near", "--handover", "160"), "--handover 160 is not between the first and the last step"),
        (("a", "near", "--repeat", "nothing"), "nothing holds no log.jsonl"),
    ],
)
def test_errors_are_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: str) -> None:
    monkeypatch.chdir(runs)
    status, text = said(*words)
    assert status == 1
    assert text.startswith(f"roofline: {error}")
    assert text.count("\n") == 1
