"""The training bench: the real loop on random rows, and nothing left behind but the record."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bench import train  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.data.synthetic import DOCUMENT, SAMPLES, Synthetic  # noqa: E402
from roofline.train.report import machine  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402

SMALL = "model.config_overrides={width: 32, heads: 2, layers: 2, ffn: 64, vocab: 64}"
CHANGES = [SMALL, "max_seq_len=16", "global_train_batch_size=6", "device_train_microbatch_size=4", "precision=fp32"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measured_roof", lambda *_: {"flops": 1e12, "measured": "matmul 2048^3 in float32"})
    torch.set_num_threads(1)


def test_it_says_what_it_does_and_how_long_that_takes_at_least(capsys: Any) -> None:
    """At the 1 TFLOP/s that the fixture measures; 8 rows of 2,048 tokens where nothing else is said."""
    train.bench_train("mpt-125m", CHANGES, steps=1, warmup=1)
    first = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"mpt-125m: 2 steps of 6 rows of 16 random tokens, \d+ us at least; Ctrl-C stops it", first)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "bench_train", lambda *_, **__: pytest.fail("it was timed"))
    (tmp_path / "file").write_text("")
    for words in (["bench", "train", "-o"], ["profile", "--svg"], ["bench", "latency", "-o"]):
        refused = call_roofline([*words, tmp_path / "file" / "x"])
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr == f"roofline: {tmp_path / 'file' / 'x'}: a part of the path is a file\n"


def test_a_preset_with_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    record = train.bench_train("preset:mpt-125m", CHANGES, steps=3, warmup=1, show=False)
    card = record["card"]
    assert (card["speed"]["steps"], card["speed"]["left_out"]["steps"]) == ([2, 4], 1)
    assert (card["model"]["name"], card["model"]["vocab"], card["seq_len"]) == ("mpt-125m (changed)", 64, 16)
    assert (card["global_batch"], card["microbatch"], card["grad_accum"]) == (6, 4, 2)
    assert "command" not in card
    assert record["command"].startswith(
        "roofline bench train preset:mpt-125m --steps 3 --warmup 1 --set 'model.config_overrides"
    )
    assert json.loads(json.dumps(record)) == record
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_a_runs_file_keeps_all_but_its_data(tmp_path: Path) -> None:
    given = {
        "max_seq_len": 16,
        "model": {"name": "mpt_causal_lm", "d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64},
        "train_loader": {"dataset": {"local": "/nowhere"}, "num_workers": 2},
        "eval_loader": {"dataset": {"local": "/nowhere"}},
        "eval_interval": "1ba",
        "optimizer": {"name": "adamw", "lr": 0.5, "weight_decay": 0.1},
        "max_duration": "1ep",
        "stop_after": "1ba",
        "save_interval": "1ba",
        "autoresume": True,
        "loggers": {"wandb": {}},
        "global_train_batch_size": 4,
        "precision": "fp32",
        "run_folder": str(tmp_path / "mine"),
    }
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    config = train.config_of(str(tmp_path / "run.yaml"), ["seed=9"], tmp_path / "bench", 5, 2)
    assert config["train_loader"] == {"name": "synthetic", "num_workers": 2}
    assert (config["optimizer"]["weight_decay"], config["optimizer"]["lr"], config["seed"]) == (0.1, 1e-4, 9)
    assert (config["max_duration"], config["save_interval"], config["eval_interval"]) == ("7ba", "0ba", "0ba")
    record = train.bench_train(str(tmp_path / "run.yaml"), steps=1, warmup=0, show=False)
    assert record["card"]["model"]["layers"] == 1
    assert not (tmp_path / "mine").exists()


def test_what_there_is_not_is_said() -> None:
    with pytest.raises(ConfigError, match=r"mpt-126m.*did you mean 'mpt-125m'"):
        train.bench_train("mpt-126m")
    with pytest.raises(ConfigError, match="there is no such file"):
        train.bench_train("nowhere.yaml")
    with pytest.raises(ConfigError, match="unknown key modell"):
        train.bench_train("mpt-125m", ["modell.name=x"])


@pytest.mark.e2e
@pytest.mark.slow
def test_two_processes_share_the_steps() -> None:
    record = train.bench_train("mpt-125m", CHANGES, steps=2, warmup=1, processes=2)
    card = record["card"]
    assert (card["devices"], card["microbatch"], card["sharding"]) == (2, 4, "FULL_SHARD")
    assert card["speed"]["tokens_per_s_per_device"] == pytest.approx(card["speed"]["tokens_per_s"] / 2)


def test_random_rows_are_the_same_wherever_they_are_read() -> None:
    source = Synthetic(40, documents=False)
    source.vocab_limit = 7
    rows, documents, trained = source.rows(np.array([5, SAMPLES - 1, 5]))
    assert documents is None
    assert trained is None
    assert rows.shape == (3, 40)
    assert 0 <= rows.min() <= rows.max() < 7
    assert (rows[0] == rows[2]).all()
    assert (rows[0] != rows[1]).any()
    assert (source.rows([SAMPLES - 1])[0][0] == rows[1]).all()
    assert source.order(4, 1).batch(0).tolist() == [0, 1, 2, 3]
    apart = Synthetic(2 * DOCUMENT + 5, documents=True)
    apart.vocab_limit = 7
    found = apart.rows([1, 2])[1]
    assert found is not None
    assert [found[0].tolist().count(i) for i in range(3)] == [DOCUMENT, DOCUMENT, 5]
