"""The loop: it learns, goes on as if never stopped, and says what it cannot do."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint.manifest import encode  # noqa: E402
from roofline.train.data.learn_vocabulary import learn  # noqa: E402
from roofline.train.data.receipts import (  # noqa: E402
    RECEIPTS,
    START,
    ReceiptLog,
    advance,
    compare,
    read,
    verify,
)
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.report.log import RunLog  # noqa: E402
from roofline.train.report.summary import RunReport  # noqa: E402
from roofline.train.run import loop  # noqa: E402
from roofline.train.run.gradients import Gradients  # noqa: E402
from roofline.train.run.loop import Run, train  # noqa: E402
from tests.train.small import LENGTH, VOCAB, config, digest, log_of, steps_of, stored, write_rows  # noqa: E402


class StopError(Exception):
    """What ends a run in the middle."""


def until(step: int) -> Callable[[dict[str, Any]], None]:
    def watch(line: dict[str, Any]) -> None:
        if line.get("step") == step and "loss" in line:
            raise StopError

    return watch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train", 103)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "val", 31, seed=1, documents=True)


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("amp_bf16", "amp_fp16"))]
)
def test_the_loss_falls(data: Path, held_out: Path, tmp_path: Path, precision: str) -> None:
    lines: list[dict[str, Any]] = []
    made = config(
        data,
        tmp_path,
        precision=precision,
        max_duration="60ba",
        optimizer__lr=1e-2,
        scheduler={"name": "cosine_with_warmup", "t_warmup": "5ba", "alpha_f": 0.1},
        eval_loader={"dataset": {"local": str(held_out)}},
        eval_interval="20ba",
        eval_first=True,
        device_eval_batch_size=7,
    )
    finished = train(made, lines.append)
    about, *rest = lines
    steps = [line for line in rest if "loss" in line]
    held = [line for line in rest if "eval_loss" in line]
    assert (about["about"]["steps"], about["about"]["batch_tokens"]) == (60, 12 * LENGTH)
    assert [line["step"] for line in steps] == list(range(1, 61))
    assert [line["step"] for line in held] == [0, 20, 40, 60]
    assert abs(steps[0]["loss"] - math.log(VOCAB)) < 1.5
    assert steps[-1]["loss"] < 1.0 < 4.0 < steps[0]["loss"]
    assert held[-1]["eval_loss"] < held[0]["eval_loss"] - 2
    assert held[-1]["perplexity"] == pytest.approx(math.exp(held[-1]["eval_loss"]))
    assert (finished.steps, finished.loss) == (60, steps[-1]["loss"])
    assert finished.evaluations == {"eval": held[-1]["eval_loss"]}
    assert [line["lr"] for line in steps[:6]] == [pytest.approx(1e-2 * i / 5) for i in range(6)]
    assert steps[-1]["tokens"] == 60 * 12 * LENGTH
    assert log_of(tmp_path) == [
        {k: v for k, v in line.items() if k not in ("seconds", "wait", "tokens_per_s")} for line in rest
    ]
    assert verify(read(tmp_path)) is None
    assert len(read(tmp_path).receipts) == 60
    assert json.loads((tmp_path / "config.json").read_text())["precision"] == precision


WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "decoupled_adamw": {"optimizer": {"name": "decoupled_adamw", "lr": "3e-3", "weight_decay": 1e-2}},
    "muon": {"optimizer": {"name": "muon", "lr": 2e-3, "adamw_lr": 3e-3, "weight_decay": 0.1}},
    "bf16 clipped": {
        "precision": "amp_bf16",
        "algorithms": {"gradient_clipping": {"clipping_threshold": 0.5}},
        "device_train_microbatch_size": 5,
    },
    "fp16": {"precision": "amp_fp16"},
    "deterministic warmup": {
        "deterministic_mode": True,
        "scheduler": {"name": "warmup_stable_decay", "t_warmup": "3ba", "t_decay": "0.5dur"},
    },
}


# "bf16 clipped" resumes with most of what a run can have; the others take their time.
@pytest.mark.parametrize("way", [pytest.param(w, marks=() if w == "bf16 clipped" else pytest.mark.slow) for w in WAYS])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    data: Path, held_out: Path, tmp_path: Path, way: str
) -> None:
    def made(name: str, **changes: Any) -> Any:
        common = {
            "eval_loader": {"dataset": {"local": str(held_out)}},
            "eval_interval": "5ba",
            "save_interval": "4ba",
            "max_duration": "15ba",  # the last step is no multiple of either interval
        }
        return config(data, tmp_path / name, **(common | WAYS[way] | changes))

    train(made("whole"))
    with pytest.raises(StopError):
        train(made("parts", autoresume=True), until(7))
    assert steps_of(tmp_path / "parts" / "checkpoints") == [4]
    assert len(read(tmp_path / "parts").receipts) == 7
    with pytest.raises(StopError):
        train(made("parts", autoresume=True), until(13))
    finished = train(made("parts", autoresume=True))
    assert finished.steps == 15
    ends = [stored(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert digest(ends[0]) == digest(ends[1])
    assert any(name.startswith("optimizer.") for name in ends[0])
    assert "random.cpu" in ends[0]
    assert steps_of(tmp_path / "parts" / "checkpoints") == [4, 8, 12, 15]
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    assert (tmp_path / "whole" / RECEIPTS).read_text() == (tmp_path / "parts" / RECEIPTS).read_text()
    start = stored(tmp_path / "whole" / "checkpoints", 4)
    assert digest(start, "model.") != digest(ends[0], "model."), "it learnt something in between"


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_microbatch_that_was_halved_stays_so_where_bits_matter(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    plain = Gradients.loss

    def limited(self: Gradients, tokens: np.ndarray, documents: np.ndarray | None, *_: object) -> Any:
        if len(tokens) > 3:
            raise RuntimeError("HIP out of memory")
        return plain(self, tokens, documents)

    monkeypatch.setattr(Gradients, "loss", limited)
    train(config(data, tmp_path / "whole", deterministic_mode=exact, save_interval="4ba"))
    made = config(data, tmp_path / "parts", deterministic_mode=exact, save_interval="4ba", autoresume=True)
    with pytest.raises(StopError):
        train(made, until(6))
    monkeypatch.undo()  # now there is memory for all of it
    train(made)
    assert {line["microbatch"] for line in log_of(tmp_path / "whole")} == {3}
    assert [line["microbatch"] for line in log_of(tmp_path / "parts")] == [3] * 4 + [3 if exact else 12] * 4
    ends = [digest(stored(tmp_path / name / "checkpoints")) for name in ("whole", "parts")]
    assert (ends[0] == ends[1]) == exact


def test_autoresume_of_a_finished_run_does_nothing(data: Path, tmp_path: Path) -> None:
    made = config(data, tmp_path, save_interval="4ba", autoresume=True)
    assert train(made).steps == 8
    before = digest(stored(tmp_path / "checkpoints")), (tmp_path / RECEIPTS).read_text(), log_of(tmp_path)
    again = train(made)
    assert (again.steps, math.isnan(again.loss)) == (8, True)
    assert before == (digest(stored(tmp_path / "checkpoints")), (tmp_path / RECEIPTS).read_text(), log_of(tmp_path))


def test_autoresume_starts_where_there_is_nothing(data: Path, tmp_path: Path) -> None:
    assert train(config(data, tmp_path, autoresume=True, max_duration="2ba")).steps == 2


def test_another_folders_checkpoint_is_gone_on_from(data: Path, tmp_path: Path) -> None:
    train(config(data, tmp_path / "a", save_interval="3ba", max_duration="9ba"))
    for name, place in (("named", "a/checkpoints/step-00000006"), ("last", "b/checkpoints")):
        if name == "last":
            train(config(data, tmp_path / "b", save_interval="6ba", max_duration="6ba"))
        path = str(tmp_path / place)
        train(config(data, tmp_path / name, load_path=path, save_interval="9ba", max_duration="9ba"))
        assert steps_of(tmp_path / name / "checkpoints") == [9]
        assert digest(stored(tmp_path / name / "checkpoints")) == digest(stored(tmp_path / "a" / "checkpoints"))
        assert log_of(tmp_path / name) == log_of(tmp_path / "a")[6:]
        compared = compare(read(tmp_path / "a"), read(tmp_path / name))
        assert (compared.steps, compared.step) == (9, None), "its receipts are of the whole run"


@pytest.mark.slow
def test_weights_alone_start_a_new_run(data: Path, held_out: Path, tmp_path: Path) -> None:
    train(config(data, tmp_path / "a", save_interval="40ba", max_duration="40ba"))
    other = write_rows(tmp_path / "other", 50, seed=9)
    made = config(
        other,
        tmp_path / "b",
        load_path=str(tmp_path / "a" / "checkpoints"),
        load_weights_only=True,
        optimizer={"name": "muon", "lr": 1e-4},
        seed=77,
        global_train_batch_size=5,
        eval_loader={"dataset": {"local": str(held_out)}},
        eval_first=True,
    )
    lines: list[dict[str, Any]] = []
    train(made, lines.append)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9)), "from its own beginning"
    assert lines[1]["eval_loss"] < 2.5 < 4.0 < log_of(tmp_path / "a")[0]["loss"]
    fresh: list[dict[str, Any]] = []
    train(config(other, tmp_path / "c", optimizer={"name": "muon", "lr": 1e-4}, seed=77), fresh.append)
    assert fresh[1]["loss"] > 4.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 6}, "seed is 5 there and 6 here"),
        ({"train_loader__dataset__shuffle_seed": 7}, "seed is 5 there and 7 here"),
        ({"global_train_batch_size": 13}, "global_batch is 12 there and 13 here"),
        ({"train_loader__dataset__shuffle": False}, "its data sets are others"),
        pytest.param({"data": 1}, "its data sets are others", marks=pytest.mark.slow),
        ({"model__n_layers": 3}, r"has no model\.transformer\.blocks\.2\..*: it is of another model or optimizer"),
        ({"model__d_model": 48}, r"model\.transformer\..* has shape \[.*\], here it is \[.*\]"),
        (
            {"optimizer": {"name": "muon", "lr": 1e-3}},
            r"trained by optimizer\.name=adamw, whose state muon does not go",
        ),
        (
            {"optimizer": {"name": "decoupled_lionw", "lr": 1e-3}},
            r"trained by optimizer\.name=adamw, whose state decoupled_lionw does not go on from: set it back",
        ),
    ],
)
def test_going_on_from_another_runs_checkpoint_is_refused(
    data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    train(config(data, tmp_path / "a", save_interval="2ba", max_duration="2ba"))
    other = write_rows(tmp_path / "data", 104) if changes.pop("data", None) else data
    for way in ({"load_path": str(tmp_path / "a" / "checkpoints"), "run_folder": str(tmp_path / "b")}, {}):
        made = config(other, tmp_path / "a", autoresume=not way, save_interval="2ba", **(changes | way))
        before = (tmp_path / "a" / "config.json").read_text()
        with pytest.raises(ConfigError, match=message) as caught:
            train(made)
        assert "\n" not in str(caught.value)
        assert (tmp_path / "a" / "config.json").read_text() == before
        assert len(read(tmp_path / "a").receipts) == 2


def test_a_data_set_that_was_swapped_is_refused_when_a_run_goes_on(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other rows in shards of the same sizes, without hashes in their index: only the rows themselves tell."""
    train(config(data, tmp_path / "a", save_interval="2ba", max_duration="2ba"))
    other = write_rows(tmp_path / "data", 103, seed=1)
    assert (other / "index.json").read_bytes() == (data / "index.json").read_bytes()
    place = tmp_path / "a" / "checkpoints"
    with pytest.raises(ConfigError, match=r"rows of step 2 are not those .* its data set was changed"):
        train(config(other, tmp_path / "a", save_interval="2ba", autoresume=True))
    with pytest.raises(ConfigError, match="load_weights_only=true"):
        train(config(other, tmp_path / "b", load_path=str(place)))
    train(config(other, tmp_path / "c", load_path=str(place), load_weights_only=True, max_duration="2ba"))
    compared = compare(read(tmp_path / "a"), read(tmp_path / "c"))
    assert (compared.step, compared.content) == (1, True)
    manifest = place / "step-00000002" / "manifest.json"
    saved = json.loads(manifest.read_text())
    del saved["facts"]["rows"], saved["facts"]["order"]["streams"][0]["identity"]  # as older versions wrote it
    receipt = START
    for step in range(2):
        receipt = advance(receipt, read(tmp_path / "a").order.batch(step))
    saved["facts"]["receipt"] = receipt
    manifest.write_bytes(encode(2, saved["facts"], saved["tensors"]))
    assert "recorded no rows" not in caplog.text
    assert train(config(data, tmp_path / "d", load_path=str(place), max_duration="4ba")).steps == 4
    assert "recorded no rows" in caplog.text
    assert [bool(each) for each in read(tmp_path / "d").digests] == [False, False, True, True]


