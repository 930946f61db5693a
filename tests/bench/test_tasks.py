"""Accuracy on tasks: choices by torch's own log-probabilities, the rest by what the model says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="log-probabilities are compared with torch's")

from roofline import LLM, SamplingParams  # noqa: E402
from roofline.bench.quality.tasks import Accuracy, Task, evaluate, read_tasks  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft  # noqa: E402

CHOICES = ["one two", "three", "four?", "yes no maybe"]
QUERIES = ["What is one?", "What is the capital of France?", "user", "two three"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(str(model), threads=1, backend="reference") as llm:
        yield llm


def means(llm: Any, model: Path, query: str) -> list[float]:
    """The mean log-probability of each choice behind a query, from the model as it is trained."""
    from roofline.train.config.read import parse_config
    from roofline.train.model import build
    from roofline.train.model.modules import Model
    from roofline.train.model.shapes import model_config

    section = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(model)}
    run = {"train_loader": {"name": "synthetic"}, "optimizer": {"name": "adamw", "lr": 1}, "max_duration": "1ba"}
    config = parse_config({"max_seq_len": 64, "model": section, "global_train_batch_size": 1, **run})
    trained = Model(model_config(config.model, 64), "cpu")
    build.start(trained, config)
    found = []
    for choice in CHOICES:
        before, ids = llm.encode(query), llm.encode(f"{query} {choice}")
        assert ids[: len(before)] == before
        with torch.no_grad():
            logprobs = trained(torch.tensor([ids]))[0].log_softmax(-1)
        found.append(
            float(sum(logprobs[at - 1, ids[at]] for at in range(len(before), len(ids))) / (len(ids) - len(before)))
        )
    return found


def test_the_choice_with_the_highest_mean_log_probability_is_the_models(llm: Any, model: Path) -> None:
    best = [means(llm, model, query) for query in QUERIES]
    assert len({each.index(max(each)) for each in best}) > 1 or len({tuple(each) for each in best}) > 1
    choices = tuple(f" {choice}" for choice in CHOICES)
    right = [Task("choices", query, choices, each.index(max(each))) for query, each in zip(QUERIES, best, strict=True)]
    wrong = [Task("choices", task.prompt, choices, (task.gold + 1) % 4) for task in right]
    assert evaluate(llm, right)["choices"] == Accuracy(4, 4)
    assert evaluate(llm, [*right, *wrong[:2]])["choices"] == Accuracy(6, 4)


@pytest.mark.slow
def test_continuations_answers_and_chats_are_compared_with_what_the_model_says(llm: Any) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    prompt = "What is one?"
    says = llm.generate(prompt, greedy)[0]
    text = llm.tokenizer.decode([*llm.encode(prompt), *says.ids], skip_special=False)
    tasks = [Task("continuations", prompt, (text.removeprefix(prompt),)), Task("continuations", prompt, (" zzz",))]
    expected = llm.encode(text) == [*llm.encode(prompt), *says.ids]  # else other ids spell the same text
    assert evaluate(llm, tasks)["continuations"] == Accuracy(2, int(expected))
    answer = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=64))[0].text
    words = f"The {answer.strip().upper()}"
    tasks = [Task("answers", prompt, ("zzz", words)), Task("answers", prompt, ("zzz",))]
    assert evaluate(llm, tasks)["answers"].right == 1


def test_a_chat_is_right_to_the_letter(llm: Any) -> None:
    asked: list[list[int]] = []

    def generate(prompts: list[list[int]], params: Any, adapter: str | None) -> list[Any]:
        asked.extend(prompts)
        assert adapter == "digest"
        return [SimpleNamespace(text=" two\n"), SimpleNamespace(text="Two")]

    fake: Any = SimpleNamespace(chat_template=llm.chat_template, tokenizer=llm.tokenizer, generate=generate)
    question = ({"role": "user", "content": "What is one?"},)
    tool = {"type": "function", "function": {"name": "add"}}
    tasks = [
        Task("exact", "", ("two",), messages=question),
        Task("exact", "", ("two",), messages=question, tools=(tool,)),
    ]
    assert evaluate(fake, tasks, "digest") == {"exact": Accuracy(2, 1)}
    assert asked[0] == llm.chat_template.encode_chat(llm.tokenizer, question)
    assert "You can call these functions" in llm.tokenizer.decode(asked[1])


def test_tasks_are_read_from_files(tmp_path: Path) -> None:
    records = [
        {"query": "Which?", "choices": ["x", "y"], "gold": 1},
        {"context": "a b", "continuation": "c"},
        {"context": "q\n", "answer": "a", "aliases": ["b"]},
        sft.question(0),
    ]
    tasks = read_tasks(sft.write_lines(tmp_path / "t.jsonl", records))
    assert tasks == [
        Task("choices", "Which?", (" x", " y"), 1),
        Task("continuations", "a b", (" c",)),
        Task("answers", "q\n", ("a", "b")),
        Task("exact", "", ("two",), messages=({"role": "user", "content": "What is one?"},)),
    ]
    with pytest.raises(ConfigError, match="is a plain text"):
        read_tasks(sft.write_lines(tmp_path / "u.jsonl", [{"text": "x"}]))


def test_the_command(model: Path, tmp_path: Path) -> None:
    path = sft.write_lines(
        tmp_path / "t.jsonl", [{"query": "Which?", "choices": ["x", "y"], "gold": 1}, sft.question(0)]
    )
    done = call_roofline(["bench", "tasks", model, path, "--backend", "reference", "--json"])
    assert done.exit_code == 0, done.stderr
    accuracy = json.loads(done.stdout)["accuracy"]["alone"]
    assert {kind: each["tasks"] for kind, each in accuracy.items()} == {"choices": 1, "exact": 1}
    table = call_roofline(["bench", "tasks", model, path, "--backend", "reference", "--limit", "1"])
    assert "choices" in table.stdout
    assert "exact" not in table.stdout
