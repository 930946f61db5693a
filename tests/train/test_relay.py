"""A run handed from setting to setting."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint import checkpoint, manifest  # noqa: E402
from roofline.train.data import receipts  # noqa: E402
from roofline.train.run.relay import RELAY, Leg, Runner, relay  # noqa: E402
from roofline.train.run_folder import LOG, read_lines  # noqa: E402
from roofline.train.storage.open import open_store  # noqa: E402
from tests.train import small  # noqa: E402


def written(tmp_path: Path, **changes: Any) -> Path:
    data = small.write_rows(tmp_path / "data", 60)
    held_out = {"eval_loader": {"dataset": {"local": str(data)}}, "eval_subset_num_batches": 3}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(small.mapping(data, tmp_path / "run", **held_out, max_duration="5ba", **changes)))
    return path


@pytest.mark.slow
def test_a_relay_through_an_object_store_is_one_run(tmp_path: Path, s3: str) -> None:
    from roofline.train.run.loop import train

    path = written(tmp_path, save_folder=s3)
    runners = [Runner.parse("one:"), Runner.parse("two: nproc=2 device_train_microbatch_size=2 precision=amp_bf16")]
    said: list[str] = []
    report = relay(path, [], 2, runners, said.append)
    assert [(leg.name, leg.first, leg.last) for leg in report.legs] == [("one", 0, 2), ("two", 2, 4), ("one", 4, 5)]
    assert report.order_steps == 5
    assert manifest.steps(open_store(s3)) == [2, 4, 5]
    for handover in report.handovers:
        assert handover.jump is not None
        assert abs(handover.jump) < 0.02
    whole = small.config(tmp_path / "data", tmp_path / "whole", max_duration="5ba")
    train(whole)
    assert receipts.compare(receipts.read(tmp_path / "run"), receipts.read(tmp_path / "whole")).step is None
    a, b = ([x["loss"] for x in read_lines(tmp_path / n / LOG) if "loss" in x] for n in ("run", "whole"))
    assert a == pytest.approx(b, rel=0.02)
    assert relay(path, [], 2, runners, said.append).legs == report.legs, "a relay that is done is not run again"
    assert len(said) == 3


def test_state_that_changed_by_one_bit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.train.run.loop import train

    data = small.write_rows(tmp_path / "data", 60)
    train(small.config(data, tmp_path / "run", max_duration="4ba", save_interval="2ba"))
    plain = checkpoint.load

    def bent(store: Any, step: int, held: dict[str, Any], *rest: Any) -> None:
        plain(store, step, held, *rest)
        held["optimizer.transformer.norm_f.bias.exp_avg_sq"].chunks[0][1].view(torch.int32)[-1] ^= 1

    monkeypatch.setattr(checkpoint, "load", bent)
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(ConfigError, match="the state at step 2 is not what was saved"):
        train(small.config(data, tmp_path / "b", max_duration="4ba", load_path=str(folder)))


def test_runners_are_read_and_refused_by_word() -> None:
    assert Runner.parse("gpu: nproc=4 device=gpu a.b=c") == Runner("gpu", 4, ("device=gpu", "a.b=c"))
    for text in ("nproc=2", ": nproc=2", "a: nproc=0", "a: nproc=x", "a: fast"):
        with pytest.raises(ConfigError, match="--leg"):
            Runner.parse(text)


def test_what_a_relay_cannot_do_is_said_first(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ConfigError, match="needs two runners"):
        relay(path, [], 2, [Runner("a")], print)
    with pytest.raises(ConfigError, match="unknown key optimizr"):
        relay(path, [], 2, [Runner("a"), Runner("b", 1, ("optimizr.lr=1",))], print)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RELAY).write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        relay(path, [], 2, [Runner("a"), Runner("b")], print)
    assert Leg("a", 1, [], 0, 2).held_out == [None, None]