def test_a_folder_with_another_runs_receipts_is_left_as_it_is(data: Path, tmp_path: Path) -> None:
    train(config(data, tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="receipts of another order of samples"):
        train(config(data, tmp_path, seed=6))
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the data nor the model are touched, and the run has no folder yet."""
    learn(["to be or not to be"], tmp_path / "words", 264)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Run", lambda *_: pytest.fail("a run was built"))
        for name, message in (
            ("nosuch", "tokenizer.name = nosuch: there is no model 'nosuch'"),
            (str(tmp_path), f"tokenizer.name = {tmp_path}: "),
            (str(tmp_path / "words"), "its 264 ids are more than the model's vocabulary of 96"),
        ):
            with pytest.raises(ConfigError) as caught:
                train(config(data, tmp_path / "run", tokenizer={"name": name}))
            assert message in str(caught.value)
        assert not (tmp_path / "run").exists()
    assert train(config(data, tmp_path / "run", tokenizer={"name": "org/elsewhere"}, max_duration="1ba")).steps == 1
    assert "tokenizer.name=org/elsewhere is not here" in caplog.text


def test_a_place_without_checkpoints_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_path: .*nowhere holds no complete checkpoint"):
        train(config(data, tmp_path, load_path=str(tmp_path / "nowhere")))
    place = train(config(data, tmp_path / "run", max_duration="2ba", save_interval="2ba")).folder / "checkpoints"
    with pytest.raises(ConfigError, match="checkpoints has no complete checkpoint of step 5"):
        train(config(data, tmp_path, load_path=str(place / "step-00000005")))


def test_checkpoints_that_are_there_are_not_written_over(data: Path, tmp_path: Path) -> None:
    train(config(data, tmp_path, save_interval="4ba"))
    before = digest(stored(tmp_path / "checkpoints"))
    with pytest.raises(ConfigError, match=r"holds checkpoints up to step 8: autoresume=true .* save_overwrite=true"):
        train(config(data, tmp_path, save_interval="4ba"))
    assert digest(stored(tmp_path / "checkpoints")) == before
    assert len(read(tmp_path).receipts) == 8


@pytest.mark.parametrize("keep", [1, *(pytest.param(keep, marks=pytest.mark.slow) for keep in (-1, 2))])
def test_a_run_that_writes_over_another_is_alone_in_the_end(data: Path, tmp_path: Path, keep: int) -> None:
    """A longer run was there: its later checkpoints are not taken for this one's, nor kept instead of them."""
    train(config(data, tmp_path, save_interval="4ba", max_duration="12ba"))
    changes: dict[str, Any] = {"optimizer__lr": 1e-3, "max_duration": "6ba", "save_num_checkpoints_to_keep": keep}
    train(config(data, tmp_path, save_interval="2ba", save_overwrite=True, **changes))
    assert steps_of(tmp_path / "checkpoints") == {-1: [2, 4, 6], 1: [6], 2: [4, 6]}[keep]
    train(config(data, tmp_path / "alone", save_interval="2ba", **changes))
    assert digest(stored(tmp_path / "checkpoints")) == digest(stored(tmp_path / "alone" / "checkpoints"))


@pytest.mark.parametrize(("keep", "left"), [(-1, [2, 4, 6, 8, 9]), (1, [9]), (3, [6, 8, 9])])
def test_as_many_checkpoints_as_asked_for_are_kept(data: Path, tmp_path: Path, keep: int, left: list[int]) -> None:
    place = tmp_path / "elsewhere" / "{run_name}"
    changes: dict[str, Any] = {"save_num_checkpoints_to_keep": keep, "save_folder": str(place), "run_name": "mine"}
    train(config(data, tmp_path / "run", save_interval="2ba", max_duration="9ba", **changes))
    folder = tmp_path / "elsewhere" / "mine"
    assert steps_of(folder) == left
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in left]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_a_kill_kept_from_being_deleted_goes_when_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    """Also when all its steps were done."""
    made = config(data, tmp_path, save_interval="2ba", autoresume=True, save_num_checkpoints_to_keep=2)
    train(config(data, tmp_path, save_interval="2ba"))
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    (tmp_path / "checkpoints" / "step-00000003" / "0badc0de-00000.bin").write_bytes(b"of an attempt")
    train(made)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("batch", [1, 4, 7, 31, 50])
