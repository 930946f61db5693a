"""The commands of the page about preferences and rewards, run in a shortened form: a tiny model, few steps."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.config.objectives import DpoSection, GrpoSection
from tests.command_line import call_roofline
from tests.train import sft

PAGE = (Path(__file__).parents[2] / "docs/how-to/preferences.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
TRAINING = [line for line in LINES if not line.startswith("roofline serve")]
WORDS = ("one", "two", "three", "four")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_model(tmp_path_factory.mktemp("models") / "smollm2-135m")


def shortened(line: str, model: Path) -> list[str]:
    """The words of a command, with a tiny model and two steps of few short rows."""
    _, command, name, *words = shlex.split(line)
    assert name == "smollm2-135m"
    at = words.index("--steps") if "--steps" in words else len(words)
    del words[at : at + 2]
    short = ["--steps", "2", "--batch", "2", "--max-seq-len", "64"]
    return [command, str(model), *words, *short, *(["--max-new-tokens", "4"] if command == "reinforce" else [])]


@pytest.mark.parametrize("line", [TRAINING[0], *(pytest.param(line, marks=pytest.mark.slow) for line in TRAINING[1:])])
def test_commands(line: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = [{"question": f"What is {word}?", "chosen": "yes", "rejected": "no"} for word in WORDS * 5]
    prompts = [{"question": f"What is {word}?", "answer": word} for word in WORDS * 5]
    sft.write_lines(tmp_path / "pairs.jsonl", pairs)
    sft.write_lines(tmp_path / "prompts.jsonl", prompts)
    (code,) = [block for kind, block in BLOCKS if kind == "python"]
    (tmp_path / "reward.py").write_text(code)
    done = call_roofline(shortened(line, model))
    assert done.exit_code == 0, done.stderr
    (serve,) = [line.removeprefix("serve it: ") for line in done.stdout.splitlines() if line.startswith("serve it: ")]
    assert Path(shlex.split(serve)[-1].partition("=")[2]).is_dir()
    if line == TRAINING[0]:
        expected = next(each for each in LINES if each.startswith("roofline serve"))
        of_folder = f"serve {model} --served-model-name {model.name}"
        assert serve == expected.replace("serve smollm2-135m", of_folder)


def test_the_sections_are_what_the_page_says() -> None:
    import yaml

    sections: dict[str, Any] = {}
    for kind, block in BLOCKS:
        sections |= yaml.safe_load(block) if kind == "yaml" else {}
    assert DpoSection(**sections["dpo"]) == DpoSection()
    assert set(sections["grpo"]) == set(GrpoSection.model_fields)
    changed = {"reward": "reward.py:short", "clip_high": 0.28}
    assert GrpoSection(**sections["grpo"]) == GrpoSection(**changed)
