"""roofline finetune for people: answers before and after, the links to both chats, and the server of both."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bench.quality import answers  # noqa: E402
from roofline.cli.training import before_after  # noqa: E402
from roofline.cli.training.before_after import BeforeAfter, ServedModels  # noqa: E402
from roofline.common.errors import RooflineError, UnsupportedError  # noqa: E402
from roofline.train.report.answers import read_answers  # noqa: E402
from roofline.train.run_folder import ANSWERS  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft  # noqa: E402


def test_a_run_asks_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its page they stand side by side, with a link to each chat; --serve then becomes the server of both."""
    model = sft.write_model(tmp_path / "tiny")
    data = sft.write_lines(tmp_path / "d.jsonl", [sft.question(n % 4) for n in range(40)])
    started: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    out = tmp_path / "run"
    words = ["--steps", 2, "--batch", 4, "--max-seq-len", 64, "--precision", "fp32", "--ask", 2, "--eval-share", 0.1]
    done = call_roofline(["finetune", model, data, "--out", out, *words, "--serve", "--port", 8123])
    assert done.exit_code == 0, done.stderr
    found = read_answers(out)
    assert found is not None
    assert [(row.before is None, row.after is None, bool(row.expected)) for row in found.rows] == 2 * [
        (False, False, True)
    ]
    text = (out / "run.html").read_text()
    address = "http://127.0.0.1:8123"
    assert re.findall(r'href="([^"]*)"', text) == [f"{address}/?model=tiny", f"{address}/?model=run"]
    assert re.search(r"held-out answers exactly as in the data: \d of 2 before, \d of 2 after", done.stdout)
    assert f"then chat with run: {address}/?model=run" in done.stdout
    command = ["roofline", "serve", str(model), "--served-model-name", "tiny", "--adapter", f"run={out}/adapter"]
    assert started == [(sys.executable, [sys.executable, "-m", *command, "--port", "8123"])]


SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
RANKS = " --max-adapter-rank 128"
CASES = {
    "adapter": (ServedModels("x", Path("runs/o/adapter")), ("x", "o"), "--adapter o=", "x --adapter "),
    "large": (
        ServedModels("x", Path("a b/x/adapter"), rank=128), ("x", "x-tuned"), "--adapter x-tuned=", "x --adapter ",
    ),
    "model": (ServedModels("x", Path("runs/o p/model"), rank=128), ("x", "o-p"), "--extra-model o-p=", ""),
    "experts": (
        ServedModels("x", Path("runs/o/adapter"), rank=128, merged="experts"), ("x", "o"), "--extra-model o=", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_names_and_the_commands_that_serve_both_and_chat(case: str, tmp_path: Path) -> None:
    served, names, words, chat = CASES[case]
    around = BeforeAfter(served, [{"messages": SYSTEM, "answer": "4"}], tmp_path)
    place = served.outcome.with_name("merged") if served.merged else served.outcome
    room = RANKS if case == "large" else ""
    assert (around.answers.before, around.answers.after) == names
    flag, name = words.split()
    assert around.answers.command.endswith(f"roofline serve x {flag} {shlex.quote(f'{name}{place}')}{room}")
    (line,) = [line for line in around.summary() if line.startswith("chat with it here: ")]
    assert line == f"chat with it here: roofline chat {chat}{shlex.quote(str(place))}{room} --system 'Be brief.'"


@pytest.mark.slow
def test_an_adapter_of_experts_is_merged_before_it_is_served(tmp_path: Path) -> None:
    model = sft.write_model(tmp_path / "tiny", family="mixtral", experts=4, experts_per_token=2)
    data = sft.write_lines(tmp_path / "d.jsonl", [sft.question(n % 4) for n in range(20)])
    out = tmp_path / "run"
    words = ["finetune", model, data, "--out", out, "--steps", 1, "--batch", 2, "--max-seq-len", 64]
    refused = call_roofline([*words, "--serve"])
    assert refused.stderr.startswith("roofline: --serve: adapters of experts are not served: ")
    assert not out.exists()
    done = call_roofline(words)
    assert done.exit_code == 0, done.stderr
    assert "adapters of experts are not served: the model is not asked" in done.stderr
    lines = done.stdout.splitlines()
    merge = f"roofline merge {model} {out}/adapter --output {out}/merged --to bf16"
    serve = f"roofline serve {model} --served-model-name tiny --extra-model run={out}/merged"
    assert f"merge it: {merge}" in lines
    assert f"serve it: {serve}" in lines
    assert f"<pre>{merge} &amp;&amp; {serve}</pre>" in (out / "run.html").read_text()
    merged = call_roofline(merge.split()[1:])
    assert merged.exit_code == 0, merged.stderr
    assert (out / "merged/config.json").is_file()


def test_an_earlier_attempt_of_the_run_has_asked_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(self: BeforeAfter, model: str, adapter: Path | None = None) -> list[str | None]:
        asked.append(model)
        return ["four"] * len(self.prompts)

    monkeypatch.setattr(BeforeAfter, "_texts", ask)
    prompts = [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}], "answer": "4"},
        {"prompt": "3 + 1 = ", "answer": "four"},
        {"prompt": "a call of a tool has no text", "answer": ""},
    ]
    served = ServedModels("m", tmp_path / "adapter")
    first = BeforeAfter(served, prompts, tmp_path)
    first.begin()
    assert [(row.prompt, row.before) for row in first.answers.rows] == [("2 + 2", "four"), ("3 + 1 = ", "four")]
    assert first.answers.system == "", "the second prompt has none"
    assert BeforeAfter(served, prompts[:1], tmp_path).answers.system == "Be brief."
    assert first.result() == {"exact": {"before": (1, 2), "after": None}}
    again = BeforeAfter(served, prompts, tmp_path)
    again.begin()
    assert asked == ["m"]
    assert again.answers == first.answers
    other = BeforeAfter(served, prompts[:1], tmp_path)
    other.begin()
    assert asked == ["m", "m"], "of other prompts nothing was known"


