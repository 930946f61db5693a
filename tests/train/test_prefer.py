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
    records.append({"question": "one", "chosen": "yes" * 90, "rejected": "no"})
    records.append({"question": "one", "chosen": "yes", "rejected": "yes"})
    data, out = sft.write_lines(tmp_path / "pairs.jsonl", records), tmp_path / "run"
    command = ["prefer", model, data, "--out", out, *SMALL, "--lr", "1e-2", "--steps", "10"]
    shown = call_roofline([*command, "--show", "1"]).stdout
    assert shown.count("[[") == 2
    assert "[[yes<|im_end|>]]" in shown
    assert not out.exists()
    done = call_roofline(command)
    assert done.exit_code == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == f"{data}: 32 records, read as questions with two answers, as chats"
    rows = "28 pairs in 28 rows of 64 tokens: "
    assert re.fullmatch(rf"{rows}1,\d{{3}} tokens, 112 of them trained on, .*padding", lines[1]), lines[1]
    assert lines[2:6] == [
        "2 pairs are kept apart for evaluation",
        "1 pair was left out: no row holds both answers; --max-seq-len raises the limit",
        "1 pair was left out: the chosen and the rejected answer are the same",
        "10 steps of 4 rows, 1.4 epochs",
    ]
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
    assert done.stderr.splitlines()[:3] == [
        f"{data}: 4 records, read as questions, as chats",
        "4 prompts of 60 tokens together, 16 answers to each of 4 in a step",
        "6 steps of 4 rows, 6 epochs",
    ]
    lines = steps(out)
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.2 > 1
    assert json.loads(done.stdout)["outcome"] == str(out / "adapter")
    assert len(read_lines(out / "rollouts.jsonl")) == 24
    assert (out / "adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_function_of_rewards_is_told_before_and_after(model: Path, tmp_path: Path) -> None:
    """And not how many answers are as in the data, which nobody asked for."""
    (tmp_path / "reward.py").write_text(REWARD)
    records = [{"question": f"What is {word}?", "answer": word, "plus": 1} for word in ("one", "two", "three", "four")]
    data, out = sft.write_lines(tmp_path / "prompts.jsonl", records), tmp_path / "run"
    words = ["--steps", 2, "--group", 2, "--max-new-tokens", 2, "--eval-share", 0.5, "--reward"]
    command = ["reinforce", model, data, "--out", out, *SMALL, *words]
    done = call_roofline([*command, f"{tmp_path}/reward.py:early"])
    assert done.exit_code == 0, done.stderr
    before, *_, after = (line["reward"] for line in read_lines(out / "log.jsonl") if "eval_loss" in line)
    told = f"mean reward of greedy answers to held-out prompts: {before:.3f} before, {after:.3f} after"
    assert told in done.stdout.splitlines()
    assert "exactly" not in done.stdout
    assert "2 prompts are kept apart for evaluation" in done.stderr
    assert f"<span>reward before</span><b>{before:.3f}</b>" in (out / "run.html").read_text()
    again = json.loads(call_roofline([*command, f"{tmp_path}/reward.py:early", "--json"]).stdout)
    assert again["reward"] == {"before": before, "after": after}
    assert "exact" not in again
    exact = call_roofline([*command, "exact_match", "--out", tmp_path / "exact"])
    assert "held-out answers exactly as in the data: " in exact.stdout
    assert "mean reward" not in exact.stdout


def test_what_is_wrong_with_options_is_told_of_the_options(model: Path, tmp_path: Path) -> None:
    """As they were typed, and not of keys of a configuration that nobody wrote."""
    pairs = sft.write_lines(tmp_path / "pairs.jsonl", [{"question": "one", "chosen": "yes", "rejected": "no"}] * 3)
    for words, message in [
        (["prefer", "--loss", "robust"], "--loss robust needs --label-smoothing, the share of wrong labels"),
        (["prefer", "--label-smoothing", 0.7], "--label-smoothing 0.7: input should be less than 0.5"),
        (["prefer", "--show", 1, "--set", "dpo.betta=1"], "--set dpo.betta=1: unknown key dpo.betta; did you mean"),
        (["reinforce", "--base", "nf4"], "--base nf4: grpo samples from the model's own files, so quantise them first"),
        (["reinforce", "--clip", 2], "--clip 2.0: input should be less than 1"),
        (["reinforce", "--kl", 1, "--temperature", 2], "--kl 1 needs --temperature 1, not 2: the reference is"),
    ]:
        done = call_roofline([words[0], model, pairs, "--out", tmp_path / "run", *words[1:]])
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"roofline: {message}"), done.stderr
        assert not (tmp_path / "run").exists()


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
