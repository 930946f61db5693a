"""roofline verify and replay: what a server computed is computed again; a changed weight or kernel order is caught."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.cli.run import prepare
from roofline.engine.llm import LLM
from roofline.engine.params import SamplingParams
from tests.adapter_files import matrices, write_adapter
from tests.bundle.bundle_models import CONFIG
from tests.bundle.receipt_server import ask_server
from tests.command_line import CommandResult, call_roofline

BODY = {
    "model": "small", "prompt": ["a quick brown fox, a quick brown fox", "b"], "n": 2, "seed": 4, "max_tokens": 12,
    "stop": "zz", "receipt": True,
}  # fmt: skip
Verify = Callable[..., CommandResult]


@pytest.fixture
def answer(model: Path) -> dict[str, Any]:
    return ask_server(model, BODY)[0]


@pytest.fixture
def adapters(tmp_path: Path) -> list[str]:
    """Two folders of PEFT's files."""
    return [write_adapter(tmp_path / f"adapter{seed}", matrices(CONFIG, seed)) for seed in range(2)]


@pytest.fixture
def verify(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """verify(answer, *options) -> what the command printed and its status."""
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs

    def call(answer: dict[str, Any], *options: object, body: dict[str, Any] = BODY) -> CommandResult:
        (tmp_path / "answer.json").write_text(json.dumps(answer))
        (tmp_path / "body.json").write_text(json.dumps(body))
        fixed = ["--request", tmp_path / "body.json", "-m", model, "--threads", 1, "--cache-tokens", 512]
        return call_roofline(["verify", tmp_path / "answer.json", *fixed, *options])

    return call


def test_the_same_bits_and_what_differs(answer: dict[str, Any], verify: Verify, tmp_path: Path) -> None:
    same = verify(answer)
    assert (same.exit_code, same.stdout) == (
        0,
        "The same bits: 4 answers, 48 steps. The texts beside the receipt are those of its ids. It is not signed: who "
        "computed it is not proven.\n",
    )
    forged = json.loads(json.dumps(answer))
    forged["choices"][2]["text"] += "!"
    caught = verify(forged)
    assert (caught.exit_code, "The text of answer 2 is not that of the receipt's ids" in caught.stdout) == (4, True)
    bare = verify({"receipt": answer["receipt"], "text": "forged"})
    assert (bare.exit_code, "not compared, and only its ids are proven" in bare.stdout) == (5, True)
    stray = json.loads(json.dumps(answer))
    stray["choices"][0] |= {"text": "forged", "message": {"content": stray["choices"][0]["text"]}}
    for changed in (stray, {**answer, "output": []}, {**answer, "choices": None, "answers": answer["choices"]}):
        told = verify(changed, "--json")
        assert (told.exit_code, json.loads(told.stdout)["result"]) == (5, "not compared")
    assert "beside" not in verify(answer["receipt"]).stdout
    changed = json.loads(json.dumps(answer))
    changed["receipt"]["choices"][1]["ids"][3] += 1
    assert verify(changed).exit_code == 4
    (tmp_path / "other.json").write_text(json.dumps(BODY | {"prompt": ["a quick brown fox, a quick brown fox", "c"]}))
    other = verify(answer, "--request", tmp_path / "other.json")
    assert other.exit_code == 4
    assert "Prompt 1 is not that of the receipt" in other.stdout
    (tmp_path / "response.json").write_text(json.dumps({"model": "small", "input": "b", "receipt": True}))
    response = verify(answer, "--request", tmp_path / "response.json")
    assert (response.exit_code, "The request has 1 prompts" in response.stdout) == (4, True)
    (tmp_path / "next.json").write_text(json.dumps({"model": "small", "input": "b", "previous_response_id": "resp_1"}))
    later = verify(answer, "--request", tmp_path / "next.json")
    assert (later.exit_code, '"receipt": "with_prompt"' in later.stderr) == (1, True)
    without = call_roofline(["verify", tmp_path / "answer.json"])
    assert (without.exit_code, "--request" in without.stderr) == (1, True)
    plain = verify(answer, "--backend", "reference", "--arithmetic", "plain")  # sums in torch's order
    assert (plain.exit_code, "--exact" in plain.stderr) == (1, True)
    int8 = json.loads(verify(answer, "--kv-cache-dtype", "int8", "--json").stdout)
    assert (int8["result"], int8["difference"]["what"]) == ("different", "logits")
    assert "The weights are the same, but" in int8["message"]


def test_a_changed_weight_and_a_changed_order_are_caught(
    answer: dict[str, Any], verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both under the fingerprint of the receipt, as a fault has it."""
    plain = prepare.load_llm

    def with_weight(*arguments: Any) -> Any:
        llm = plain(*arguments)
        executable = llm.model.executable
        executable.image.view()[executable.layout.matrix_bytes // 2] ^= 1  # a bit of a matrix
        return llm

    def with_order(*arguments: Any) -> Any:  # of torch's sums
        llm = plain(*arguments)
        llm.model.executable.exact, llm.model.executable.fingerprint = True, answer["receipt"]["fingerprint"]
        return llm

    for fault, options in ((with_weight, ()), (with_order, ("--backend", "reference", "--arithmetic", "plain"))):
        monkeypatch.setattr(prepare, "load_llm", fault)
        caught = verify(answer, *options)
        assert caught.exit_code == 3, caught.output
        assert "its logits have other bits" in caught.stdout
        assert "one of the two computed wrongly" in caught.stdout


def test_a_recording_is_replayed_to_the_same_bits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real model in company, with guesses; another cache format and a folder without ids are told."""
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs
    folder, params = tmp_path / "steps", SamplingParams(max_tokens=6, seed=1, n=2)
    options: dict[str, Any] = {"cache_tokens": 512, "threads": 1, "speculate": "ngram", "speculate_always": True}
    for ids in (True, False):
        with LLM(str(model), record=str(folder / str(ids)), record_ids=ids, **options) as llm:
            llm.generate(["a quick brown fox, a quick brown fox", "b"], params)
    words = ["replay", folder / "True", "-m", model, "--threads", 1]
    same = call_roofline(words)
    assert (same.exit_code, "The same bits in" in same.stdout) == (0, True)
    other = call_roofline([*words, "--kv-cache-dtype", "int8", "--json"])
    told = json.loads(other.stdout)
    assert (other.exit_code, told["same_fingerprint"]) == (3, False)
    assert "other logits in row" in told["first"]
    (steps,) = (folder / "True").iterdir()
    (folder / "True" / "0.steps").write_bytes(steps.read_bytes()[:-30])  # as a crash leaves it, before another file
    cut = call_roofline(words)
    assert (
        cut.exit_code,
        "0.steps, step" in cut.stdout,
        "in the recording, it never ended; here it ran" in cut.stdout,
        "0.steps has no end" in cut.stdout,
        f"{steps.name} has no end" in cut.stdout,
    ) == (5, True, True, True, False)
    without = call_roofline(["replay", folder / "False", "-m", model, "--threads", 1])
    assert (without.exit_code, "bits were not compared" in without.stdout) == (0, True)


def test_an_answer_with_an_adapter_is_computed_again_with_it(
    model: Path, adapters: list[str], verify: Verify, tmp_path: Path
) -> None:
    answer = ask_server(model, {**BODY, "model": "own"}, adapter=adapters[0])[0]
    own = {**BODY, "model": "own"}
    plain = ask_server(model, BODY, adapter=adapters[0])[0]
    assert plain["receipt"]["adapter"] is None
    assert plain["choices"][0]["text"] != answer["choices"][0]["text"]
    same = verify(answer, "--adapter", adapters[0], body=own)
    assert (same.exit_code, "The same bits: 4 answers" in same.stdout) == (0, True), same.output
    assert "not (" not in same.stdout, "the fingerprint is the receipt's"
    missing = verify(answer, body=own)
    assert (missing.exit_code, "name its folder with --adapter" in missing.output) == (1, True)
    other = verify(answer, "--adapter", adapters[1], body=own)
    assert (other.exit_code, "is another adapter" in other.stdout) == (4, True)
    for fits in (same, verify(plain)):  # of one fingerprint, whatever places for adapters there are
        assert (fits.exit_code, "fingerprint" in fits.stdout) == (0, False), fits.stdout
    useless = verify(plain, "--adapter", adapters[0])
    assert (useless.exit_code, "leave --adapter out" in useless.output) == (1, True)


def test_a_recording_with_adapters_is_replayed(
    model: Path, adapters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with two adapters and without, one of them replaced in its slot by another; moved folders are named."""
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs
    folder, params = tmp_path / "steps", SamplingParams(max_tokens=6, seed=1)
    prompts = ["a quick brown fox, a quick brown fox", "b"]
    with LLM(str(model), record=str(folder), record_ids=True, max_adapters=1, cache_tokens=512, threads=1) as llm:
        for path in (*adapters, adapters[0]):
            name = llm.load_adapter(path)
            llm.generate(prompts, params, adapter=name)
            llm.generate(prompts, params)
            llm.unload_adapter(name)
    words = ["replay", folder, "-m", model, "--threads", 1]
    same = call_roofline(words)
    assert (same.exit_code, "The same bits in" in same.stdout) == (0, True), same.output
    assert same.stderr == ""
    Path(adapters[0]).rename(tmp_path / "elsewhere")
    lost = call_roofline(words)
    assert (lost.exit_code, "Name its folder: --adapter FOLDER" in lost.output) == (1, True)
    again = call_roofline([*words, "--adapter", tmp_path / "elsewhere"])
    assert (again.exit_code, "The same bits in" in again.stdout) == (0, True), again.output
    write_adapter(Path(adapters[0]), matrices(CONFIG, 5))
    changed = call_roofline(words)
    assert (changed.exit_code, "its files have changed" in changed.output) == (1, True)
