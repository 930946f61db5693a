"""roofline finetune: from a file of samples to an adapter or a model, stopped and continued, packed and not."""

import json
import os
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.finetune import plan, prepare  # noqa: E402
from roofline.train.finetune.options import FinetuneOptions  # noqa: E402
from roofline.train.finetune.prepare import read_prepared  # noqa: E402
from roofline.train.run.owner import FolderLock  # noqa: E402
from roofline.train.run_folder import COMMAND, read_lines  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft  # noqa: E402
from tests.train.small import log_of  # noqa: E402

SAMPLES = 40
SMALL = ("--max-seq-len", "64", "--batch", "4", "--precision", "fp32", "--lr", "1e-2", "--rank", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_lines(tmp_path_factory.mktemp("data") / "d.jsonl", [sft.question(n) for n in range(SAMPLES)])


def finetune(model: Path, data: Path, out: Path, *words: object, status: int = 0) -> Any:
    done = call_roofline(["finetune", model, data, "--out", out, *SMALL, "--ask", 0, *words])
    assert done.exit_code == status, done.stderr
    return done


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "log.jsonl") if "loss" in line]


def test_an_adapter_is_trained_and_how_to_serve_it_is_printed(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = finetune(model, data, out, "--steps", 30)
    assert "40 records, read as chats as OpenAI's API has them (--format messages)" in done.stderr
    assert "2 samples are kept apart for evaluation" in done.stderr
    assert "packed rows: other tokens in one document change nothing" in done.stderr
    serve = f"roofline serve {model} --served-model-name tiny --adapter run={out}/adapter"
    assert f"serve it: {serve}" in done.stdout.splitlines()
    assert json.loads((out / "adapter/adapter_config.json").read_text())["r"] == 4
    found = losses(out)
    assert len(found) == 30
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    held_out = [line["eval_loss"] for line in read_lines(out / "log.jsonl") if "eval_loss" in line]
    assert held_out[-1] < held_out[0]
    prompts = [json.loads(line) for line in (out / "data/held-out.jsonl").read_text().splitlines()]
    assert [set(line) for line in prompts] == [{"messages", "answer"}] * 2
    prepared = read_prepared(out / "data")
    steps = [line for line in read_lines(out / "log.jsonl") if "loss" in line]
    assert {line["computed"] for line in steps} == {4 * 64} or all(line["computed"] <= 4 * 64 for line in steps)
    assert all(line["trained"] < line["computed"] for line in steps)
    assert steps[-1]["tokens"] == pytest.approx(30 * 4 * prepared.train.real / prepared.train.rows, rel=0.1)
    speed = json.loads((out / "card.json").read_text())["speed"]
    assert speed["tokens_per_s"] < speed["computed_per_s_per_device"]
    assert 0 < speed["padding_share"] < 0.5


def test_the_same_command_goes_on_and_gives_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finetune(model, data, whole, "--steps", 8)
    finetune(model, data, parts, "--steps", 8, "--set", "stop_after=3ba")
    assert len(losses(parts)) == 3
    finetune(model, data, parts, "--steps", 8)
    clean = [[{k: v for k, v in line.items() if k != "microbatch"} for line in log_of(each)] for each in (whole, parts)]
    assert [line for line in clean[1] if "loss" in line] == [line for line in clean[0] if "loss" in line]
    name = "adapter/adapter_model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()
    again = finetune(model, data, parts, "--steps", 8)
    assert "all 8 steps were done already" in again.stdout
    other = finetune(model, data, parts, "--steps", 9, status=1)
    assert "is of a run with other settings (scheduler.t_warmup" in other.stderr or "max_duration" in other.stderr
    data2 = sft.write_lines(tmp_path / "d2.jsonl", [sft.question(1)] * 9)
    other = finetune(model, data2, parts, "--steps", 8, status=1)
    assert "was prepared from other data, with other settings or for another tokenizer" in other.stderr


def test_a_command_that_was_refused_may_be_corrected(model: Path, data: Path, tmp_path: Path) -> None:
    """What was prepared for a run that never began does not keep the corrected command from running."""
    out = tmp_path / "run"
    refused = finetune(model, data, out, "--steps", 1, "--set", "tokenizer.name=nothing", status=1)
    assert "--set tokenizer.name=nothing: tokenizer.name = nothing: " in refused.stderr
    assert (out / "finetune.yaml").exists()
    corrected = finetune(model, data, out, "--steps", 1, "--targets", "q_proj", "--max-seq-len", 48)
    assert "1 step, loss" in corrected.stdout
    assert read_prepared(out / "data").length == 48


def test_targets_without_a_name_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    refused = finetune(model, data, tmp_path / "run", "--targets", ",", status=1)
    assert "--targets names no matrix: all-linear stands for all" in refused.stderr


def test_a_row_longer_than_the_context_is_told(model: Path, data: Path, tmp_path: Path) -> None:
    done = finetune(model, data, tmp_path / "run", "--steps", 1, "--max-seq-len", 1000, "--batch", 1)
    assert "--max-seq-len 1000 is above the model's context, 512 tokens, which is used" in done.stderr


def test_an_adapter_in_place_of_the_model_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "this is a LoRA adapter" in finetune(tmp_path, data, tmp_path / "run", "--show", 1, status=1).stderr


def test_epochs_that_make_few_steps_are_told(model: Path, data: Path, tmp_path: Path) -> None:
    hint = "so few steps teach little"
    assert hint in finetune(model, data, tmp_path / "few", "--epochs", 0.5).stderr
    assert hint not in finetune(model, data, tmp_path / "named", "--steps", 1).stderr


@pytest.mark.parametrize(
    ("rows", "words", "batch", "steps"),
    [
        (27, {}, 1, 81),
        (100, {}, 3, 100),
        (600, {}, 16, 113),
        (5000, {}, 16, 938),
        (600, {"epochs": 1.0}, 6, 100),
        (600, {"steps": 7}, 16, 7),
        (27, {"steps": 100}, 1, 100),
        (27, {"batch": 16}, 16, 6),
        (27, {"preset": "dell2024"}, 16, 200),
    ],
)
def test_small_data_make_a_hundred_steps(rows: int, words: dict[str, Any], batch: int, steps: int) -> None:
    options = FinetuneOptions(**words).with_preset(words.keys())
    prepared = replace(plan.stand_in(64), train=prepare.Rows(rows, rows, 2 * rows, rows))
    assert (plan.batch_of(options, prepared), plan.steps_of(options, prepared)) == (batch, steps)


def test_rows_are_as_short_as_a_hundred_steps_need(model: Path, data: Path, tmp_path: Path) -> None:
    """38 samples of 15 to 20 tokens fit into 2 rows of 512, which three epochs would see in 6 steps."""
    words = ["--out", tmp_path / "run", "--max-seq-len", 512, *SMALL[4:], "--ask", 0, "--set", "max_duration=1ba"]
    done = call_roofline(["finetune", model, data, *words])
    assert done.exit_code == 0, done.stderr
    prepared = read_prepared(tmp_path / "run/data")
    assert prepared.length == 512
    assert prepared.longest <= prepared.row_length < 2 * prepared.longest
    assert prepared.train.rows >= 34
    assert re.search(rf"38 samples in \d+ rows of {prepared.row_length} tokens", done.stderr)
    assert re.search(r"1\d\d steps of 1 row, 3 epochs", done.stderr)
    assert re.search(r"of memory predicted at 1 row at a time, .* are free", done.stderr)
    assert json.loads((tmp_path / "run/config.json").read_text())["max_seq_len"] == prepared.row_length


def test_full_fine_tuning_gives_a_model(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = call_roofline(
        ["finetune", model, data, "--out", out, *SMALL[:6], "--method", "full", "--steps", 3, "--ask", 0, "--json"]
    )
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert (out / "model/config.json").is_file()
    assert result["outcome"] == str(out / "model")
    assert result["serve"] == f"roofline serve {model} --served-model-name tiny --extra-model run={out}/model"
    assert result["card"]["speed"]["steps"][1] == 3


def test_evaluation_may_be_of_another_file_and_form(model: Path, data: Path, tmp_path: Path) -> None:
    tasks = [
        {"query": "What is one?", "choices": ["two", "three"], "gold": 0},
        {"context": "one", "continuation": "two"},
    ]
    path = sft.write_lines(tmp_path / "icl.jsonl", tasks)
    finetune(model, data, tmp_path / "run", "--steps", 1, "--eval", path)
    prepared = read_prepared(tmp_path / "run/data")
    assert (prepared.train.samples, prepared.records, prepared.form) == (SAMPLES, SAMPLES, "messages")
    assert prepared.held_out is not None
    assert prepared.held_out.samples == 2
    lines = read_lines(tmp_path / "run/log.jsonl")
    assert {line["eval_tokens"] for line in lines if "eval_loss" in line} == {prepared.held_out.trained}
    path.write_text(path.read_text().splitlines()[0])
    again = finetune(model, data, tmp_path / "run", "--steps", 1, "--eval", path, status=1)
    assert "was prepared from other data" in again.stderr


def test_rows_of_a_sample_each_are_computed_without_their_padding(model: Path, data: Path, tmp_path: Path) -> None:
    finetune(model, data, tmp_path / "run", "--no-pack", "--steps", 2, "--eval-share", "0")
    about, *lines = read_lines(tmp_path / "run/log.jsonl")
    assert about["about"]["leak_proof"] is None
    prepared = read_prepared(tmp_path / "run/data")
    assert prepared.train.rows == SAMPLES
    assert all(line["computed"] <= 4 * 32 for line in lines if "loss" in line), "no sample is longer than 32 tokens"
    assert not (tmp_path / "run/data/held-out.jsonl").exists()


def test_show_marks_what_is_trained_on_and_trains_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    done = finetune(model, data, tmp_path / "run", "--show", 2)
    assert done.stdout.count("[[") == 2
    assert f"--- {data}: line 1 (messages): " in done.stdout
    assert "[[two<|im_end|>]]" in done.stdout
    assert not (tmp_path / "run").exists()
    wrong = finetune(model, data, tmp_path / "run", "--show", 2, "--set", "optimizer.lrr=1", status=1)
    assert (wrong.stdout, "unknown key optimizer.lrr" in wrong.stderr) == ("", True), "as the run says it"


def test_showing_needs_no_torch(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    noted = sft.write_lines(tmp_path / "d.jsonl", [sft.question(0) | {"url": "u"}] * 3)
    done = finetune(model, noted, tmp_path / "run", "--show", 2)
    assert done.stdout.count("[[two<|im_end|>]]") == 2
    assert done.stdout.rstrip().endswith("--- not used: url (2 records)")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("NOTHING", "1")])
def test_colours_are_shown_where_they_can_be_seen(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    from roofline.cli.training.tuned_run import _has_colours

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert _has_colours() == (name == "NOTHING")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert not _has_colours()


def test_line_separators_in_a_text_end_no_line(model: Path, tmp_path: Path) -> None:
    """U+2028 and its like are ends of a line to `str.splitlines`, and plain characters in JSON."""
    records = [sft.question(number) for number in range(8)]
    for record in records:
        record["messages"][0]["content"] += " \u2028\u2029\x85"
    data, out = tmp_path / "d.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    finetune(model, data, out, "--steps", 1, "--eval-share", 0.5)
    asked = prepare.read_prompts(out / "data", 3)
    assert len(asked) == 3
    assert all(str(line["messages"][0]["content"]).endswith("\u2028\u2029\x85") for line in asked)  # type: ignore[index]


def test_a_chat_model_that_is_trained_without_its_template(model: Path, data: Path, tmp_path: Path) -> None:
    plain = sft.write_lines(tmp_path / "d.jsonl", [{"prompt": "one", "response": " two"}] * 4)
    told = "the model has a chat template, which these samples are trained without, so a chat asks it otherwise"
    assert told in finetune(model, plain, tmp_path / "a", "--steps", 1).stderr
    for out, place, words in (("b", plain, ["--format", "instruct"]), ("c", data, [])):
        assert told not in finetune(model, place, tmp_path / out, "--steps", 1, *words).stderr


def test_what_was_not_used_is_told_before_the_run(model: Path, tmp_path: Path) -> None:
    records = [sft.question(0) | {"url": "u"}] * 8
    done = finetune(model, sft.write_lines(tmp_path / "d.jsonl", records), tmp_path / "run", "--steps", 1)
    lines = done.stderr.splitlines()
    assert "not used: url (8 records)" in lines
    told = "1 sample is both kept apart and trained on, token for token: the loss on such is not one of new data"
    assert told in lines
    assert lines.index("not used: url (8 records)") < next(at for at, line in enumerate(lines) if "parameters" in line)


def test_nobody_else_prepares_a_run(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to a command before its data are prepared, and no longer once it has ended."""
    out, second, own = tmp_path / "run", [], prepare.prepare

    def during(*words: Any, **more: Any) -> Any:
        monkeypatch.setattr(prepare, "prepare", own)
        second.append(call_roofline(["finetune", model, data, "--out", out, *SMALL, "--steps", 1]))
        return own(*words, **more)

    monkeypatch.setattr(prepare, "prepare", during)
    finetune(model, data, out, "--steps", 1)
    (refused,) = second
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"roofline: {out} belongs to a command that is under way (process {os.getpid()} of ")
    assert line.endswith(": wait for it, end it, or choose another --out")
    assert not (out / COMMAND).exists()
    with closing(FolderLock(out, {})):  # of a run
        assert "belongs to a run that is training" in finetune(model, data, out, "--steps", 1, status=1).stderr


@pytest.mark.parametrize(
    ("base", "says"),
    [
        *(("nf4", True), ("stored", False)),
        *(pytest.param(base, False, marks=pytest.mark.slow) for base in ("q8_0", "bf16", "f32")),
    ],
)
def test_a_base_that_is_rounded_twice_is_told(
    model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, base: str, says: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "tiny-q8.gguf"
    if not file.exists():
        assert call_roofline(["quantize", model, "-o", file, "--to", "q8"]).exit_code == 0
    done = finetune(file, data, tmp_path / "run", "--steps", 1, "--base", base)
    line = "tiny-q8.gguf has its matrices in Q8_0, which --base nf4 rounds a second time; --base stored keeps them as"
    assert (line in done.stderr) == says
    assert ("a second time" in done.stderr) == says


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "1", "--steps", "2"], "leave one of the two out"),
        (["--format", "shareGPT"], "did you mean 'sharegpt'"),
        (["--epochs", "0"], "trains nothing"),
        (["--targets", "q_prj"], "roofline: --targets: the model has no matrix 'q_prj'"),
        (["--rank", "100000"], "roofline: --rank 100000: input should be less than or equal to 512"),
        (["--set", "adapter.rank=1000"], "roofline: --set adapter.rank=1000: adapter.rank = 1000: input should"),
        (["--lr", "0"], "roofline: --lr=0.0 cannot be used: give a number, at least 1e-12"),
        (["--lr", "nan"], "roofline: --lr=nan cannot be used: give a number, at least 1e-12"),
        (["--method", "full", "--rank", "8"], "roofline: --rank 8 belongs to lora and dora: --method full trains all"),
        (["--method", "full", "--rslora"], "roofline: --rslora belongs to lora and dora: --method full trains all"),
        (["--method", "full", "--preset", "amd2024"], "roofline: --preset amd2024 is of an adapter, which --method"),
        (["--set", "optimizer.lrr=1"], "unknown key optimizer.lrr"),
        (["--max-seq-len", "8"], "no sample has a target within 8 tokens"),
    ],
)
def test_mistakes_are_named(model: Path, data: Path, tmp_path: Path, words: list[str], message: str) -> None:
    done = call_roofline(["finetune", model, data, "--out", tmp_path / "run", "--precision", "fp32", *words])
    assert done.exit_code in (1, 2)
    assert message in done.stderr
    assert not (tmp_path / "run/log.jsonl").exists()


@pytest.mark.parametrize("preset", ["dell2024", "amd2024"])
def test_presets_say_what_is_otherwise(model: Path, data: Path, tmp_path: Path, preset: str) -> None:
    out = tmp_path / "run"
    done = call_roofline(
        ["finetune", model, data, "--out", out, "--preset", preset, "--steps", 1, *SMALL[:2], "--batch", 2, "--ask", 0]
    )
    assert done.exit_code == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    if preset == "dell2024":
        assert config["precision"] == "amp_bf16"
        assert "preset dell2024 computes in fp16, which this CPU has no fast products of: bf16 instead" in done.stderr
    else:
        assert (config["adapter"]["rank"], config["adapter"]["alpha"]) == (8, 8.0)
        assert config["adapter"]["targets"] == ["q_proj", "v_proj"]
        assert config["optimizer"]["lr"] == 4e-5
        assert "dropout of 0.1" in done.stderr
    assert config["max_duration"] == "1ba"


@pytest.mark.slow
def test_several_processes_take_the_same_steps(model: Path, data: Path, tmp_path: Path) -> None:
    for name, count in (("one", 1), ("two", 2)):
        done = finetune(model, data, tmp_path / name, "--steps", 6, "--nproc", count, "--json")
        assert json.loads(done.stdout)["card"]["devices"] == count
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
