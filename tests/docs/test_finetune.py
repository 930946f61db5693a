"""The commands of the page about fine-tuning, run in a shortened form: a tiny model, few steps, the same options."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.finetune.options import PRESETS, SAMPLE_FORMS
from tests.command_line import call_roofline
from tests.train import sft

PAGE = (Path(__file__).parents[2] / "docs/how-to/finetune.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
LENGTHS = {"--epochs", "--steps", "--max-seq-len", "--batch"}  # what makes a command long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_model(tmp_path_factory.mktemp("models") / "tiny")


def shortened(line: str, model: Path) -> list[str]:
    """The words of a command, with a tiny model and two steps of few rows."""
    command, *words = shlex.split(line)
    assert command == "roofline"
    assert words[1] == "smollm2-135m"
    words[1] = str(model)
    kept = [word for at, word in enumerate(words) if word not in LENGTHS and (at == 0 or words[at - 1] not in LENGTHS)]
    return [*kept, "--steps", "2", "--batch", "2", "--max-seq-len", "64", "--ask", "0"]


def test_there_are_commands() -> None:
    assert len([line for line in LINES if line.startswith("roofline finetune")]) == 6
    assert sum(line.startswith("roofline serve") for line in LINES) == 1


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("roofline finetune")])
def test_commands(line: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sft.write_lines(tmp_path / "questions.jsonl", [sft.question(number) for number in range(20)])
    done = call_roofline(shortened(line, model))
    assert done.exit_code == 0, done.stderr
    if "--show" in line:
        assert "[[" in done.stdout
        return
    serve = next(line for line in done.stdout.splitlines() if line.startswith("serve it: ")).removeprefix("serve it: ")
    outcome = Path(shlex.split(serve)[-1].partition("=")[2] or shlex.split(serve)[-1])
    assert outcome.is_dir()
    if "--out runs/questions" in line:
        expected = next(each for each in LINES if each.startswith("roofline serve"))
        assert serve == expected.replace("smollm2-135m", f"{model} --served-model-name tiny")


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("roofline bench lora")])
def test_commands_that_measure(line: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sft.write_lines(tmp_path / "questions.jsonl", [sft.question(number) for number in range(20)])
    command, *words = shlex.split(line.replace("smollm2-135m", str(model)))
    assert command == "roofline"
    epochs = ["--epochs", "1"] if "--epochs" in words else ["--steps", "2"]
    done = call_roofline([*words, *epochs, "--batches", "2", "--warmup", "1", "--max-seq-len", "64"])
    assert done.exit_code == 0, done.stderr
    assert "again: roofline bench lora" in done.stdout


@pytest.mark.slow
def test_right_answers_are_counted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sft.write_lines(tmp_path / "questions.jsonl", [sft.question(number) for number in range(20)])
    train = next(line for line in LINES if "--out runs/questions" in line)
    assert call_roofline(shortened(train, model)).exit_code == 0
    (line,) = [line for line in LINES if line.startswith("roofline bench tasks")]
    words = [str(model) if word == "smollm2-135m" else word for word in shlex.split(line)[1:]]
    done = call_roofline([*words, "--backend", "reference"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:2] == ["exact", "20"]


def test_its_tables_have_every_form_and_preset() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [*_in_the_order_of_the_page(), *PRESETS]


def _in_the_order_of_the_page() -> list[str]:
    order = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    return sorted(SAMPLE_FORMS, key=order.index)


def test_the_configuration_of_llm_foundry_trains(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    sft.write_lines(tmp_path / "data/train.jsonl", [{"prompt": "one", "response": " two"}] * 20)
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    rest = {
        "run_folder": "run",
        "max_seq_len": 64,
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(model)},
        "tokenizer": {"name": str(model)},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "max_duration": "1ba",
        "global_train_batch_size": 2,
        "precision": "fp32",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load(block) | rest))
    done = call_roofline(["train", "run.yaml"])
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "run/samples/train/prepared.json").read_text())["form"] == "completion"
