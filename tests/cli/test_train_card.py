"""roofline train card and bench train: what they print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from roofline.train.report.cards import CARD, VERSION
from roofline.train.report.flops import CONVENTIONS
from tests.command_line import call_roofline


def card(**changes: Any) -> dict[str, Any]:
    flops = {"model_flops_per_token": 9.1e9, "hardware_flops_per_token": 9.1e9, "tflops_per_device": 186.7}
    speed = {"tokens_per_s": 164109.0, "tokens_per_s_per_device": 20513.6, "rows_per_s": 80.1, "wait_share": 0.01}
    speed |= {"step_seconds": {"p50": 5.5, "p95": 5.6}, "steps": [3, 12], "left_out": {"steps": 2, "why": ""}}
    return {
        "version": VERSION,
        "conventions": CONVENTIONS,
        "model": {"name": "mpt-1b", "parameters": 1315950592},
        "seq_len": 2048,
        "global_batch": 448,
        "microbatch": 14,
        "grad_accum": 4,
        "devices": 8,
        "device": {"name": "NVIDIA A100-SXM4-80GB", "kind": "cuda"},
        "precision": "amp_bf16",
        "mp_mode": "PURE",
        "sharding": "FULL_SHARD",
        "checkpointing": None,
        "compile": None,
        "speed": speed,
        "flops": {name: flops | {"mfu": 0.598, "hfu": 0.598} for name in CONVENTIONS},
        "peak": {"flops": 312e12, "source": "NVIDIA A100 data sheet, dense", "package": "", "devices": 1},
        "no_peak": None,
        "roof": None,
        "memory": {"predicted": {"total": 60 << 30, "parts": {}}, "measured": 62 << 30},
    } | changes


def called(*words: str) -> tuple[int, str]:
    done = call_roofline(list(words))
    return done.exit_code, done.output


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A run's folder, and a record of bench train."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CARD).write_text(json.dumps(card()))
    (tmp_path / "record.json").write_text(json.dumps({"bench": "train", "card": card(devices=64)}))
    return [str(tmp_path / "run"), str(tmp_path / "record.json")]


def test_cards_stand_side_by_side(two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, said = called("train", "card", *two)
    assert code == 0
    lines = {line[:28].strip(): line[28:].split() for line in said.splitlines()}
    for name, values in {"# Devices": ["8", "64"], "MFU": ["59.80", "59.80"], "NumParams": ["1315950592"] * 2}.items():
        assert next(found[-2:] for key, found in lines.items() if key.startswith(name)) == values
    assert "FLOPs as foundry: 6 N + 12 L d T" in said
    assert "steps 3 to 12, the 2 before left out; NVIDIA A100 data sheet, dense" in said
    assert "FLOPs as matmul" in called("train", "card", two[0], "--convention", "matmul")[1]


def test_json_has_all_of_it(two: list[str]) -> None:
    code, said = called("train", "card", *two, "--json")
    assert code == 0
    assert [found["devices"] for found in json.loads(said)] == [8, 64]


def test_what_cannot_be_compared_is_refused(two: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(card(conventions=CONVENTIONS | {"foundry": "6 N"})))
    code, said = called("train", "card", two[0], str(other))
    assert code == 1
    assert "count FLOPs differently: 'foundry' is" in said
    assert called("train", "card", str(tmp_path / "nowhere"))[0] == 1
    code, said = called("train", "card", two[0], "--convention", "matmull")
    assert code == 2
    assert "did you mean 'matmul'" in said


def test_bench_train_prints_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def bench_train(what: str, changes: list[str], **given: Any) -> dict[str, Any]:
        asked.update(given, what=what, changes=changes)
        return {"bench": "train", "command": "roofline bench train mpt-1b", "card": card()}

    monkeypatch.setattr("roofline.bench.train.bench_train", bench_train)
    out = tmp_path / "record.json"
    code, said = called("bench", "train", "mpt-1b", "--steps", "4", "--set", "precision=fp32", "--json", "-o", str(out))
    assert code == 0
    assert asked == {"what": "mpt-1b", "changes": ["precision=fp32"], "steps": 4, "warmup": 3, "processes": 1}
    assert json.loads(said) == json.loads(out.read_text())
    code, said = called("bench", "train", "mpt-1b")
    assert "again: roofline bench train mpt-1b" in said
    assert called("bench", "train", "mpt-1b", "--convention", "none")[0] == 2