@pytest.mark.parametrize("apart", [False, True])
def test_evaluation_weights_tokens_whatever_the_batches(
    data: Path, held_out: Path, tmp_path: Path, batch: int, apart: bool
) -> None:
    """31 rows; with documents kept apart they have different numbers of tokens that count."""
    made = config(
        write_rows(tmp_path / "data", 12, documents=True),
        tmp_path / "run",
        eval_loader={"dataset": {"local": str(held_out)}},
        device_eval_batch_size=batch,
        model__attn_config={"attn_uses_sequence_id": apart},
    )
    run = Run(made, World())
    run.log.open(0, 0)
    run.evaluate()
    found = run.evaluations["eval"]["loss"]
    tokens, documents, _ = run.held_out["eval"].rows(range(31))
    with torch.no_grad():
        split = None if documents is None else torch.from_numpy(documents)
        logits = run.model(torch.from_numpy(tokens), documents=split)
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.from_numpy(tokens[:, 1:]).flatten(), reduction="none"
    ).view(31, LENGTH - 1)
    counted = torch.ones_like(losses, dtype=torch.bool)
    if documents is not None:
        counted = torch.from_numpy(documents[:, 1:] == documents[:, :-1])
        assert not counted.all()
    assert found == pytest.approx(losses[counted].mean().item(), rel=1e-5)
    run.close()


