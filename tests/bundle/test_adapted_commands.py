"""roofline generate and chat with an adapter: the texts of a server that has it, and the server's refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.cli.run import prepare
from roofline.common.errors import RooflineError
from roofline.server import serve
from roofline.weights.adapter_gguf import write_gguf_adapter
from roofline.weights.adapters import read_adapter
from roofline.weights.checkpoint import open_checkpoint
from tests.adapter_files import matrices, write_adapter
from tests.bundle.bundle_models import CONFIG
from tests.bundle.receipt_server import ask_server
from tests.command_line import CommandResult, call_roofline

SAMPLING = {"temperature": 0, "max_tokens": 12}
WORDS = ("--temperature", 0, "--max-tokens", 12)
PROMPT = "a quick brown fox"
CHAT: dict[str, Any] = {"model": "own", "messages": [{"role": "user", "content": PROMPT}], **SAMPLING}
Call = Callable[..., CommandResult]


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """A folder of PEFT's files, as a run leaves it."""
    return write_adapter(tmp_path / "run" / "adapter", matrices(CONFIG, 0))


@pytest.fixture
def call(model: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs
    fixed = ("-m", model, "--threads", 1, "--cache-tokens", 512, *WORDS)
    return lambda command, *words, **options: call_roofline([command, *words, *fixed], **options)


def test_they_answer_as_the_server_does(model: Path, adapter: str, call: Call, tmp_path: Path) -> None:
    completion = {"model": "own", "prompt": PROMPT, **SAMPLING}
    served, chatted = ask_server(model, completion, CHAT, adapter=adapter)
    text, answer = served["choices"][0]["text"], chatted["choices"][0]["message"]["content"]
    checkpoint, gguf = open_checkpoint(model), tmp_path / "own.gguf"
    write_gguf_adapter(gguf, checkpoint.config, read_adapter(adapter).matrices)
    for place in (adapter, f"own={adapter}", gguf):
        assert call("generate", PROMPT, "--raw", "--adapter", place).stdout == f"{text}\n", place
    assert call("generate", PROMPT, "--raw").stdout != f"{text}\n", "the model alone says something else"
    whole = call("generate", PROMPT, "--adapter", adapter, "--no-stream")
    assert whole.stdout == f"{answer}\n"
    record = json.loads(call("generate", PROMPT, "--raw", "--adapter", adapter, "--json").stdout)
    assert record["text"] == text
    assert record["fingerprint"].rpartition(".")[2] == read_adapter(adapter).digest[:16]
    assert record["fingerprint"].rpartition(".")[2] == served["system_fingerprint"].rpartition(".")[2]
    alone = call("generate", PROMPT).stdout
    script = f"{PROMPT}\n/reload\n{PROMPT}\n/reload {model}\n{PROMPT}\n"
    talk = call("chat", "--adapter", adapter, input=script)
    again, other = f"{model} with the adapter {adapter} is loaded\n", f"{model} is loaded\n"
    assert talk.stdout == f"{answer}\n{again}{answer}\n{other}{alone}", talk.output


def test_what_a_server_refuses_they_refuse_alike(
    model: Path, adapter: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "it was not refused before anything is loaded"
    monkeypatch.setattr(serve, "listening_on", lambda options, inherited: pytest.fail(late))
    broken = Path(write_adapter(tmp_path / "broken", matrices(CONFIG, 0), bias="all"))
    for words in (
        ("--adapter", "own=" + str(tmp_path / "none")),
        ("--adapter", f"own={broken}"),
        ("--adapter", f"own={Path(adapter).parent}"),
        ("--adapter", f"own={adapter}", "--max-adapters", 0),
        ("--adapter", f"own={adapter}", "--adapter-bytes", 10),
        ("--adapter", f"own={adapter}", "--tp", 2),
    ):
        refused = call_roofline(["serve", model, *words])
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1), refused.output
        plain = [str(word).removeprefix("own=") for word in words]
        for command in (("generate", PROMPT), ("chat",)):
            told = call(*command, *plain)
            assert (told.exit_code, told.stderr) == (1, refused.stderr), (words, told.output)


def test_an_adapter_of_another_model_frees_the_model(
    adapter: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plain = [], prepare.load_llm
    monkeypatch.setattr(prepare, "load_llm", lambda *arguments: loaded.append(plain(*arguments)) or loaded[-1])
    foreign = write_adapter(tmp_path / "foreign", matrices({**CONFIG, "num_hidden_layers": 9}, 0))
    large = write_adapter(tmp_path / "large", matrices(CONFIG, 0, rank=8), r=8)
    for words, cause in ((("--adapter", foreign), "layers.2"), (("--adapter", large, "--max-adapter-rank", 4), "4")):
        refused = call("generate", PROMPT, *words)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert cause in refused.stderr
        with pytest.raises(RooflineError, match="is closed"):
            loaded[-1].generate("x")
