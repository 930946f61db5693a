"""A run handed from setting to setting."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint import checkpoint, manifest  # noqa: E402
from roofline.train.data import receipts  # noqa: E402
from roofline.train.run import relay as launcher  # noqa: E402
from roofline.train.run.relay import RELAY, Handover, Leg, RelaySetting, relay  # noqa: E402
from roofline.train.run_folder import LOG, read_lines  # noqa: E402
from roofline.train.storage.open import open_store  # noqa: E402
from tests.train import small  # noqa: E402


def written(tmp_path: Path, **changes: Any) -> Path:
    data = small.write_rows(tmp_path / "data", 60)
    held_out = {"eval_loader": {"dataset": {"local": str(data)}}, "eval_subset_num_batches": 3}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(small.mapping(data, tmp_path / "run", **held_out | {"max_duration": "5ba"} | changes)))
    return path


@pytest.mark.slow
def test_a_relay_through_an_object_store_is_one_run(tmp_path: Path, s3: str) -> None:
    from roofline.train.run.loop import train

    path = written(tmp_path, save_folder=s3)
    runners = [
        RelaySetting.parse("one:"),
        RelaySetting.parse("two: nproc=2 device_train_microbatch_size=2 precision=amp_bf16"),
    ]
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


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Legs run here instead of in processes of their own; returns the (processes, changes) they were started with."""
    from roofline.train.config.read import read_config
    from roofline.train.run.loop import train

    legs: list[tuple[int, list[str]]] = []

    def launch(count: int, path: Path, changes: list[str]) -> int:
        legs.append((count, changes))
        return train(read_config(path, changes)).status

    monkeypatch.setattr(launcher, "launch", launch)
    return legs


@pytest.mark.usefixtures("one_thread")
def test_legs_take_turns_and_are_one_run(tmp_path: Path, in_process: list[tuple[int, list[str]]]) -> None:
    path, said = written(tmp_path), list[str]()
    runners = [RelaySetting("a"), RelaySetting("b", 2, ("device_train_microbatch_size=2",))]
    report = relay(path, ["seed=6"], 2, runners, said.append)
    common = ["autoresume=true", "save_interval=1dur", "eval_first=true", "eval_interval=1dur"]
    assert in_process == [
        (1, ["seed=6", *common, "stop_after=2ba"]),
        (2, ["seed=6", "device_train_microbatch_size=2", *common, "stop_after=4ba"]),
        (1, ["seed=6", *common, "stop_after=6ba"]),
    ]
    assert said == ["leg 1, a: from step 0", "leg 2, b: from step 2", "leg 3, a: from step 4"]
    held = {line["step"]: line["eval_loss"] for line in read_lines(tmp_path / "run" / LOG) if "eval_loss" in line}
    assert report.legs == [
        Leg("a", 1, [], 0, 2, [held[0], held[2]]),
        Leg("b", 2, ["device_train_microbatch_size=2"], 2, 4, [held[2], held[4]]),
        Leg("a", 1, [], 4, 5, [held[4], held[5]]),
    ]
    assert report.handovers == [Handover(2, "a", "b", 0.0), Handover(4, "b", "a", 0.0)], "the state is the same"
    assert report.order_steps == 5
    written_legs = json.loads((tmp_path / "run" / RELAY).read_text())
    assert written_legs["every"] == 2
    assert [(leg["from"], leg["to"]) for leg in written_legs["legs"]] == [(0, 2), (2, 4), (4, 5)]
    assert relay(path, ["seed=6"], 2, runners, said.append) == report
    assert len(said) == 3, "a relay that is done is not run again"


@pytest.mark.usefixtures("one_thread")
def test_a_stopped_relay_goes_on_with_the_next_leg(
    tmp_path: Path, in_process: list[tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = written(tmp_path, eval_interval="1ba", autoresume="previous"), list[str]()
    runners = [RelaySetting("a"), RelaySetting("b")]
    with monkeypatch.context() as patch:
        for status, message in ((143, r"leg 1 \(a\) was stopped; the same"), (3, r"leg 1 \(a\) failed; what it said")):
            patch.setattr(launcher, "launch", lambda *_, status=status: status)
            with pytest.raises(ConfigError, match=message):
                relay(path, [], 3, runners, said.append)
    plain = launcher.launch
    ends = iter([0, 130])
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "launch", lambda *words: next(ends) or plain(*words))
        with pytest.raises(ConfigError, match=r"leg 2 \(b\) was stopped"):
            relay(path, [], 3, runners, said.append)
    report = relay(path, [], 3, runners, said.append)
    assert said[-1] == "leg 2, b: from step 3"
    assert [(leg.name, leg.first, leg.last) for leg in report.legs] == [("a", 0, 3), ("b", 3, 5)]
    assert in_process[-1] == (1, ["autoresume=previous", "save_interval=1dur", "eval_first=true", "stop_after=6ba"])


@pytest.mark.usefixtures("one_thread")
def test_a_relay_without_held_out_text_says_no_jump(
    tmp_path: Path, in_process: list[tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, runners = written(tmp_path, eval_loader=None), [RelaySetting("a"), RelaySetting("b")]
    report = relay(path, [], 3, runners, lambda _: None)
    assert report.handovers == [Handover(3, "a", "b", None)]
    assert not any("eval_interval" in word for _, words in in_process for word in words)
    file = tmp_path / "run" / RELAY
    legs = json.loads(file.read_text())
    file.write_text(json.dumps(legs | {"legs": legs["legs"][:1]}))  # it was stopped before the second was noted
    monkeypatch.setattr(launcher, "launch", lambda *_: 0)
    assert relay(path, [], 3, runners, lambda _: None).legs[1:] == report.legs[1:]
    file.write_text(json.dumps(legs | {"legs": [legs["legs"][0] | {"last": 4}]}))
    (tmp_path / "run" / LOG).write_text('{"about": {"steps": 9}}\n{"step": 4, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match="a leg from step 4 on took no step"):
        relay(path, [], 3, runners, lambda _: None)


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
    assert RelaySetting.parse("gpu: nproc=4 device=gpu a.b=c") == RelaySetting("gpu", 4, ("device=gpu", "a.b=c"))
    for text in ("nproc=2", ": nproc=2", "a: nproc=0", "a: nproc=x", "a: fast"):
        with pytest.raises(ConfigError, match="--leg"):
            RelaySetting.parse(text)


def test_what_a_relay_cannot_do_is_said_first(tmp_path: Path) -> None:
    path = written(tmp_path)
    for every, runners in ((2, [RelaySetting("a")]), (0, [RelaySetting("a"), RelaySetting("b")])):
        with pytest.raises(ConfigError, match="needs two runners"):
            relay(path, [], every, runners, print)
    with pytest.raises(ConfigError, match="unknown key optimizr"):
        relay(path, [], 2, [RelaySetting("a"), RelaySetting("b", 1, ("optimizr.lr=1",))], print)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RELAY).write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        relay(path, [], 2, [RelaySetting("a"), RelaySetting("b")], print)
    assert Leg("a", 1, [], 0, 2).held_out == [None, None]