def test_an_epoch_counts_the_samples_that_it_is_to(data: Path, tmp_path: Path) -> None:
    made = config(data, tmp_path, train_loader__dataset__epoch_size=36, max_duration="2ep")
    assert train(made).steps == 6


def test_part_of_the_held_out_text(data: Path, held_out: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    made = config(
        data,
        tmp_path,
        eval_loader={"dataset": {"local": str(held_out)}},
        eval_interval="1dur",
        eval_subset_num_batches=2,
        device_eval_batch_size=4,
    )
    train(made, lines.append)
    assert [line["eval_tokens"] for line in lines if "eval_loss" in line] == [8 * (LENGTH - 1)]


def by_hand(
    model: Any, grads: list[dict[str, Any]], rate: float, decay: float, eps: float, betas: Any
) -> dict[str, Any]:
    """AdamW after steps with these gradients. decay: what a weight loses in a step. Kingma and Ba 2015, algorithm 1."""
    one, two = betas
    found = {}
    for name in model:
        x = model[name].astype(np.float64)
        m = v = np.zeros_like(x)
        for t, grad in enumerate(grads, 1):
            g = grad[name].astype(np.float64)
            m, v = one * m + (1 - one) * g, two * v + (1 - two) * g * g
            x = x - decay * x - rate * (m / (1 - one**t)) / (np.sqrt(v / (1 - two**t)) + eps)
        found[name] = x
    return found


@pytest.mark.parametrize("name", ["adamw", "decoupled_adamw"])
def test_optimizers_are_what_they_are_called(data: Path, tmp_path: Path, name: str) -> None:
    """adamw: the weights lose lr * weight_decay; decoupled: weight_decay times the schedule's factor alone."""
    lr, decay, factor = 2e-3, 0.05, 0.5
    made = config(
        data,
        tmp_path,
        optimizer={"name": name, "lr": lr, "weight_decay": decay, "betas": [0.8, 0.9], "eps": 1e-6},
        scheduler={"name": "linear_decay_with_warmup", "alpha_f": factor, "t_max": "1ba"},
    )
    run = Run(made, World())
    run.optimizer.set_factor(factor)
    start = {n: p.detach().numpy().copy() for n, p in run.model.named_parameters()}
    grads = []
    for step in range(3):
        rows = loop.Loader(run.source, run.order, made.train_loader, [(0, 1)], step)
        run.gradients.backward(next(rows))
        rows.close()
        grads.append({n: p.grad.numpy().copy() for n, p in run.model.named_parameters()})
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.optimizer.lr == lr * factor
    lost = factor * (lr * decay if name == "adamw" else decay)
    wanted = by_hand(start, grads, lr * factor, lost, 1e-6, (0.8, 0.9))
    for n, p in run.model.named_parameters():
        moved = np.abs(wanted[n] - start[n]).max()
        assert moved > 1e-3
        assert np.abs(p.detach().numpy() - wanted[n]).max() < 1e-4 * moved, n
    run.close()


def test_muon_takes_the_hidden_matrices(data: Path, tmp_path: Path) -> None:
    run = Run(config(data, tmp_path, optimizer={"name": "muon", "lr": 1e-3, "adamw_lr": 2e-3}), World())
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    by_part = {
        part: {names[p] for group in made.param_groups for p in group["params"]}
        for part, made in run.optimizer.parts.items()
    }
    assert by_part["muon"] | by_part["adamw"] == set(names.values())
    assert not by_part["muon"] & by_part["adamw"]
    assert all("blocks" in name and run.model.get_parameter(name).ndim == 2 for name in by_part["muon"])
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= by_part["adamw"]
    assert len(by_part["muon"]) == 2 * 4
    rates = {part: made.param_groups[0]["lr"] for part, made in run.optimizer.parts.items()}
    assert rates == {"muon": 1e-3, "adamw": 2e-3}
    run.optimizer.set_factor(0.5)
    rates = {part: made.param_groups[0]["lr"] for part, made in run.optimizer.parts.items()}
    assert rates == {"muon": 5e-4, "adamw": 1e-3}
    run.close()


def test_making_the_optimizers_state_changes_no_weight(data: Path, tmp_path: Path) -> None:
    for name in ("adamw", "decoupled_adamw", "muon"):
        run = Run(config(data, tmp_path, optimizer={"name": name, "lr": 1e-3, "weight_decay": 0.1}), World())
        before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        rate = run.optimizer.lr
        run.optimizer.prepare()
        assert run.optimizer.lr == rate
        assert len(list(run.optimizer.states())) == len(before)
        for n, p in run.model.named_parameters():
            assert torch.equal(p, before[n]), (name, n)
            assert p.grad is None
        run.close()


def test_clipped_steps_log_the_norm_before_clipping(data: Path, tmp_path: Path) -> None:
    norms = {}
    for threshold in (None, 1e-3):
        clipping = None if threshold is None else {"clipping_threshold": threshold}
        sgd = {"name": "adamw", "lr": 1e-3, "eps": 1e3}  # so large an eps makes the update linear in the gradient
        folder = tmp_path / str(threshold)
        made = config(data, folder, optimizer=sgd, algorithms={"gradient_clipping": clipping}, save_interval="1ba")
        train(made)
        norms[threshold] = log_of(folder)[0]["grad_norm"], stored(folder / "checkpoints", 1)
    (plain, unclipped), (before, clipped) = norms[None], norms[1e-3]
    assert plain == before > 1
    m = "optimizer.transformer.wte.weight.exp_avg"
    np.testing.assert_allclose(clipped[m], unclipped[m] * (1e-3 / plain), rtol=1e-4)


def test_a_gradient_that_is_not_finite_ends_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Run.step

    def planted(self: Run) -> float:
        if self.progress.step == 5:
            self.model.get_parameter("transformer.wte.weight").data[3, 2] = math.nan
        return plain(self)

    monkeypatch.setattr(Run, "step", planted)
    made = config(data, tmp_path, save_interval="2ba", autoresume=True)
    with pytest.raises(ConfigError, match=r"step 6: the gradient is not finite \(loss nan\).*lower optimizer\.lr"):
        train(made)
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(read(tmp_path).receipts) == 5, "nothing was written of it"
    assert steps_of(tmp_path / "checkpoints") == [2, 4]
    assert all(np.isfinite(tensor).all() for tensor in stored(tmp_path / "checkpoints").values())
    monkeypatch.undo()
    train(made)
    train(config(data, tmp_path / "whole", save_interval="2ba"))
    assert digest(stored(tmp_path / "checkpoints")) == digest(stored(tmp_path / "whole" / "checkpoints"))


@pytest.mark.slow
def test_an_overflow_of_fp16_skips_its_step(data: Path, tmp_path: Path) -> None:
    """A scale of 2^40 overflows until it was halved often enough; the log stays JSON."""
    lines: list[dict[str, Any]] = []
    run = Run(config(data, tmp_path, precision="amp_fp16", max_duration="40ba"), World(), lines.append)
    assert run.gradients.scaler is not None
    run.gradients.scaler.scale = 2.0**40
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    plain, moved = Run.step, []

    def step() -> float:
        loss = plain(run)
        moved.append(any(not torch.equal(p, before[n]) for n, p in run.model.named_parameters()))
        before.update({n: p.detach().clone() for n, p in run.model.named_parameters()})
        return loss

    run.step = step  # type: ignore[method-assign]
    run.fit()
    run.close()
    steps = lines[1:]
    skipped = [line["step"] for line in steps if not math.isfinite(line["grad_norm"])]
    assert skipped == list(range(1, len(skipped) + 1))
    assert 10 < len(skipped) < 40
    assert moved == [False] * len(skipped) + [True] * (40 - len(skipped))
    assert [line["loss_scale"] for line in steps[: len(skipped)]] == [2.0 ** (39 - i) for i in range(len(skipped))]
    assert len({line["loss_scale"] for line in steps[len(skipped) :]}) == 1
    assert all(math.isfinite(line["loss"]) for line in steps)

    def refused(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        found = json.loads(line, parse_constant=refused)
        assert found.get("step", 99) > len(skipped) or found["grad_norm"] is None


def test_fp16_that_no_scale_saves_ends_the_run(data: Path, tmp_path: Path) -> None:
    """Else every step would be skipped until the end."""
    run = Run(config(data, tmp_path, precision="amp_fp16", max_duration="40ba"), World())
    run.model.get_parameter("transformer.wte.weight").data[:] = math.nan
    with pytest.raises(ConfigError, match=r"step 17: the gradient is not finite"):
        run.fit()
    run.close()


@pytest.mark.slow
def test_a_growing_scale(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roofline.train.run.gradients.GROWTH", 3)
    train(config(data, tmp_path / "whole", precision="amp_fp16", max_duration="10ba", save_interval="4ba"))
    scales = [line["loss_scale"] for line in log_of(tmp_path / "whole")]
    assert scales == [2.0 ** (16 + i) for i in (0, 0, 1, 1, 1, 2, 2, 2, 3, 3)]
    made = config(
        data, tmp_path / "parts", precision="amp_fp16", max_duration="10ba", save_interval="4ba", autoresume=True
    )
    with pytest.raises(StopError):
        train(made, until(6))
    train(made)
    assert [line["loss_scale"] for line in log_of(tmp_path / "parts")] == scales, "goes on where it was"


def test_a_log_that_a_crash_cut(data: Path, tmp_path: Path) -> None:
    made = config(data, tmp_path, save_interval="4ba", autoresume=True)
    with pytest.raises(StopError):
        train(made, until(6))
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text()[:-30])
    train(made)
    assert [line["step"] for line in log_of(tmp_path)] == list(range(1, 9))


@pytest.mark.parametrize(
    "name", ["log.jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("receipts.jsonl", "card.json"))]
)
def test_a_full_disk_is_one_line_and_loses_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = config(data, tmp_path / "run", save_interval="2ba", autoresume=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(line: dict[str, Any]) -> None:
        if line.get("step") == 3:
            owner, method = {
                "log.jsonl": (RunLog, "_write"),
                "receipts.jsonl": (ReceiptLog, "add"),
                "card.json": (RunReport, "write"),
            }[name]
            monkeypatch.setattr(owner, method, full)

    with pytest.raises(ConfigError, match=r"run: the disk is full: .*autoresume=true goes on from the last") as caught:
        train(made, fill)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert steps_of(tmp_path / "run" / "checkpoints")[-1] >= 2
    train(made)
    train(config(data, tmp_path / "whole", save_interval="2ba"))
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")
    assert (tmp_path / "run" / RECEIPTS).read_text() == (tmp_path / "whole" / RECEIPTS).read_text()
    with pytest.raises(OSError, match="another"):
        train(config(data, tmp_path / "other"), lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "another")))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mode": "foo"}, r"compile_config\.mode = foo: input should be 'default'"),
        ({"mode": "max-autotune", "backend": "eager"}, "mode=max-autotune belongs to the backend inductor"),
        ({"backend": "inducto"}, "compile_config.backend=inducto: torch has .*did you mean 'inductor'"),
    ],
)
def test_what_torch_cannot_compile_is_refused_before_anything_is_written(
    data: Path, tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        train(config(data, tmp_path / "run", compile_config=section))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("run/*.json*"))


