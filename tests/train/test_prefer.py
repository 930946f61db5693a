"""roofline prefer and roofline reinforce: from a file of records to an adapter that is served."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.run_folder import read_lines  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft  # noqa: E402
from tests.train.objective_cases import RECORDS, RUN, write_tiny  # noqa: E402

SMALL = ("--max-seq-len", "64", "--batch", "4", "--precision", "fp32", "--rank", "4", "--base", "f32")
REWARD = """
def early(answer, record):
    return sum(each < "n" for each in answer) / max(1, len(answer)) + record["plus"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_model(tmp_path_factory.mktemp("models") / "tiny", std=0.3)


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "log.jsonl") if "loss" in line]


def test_a_model_learns_which_answers_are_better(model: Path, tmp_path: Path) -> None:
    records = [
        {"question": f"What is {word}?", "chosen": "yes", "rejected": "no"} for word in ("one", "two", "three") * 10
    ]
    data, out = sft.write_lines(tmp_path / "pairs.jsonl", records), tmp_path / "run"
    command = ["prefer", model, data, "--out", out, *SMALL, "--lr", "1e-2", "--steps", "10"]
    shown = call_roofline([*command, "--show", "1"]).stdout
    assert shown.count("[[") == 2
    assert "[[yes<|im_end|>]]" in shown
    assert not out.exists()
    done = call_roofline(command)
    assert done.exit_code == 0, done.stderr
    assert "28 pairs in 28 rows of 64 tokens; 10 steps" in done.stderr
    (serve,) = [line for line in done.stdout.splitlines() if line.startswith("serve it: ")]
    assert serve.endswith(f"--adapter run={out}/adapter")
    assert "held-out answers exactly as in the data: " in done.stdout
    lines = steps(out)
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["loss"] < 0.4
    assert lines[-1]["accuracy"] == 1
    assert "all 10 steps were done already" in call_roofline(command).stdout
    settings = json.loads((out / "config.json").read_text())
    assert settings["dpo"] == {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0}


def test_a_run_has_the_losses_of_trl_s_trainer(tmp_path: Path) -> None:
    """All parameters, by AdamW: losses, rewards and norms of gradients that TRL 1.16.0 has (write_trl_numbers.py)."""
    model, data = write_tiny(tmp_path), sft.write_lines(tmp_path / "pairs.jsonl", RECORDS)
    out, count = tmp_path / "run", len(RECORDS)
    words = ["--method", "full", "--lr", RUN["learning_rate"], "--beta", RUN["beta"], "--steps", RUN["steps"]]
    words += ["--batch", count, "--no-pack", "--schedule", "constant", "--precision", "fp32", "--eval-share", "0"]
    changes = ["--set", "algorithms.gradient_clipping=null", "--max-seq-len", "64"]
    done = call_roofline(["prefer", model, data, "--out", out, *words, *changes])
    assert done.exit_code == 0, done.stderr
    expected = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())["run"]
    for ours, theirs in zip(steps(out), expected, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (ours["step"], name)


def test_a_model_learns_to_earn_rewards(model: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    records = [{"question": f"What is {word}?", "plus": 1} for word in ("one", "two", "three", "four")]
    data, out = sft.write_lines(tmp_path / "prompts.jsonl", records), tmp_path / "run"
    words = ["--lr", "2e-2", "--steps", "6", "--group", "16", "--max-new-tokens", "2", "--eval-share", "0"]
    command = ["reinforce", model, data, "--reward", f"{tmp_path}/reward.py:early", "--out", out, *SMALL, *words]
    shown = call_roofline([*command, "--show", "1"]).stdout
    assert shown.rstrip().endswith("<|im_start|>assistant")
    done = call_roofline([*command, "--json"])
    assert done.exit_code == 0, done.stderr
    assert "4 prompts, 16 answers to each of 4 in a step; 6 steps" in done.stderr
    lines = steps(out)
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.2 > 1
    assert json.loads(done.stdout)["outcome"] == str(out / "adapter")
    assert len(read_lines(out / "rollouts.jsonl")) == 24
    assert (out / "adapter/adapter_model.safetensors").exists()


REWARDS = """
def bad(answer, record):
    return float('nan')

def wrong(answer, record):
    return record["mark"]

def none(answer, record):
    return None
"""


def test_what_cannot_be_rewarded_is_told_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    data = sft.write_lines(tmp_path / "prompts.jsonl", [{"question": "one"}] * 3)
    (tmp_path / "reward.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for reward, message in [
        ("length", "it is neither exact_match nor FILE.py:FUNCTION"),
        (f"{tmp_path}/none.py:f", "there is no file"),
        (f"{tmp_path}/reward.py:f", "has no function f"),
        (f"{tmp_path}/broken.py:f", "cannot be imported: .*nothing_of_that_name"),
        (f"{tmp_path}/reward.py:bad", "is nan for the answer"),
        (f"{tmp_path}/reward.py:none", "returned None for the answer '.*': it has to return a number"),
        (f"{tmp_path}/reward.py:wrong", "failed on the answer '.*' in line 6: KeyError: 'mark'"),
        ("exact_match", "a prompt has no right answer under answer, completion"),
    ]:
        out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        done = call_roofline(
            ["reinforce", model, data, "--reward", reward, "--out", out, *SMALL, "--max-new-tokens", 2]
        )
        assert done.exit_code == 1
        assert re.search(message, done.stderr), done.stderr
    (tmp_path / "reward.py").write_text("def right(answer, record):\n    return 1.0\n")
    corrected = ["--reward", f"{tmp_path}/reward.py:right", "--out", out, "--steps", 1, "--ask", 0]
    done = call_roofline(["reinforce", model, data, *SMALL, *corrected, "--max-new-tokens", 2])
    assert done.exit_code == 0, f"no step was trained, so the folder may be used: {done.stderr}"
    done = call_roofline(["reinforce", model, data, "--temperature", 0])
    assert "--temperature=0.0 cannot be used" in done.stderr
    done = call_roofline(["reinforce", model, data, *SMALL, "--max-new-tokens", 63])
    assert "--max-new-tokens 63 leaves no room for a prompt in --max-seq-len 64" in done.stderr


@pytest.mark.parametrize("words", [("--show", 1), ("--steps", 1)])
def test_a_file_without_records_is_told(model: Path, tmp_path: Path, words: tuple[str, int]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    done = call_roofline(["prefer", model, tmp_path / "empty.jsonl", "--out", tmp_path / "run", *words])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "empty.jsonl holds no record" in done.stderr