def test_a_model_that_cannot_be_asked_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> list[str | None]:
        raise UnsupportedError("the model", "nothing serves it")

    monkeypatch.setattr(answers, "answer", refuse)
    around = BeforeAfter(ServedModels("m", tmp_path / "adapter"), [{"prompt": "2 + 2", "answer": "4"}], tmp_path)
    around.begin()
    assert capsys.readouterr().err == "m was not asked for answers: the model is not supported: nothing serves it.\n"
    assert around.result() == {"exact": {"before": None, "after": None}}
    assert around.summary()[0].startswith("page of the run")


def end_at_once(*_: object) -> None:
    os._exit(9)


@pytest.mark.slow
def test_a_process_that_is_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_answer", end_at_once)
    with pytest.raises(RooflineError, match="its process was ended, as the system does when memory runs out"):
        answers.answer("m", [{"prompt": "2 + 2", "answer": "4"}])


def test_nothing_is_asked_where_nothing_was_kept_apart(tmp_path: Path) -> None:
    around = BeforeAfter(ServedModels("m", tmp_path / "adapter"), [], tmp_path)
    around.begin()
    assert json.loads((tmp_path / ANSWERS).read_text())["rows"] == []
    assert [line.partition(":")[0] for line in around.summary()] == [
        "page of the run",
        "serve it",
        "chat with it here",
        "then chat with m",
        f"then chat with {before_after._NAME.sub('-', tmp_path.name)}",
    ]


def test_ctrl_c_tells_that_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: BeforeAfter) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BeforeAfter, "begin", interrupted)
    model = sft.write_model(tmp_path / "tiny")
    data = sft.write_lines(tmp_path / "d.jsonl", [sft.question(n) for n in range(8)])
    done = call_roofline(["finetune", model, data, "--out", tmp_path / "run", "--steps", 1, "--max-seq-len", 64])
    assert done.exit_code == 130
    assert done.stderr.endswith("Aborted! The same command goes on from the last checkpoint, if there is one.\n")