@pytest.mark.parametrize(
    ("interval", "shown"), [("0.25dur", [2, 4, 6, 8]), ("36sp", [3, 6, 8]), ("0ba", range(1, 9)), ("1ep", [8])]
)
def test_what_a_run_shows(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], interval: str, shown: list[int]
) -> None:
    made = config(data, tmp_path, console_log_interval=interval, log_to_console=True)
    console = Console(made)
    console.end(train(made, console.show))
    said = capsys.readouterr()
    first, second, *lines = said.err.splitlines()
    assert "8 steps of 192 tokens, 1 process on cpu" in first
    assert second.startswith("nothing of the weights will be saved: set save_interval or save_folder")
    assert [line.split(":")[0] for line in lines] == [f"step {step}/8" for step in shown]
    assert said.out.startswith("8 steps, loss ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"console_log_interval": "soon"}, "console_log_interval = soon: 'soon' is no duration"),
        ({"max_duration": "0ba"}, "max_duration = 0ba: '0ba' is no length of a run"),
        ({"max_duration": "1dur"}, "max_duration = 1dur: '1dur' is no length of a run"),
        ({"eval_interval": "soon"}, "eval_interval = soon: 'soon' is no duration"),
        ({"model__vocab_size": 90}, r"a row has the id \d+, the model's vocabulary is 90"),
        ({"max_seq_len": 17}, "a row has 16 tokens, max_seq_len is 17"),
        ({"model__n_heads": 5}, "5 heads do not divide d_model=32"),
        ({"model__max_seq_len": 8}, "max_seq_len=16: the model has 8 positions"),
        ({"model__name": "mpt-125m"}, "model.d_model belongs to mpt_causal_lm"),
        ({"train_loader__dataset__split": "train"}, "with split = train: there is no such folder"),
        ({"device": "gpu"}, "device=gpu: torch finds no accelerator"),
    ],
)
def test_runs_that_cannot_start(data: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if changes.get("device") == "gpu" and torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=message) as caught:
        train(config(data, tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", *(pytest.param(s, marks=pytest.mark.slow) for s in ("SHARD_GRAD_OP", "HYBRID_SHARD"))]
)
def test_a_sharded_process_that_is_alone_has_the_gradients_of_all_microbatches(
    data: Path, tmp_path: Path, strategy: str
) -> None:
    common: dict[str, Any] = {"max_duration": "3ba", "device_train_microbatch_size": 3}
    train(config(data, tmp_path / "plain", **common))
    train(config(data, tmp_path / "sharded", fsdp_config={"sharding_strategy": strategy}, **common))
    plain, sharded = (
        [(line["loss"], line["grad_norm"]) for line in log_of(tmp_path / name)] for name in ("plain", "sharded")
    )
    np.testing.assert_allclose(sharded, plain, rtol=1e-5)
