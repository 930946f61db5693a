"""Probes: what they say is what the model computes, whoever computes it, and training does not notice them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.checkpoint import manifest  # noqa: E402
from roofline.train.run.probe import PROBES  # noqa: E402
from roofline.train.run.projection import SIZE, signs, sums  # noqa: E402
from roofline.train.storage.open import open_store  # noqa: E402
from tests.train.probe_runs import LAYERS, LENGTH, VOCAB, probes, train, train_together, write_rows  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Such small models are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, str]:
    """Every tensor of the last checkpoint: the hashes of its pieces."""
    store = open_store(str(folder / "checkpoints"))
    place = manifest.folder(manifest.steps(store)[-1])
    content = json.loads((folder / "checkpoints" / place / "manifest.json").read_text())
    return {name: [piece["xxh3"] for piece in entry["pieces"]] for name, entry in content["tensors"].items()}


def apart(a: dict[str, Any], b: dict[str, Any], kind: str, size: str) -> float:
    """The greatest relative difference of two lines, by their sketches and by their sizes."""
    worst = 0.0
    for x, y in zip(a[kind], b[kind], strict=True):
        assert (x["name"], x["size"]) == (y["name"], y["size"])
        distance = np.linalg.norm(np.array(x["sketch"]) - np.array(y["sketch"]))
        worst = max(worst, float(distance) / x[size], abs(y[size] / x[size] - 1))
    return worst


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"precision": "fp32"}, marks=pytest.mark.slow),
        {"precision": "amp_bf16", "device_train_microbatch_size": 4},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"precision": "amp_fp16"},
                {"fsdp_config": {"activation_checkpointing": True}, "precision": "amp_bf16"},
                {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}, "device_train_microbatch_size": 2},
                {"elastic": {"virtual_shards": 2}},
                {"compile_config": {"backend": "aot_eager"}, "device_train_microbatch_size": 3},
                {"compile_config": {"backend": "aot_eager"}},
            )
        ),
    ],
    ids=["fp32", "bf16", "fp16", "sharded", "sharded-late", "elastic", "compiled", "compiled-auto"],
)
def test_training_is_bit_equal_with_and_without(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with_them, without = train(data, tmp_path / "a", **changes), train(data, tmp_path / "b", probes=False, **changes)
    keys = ("step", "loss", "grad_norm", "loss_scale")
    both = [[[line.get(key) for key in keys] for line in log(folder)[1:]] for folder in (with_them, without)]
    assert both[0] == both[1]
    assert weights(with_them) == weights(without)
    assert not (without / PROBES).exists()
    lines = probes(with_them)
    assert [line["step"] for line in lines] == [0, 2, 3]
    assert all(math.isfinite(part["norm"]) for line in lines for part in line["gradients"])


def test_it_says_what_the_model_computes(data: Path, tmp_path: Path) -> None:
    from roofline.train.config.read import parse_config
    from roofline.train.parallel.processes import World
    from roofline.train.run.gradients import targets
    from roofline.train.run.loop import Run
    from tests.train.probe_runs import mapping

    line = probes(train(data, tmp_path / "a", device_train_microbatch_size=3))[0]
    run = Run(parse_config(mapping(data, tmp_path / "b")), World())
    rows = run.order.batch(0)[:4]
    tokens, documents, _ = run.source.rows(rows)
    seen: list[Any] = []
    run.model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for block in run.model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append(out))
    ids = torch.from_numpy(tokens)
    loss = run.model(ids, torch.from_numpy(targets(tokens, documents))) / (4 * (LENGTH - 1))
    loss.backward()
    seen.append(run.model(ids))
    run.close()
    assert (line["rows"], line["tokens"], line["precision"]) == (rows.tolist(), 4 * (LENGTH - 1), "fp32")
    assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    names = ["embed", *(f"layer {i}" for i in range(LAYERS)), "logits"]
    assert [part["name"] for part in line["activations"]] == names
    for part, x in zip(line["activations"], [*seen[: LAYERS + 1], seen[-1]], strict=True):
        assert part["size"] == x.numel()
        assert part["rms"] == pytest.approx(float(x.detach().square().mean().sqrt()), rel=1e-5)
        assert np.linalg.norm(part["sketch"]) == pytest.approx(part["rms"], rel=0.6)
    squares: dict[str, float] = {}
    for _, param, tensor in run.model.canonical():
        group = f"layer {param.name.split('.')[1]}" if param.name.startswith("layers.") else "embed"
        group = "head" if param.name.startswith("final_norm") else group
        squares[group] = squares.get(group, 0.0) + float(tensor.grad.double().square().sum())
    assert [part["name"] for part in line["gradients"]] == list(squares)
    for part in line["gradients"]:
        assert part["norm"] == pytest.approx(math.sqrt(squares[part["name"]]), rel=1e-5)
        assert np.linalg.norm(part["sketch"]) == pytest.approx(part["norm"], rel=0.6)


def test_ranks_that_share_matrices_count_their_rows_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks of a pair compute the same rows; what they give is summed over both and divided by two."""
    from roofline.train.config.read import parse_config
    from roofline.train.model.tensor_parallel import TensorRanks
    from roofline.train.parallel.processes import World
    from roofline.train.run.loop import Run
    from roofline.train.run.probe import RunProbe
    from tests.train.probe_runs import mapping

    (tmp_path / PROBES).touch()
    run = Run(parse_config(mapping(data, tmp_path, model__n_layers=1, device_train_microbatch_size=6)), World())
    alone = RunProbe(run)._measure(1.0)
    monkeypatch.setattr(World, "_reduce", lambda world, values, op: [world.size * value for value in values])
    for rank in range(2):
        run.model.zero_grad(set_to_none=True)
        run.world = World(rank, 2, tensor=TensorRanks(rank, 2))
        totals = RunProbe(run)._measure(1.0)
        for key, expected in alone.items():
            np.testing.assert_array_equal(totals[key], expected)
    run.close()


@pytest.mark.slow
def test_it_is_the_same_for_all_microbatches_shards_and_compilers(data: Path, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "one": {"device_train_microbatch_size": 1},
        "all": {"device_train_microbatch_size": 6},
        "sharded": {"fsdp_config": {}, "device_train_microbatch_size": 3},
        "compiled": {"compile_config": {"backend": "aot_eager"}, "device_train_microbatch_size": 5},
    }
    for documents in (False, True):
        kept = {"max_duration": "1ba", "save_interval": "0ba", "model__attn_config__attn_uses_sequence_id": documents}
        first = probes(train(data, tmp_path / f"auto{documents}", **kept))[0]
        for name, change in changes.items():
            other = probes(train(data, tmp_path / f"{name}{documents}", **kept, **change))[0]
            assert apart(first, other, "activations", "rms") < 1e-6
            assert apart(first, other, "gradients", "norm") < 2e-6
            assert other["compiled"] == (name == "compiled")
            assert other["loss"] == pytest.approx(first["loss"], rel=1e-6)


@pytest.mark.slow
def test_several_processes_say_what_one_says(data: Path, tmp_path: Path) -> None:
    kept = {"max_duration": "1ba", "save_interval": "0ba"}
    one = probes(train(data, tmp_path / "one", **kept))[0]
    many = probes(train_together(data, tmp_path / "many", 2, device_train_microbatch_size=1, **kept))[0]
    assert (one["processes"], many["processes"]) == (1, 2)
    assert apart(one, many, "activations", "rms") < 1e-6
    assert apart(one, many, "gradients", "norm") < 2e-6


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_what_is_behind_it(data: Path, tmp_path: Path) -> None:
    folder = train(data, tmp_path / "a")
    before = probes(folder)
    at_two = {"load_path": str(folder / "checkpoints" / "step-00000002"), "save_overwrite": True}
    after = probes(train(data, folder, **at_two))
    assert [line["step"] for line in after] == [0, 2, 2, 3]
    assert after[:2] == before[:2]
    for key in ("loss", "activations", "gradients"):
        assert after[2][key] == before[1][key]
        assert after[3][key] == before[2][key]
    (folder / PROBES).write_text((folder / PROBES).read_text()[:-50])  # a crash cut the last line
    assert [line["step"] for line in probes(train(data, folder, **at_two))] == [0, 2, 2, 2, 3]
    train(data, folder, autoresume=True)  # nothing is left to do
    assert [line["step"] for line in probes(folder)] == [0, 2, 2, 2, 3]
    assert [line["step"] for line in probes(train(data, folder, save_overwrite=True))] == [0, 2, 3]


def test_signs_are_the_same_everywhere_and_parts_add_up() -> None:
    golden = [[-1, -1, 1, -1, -1, -1, 1, -1], [1, -1, 1, 1, 1, -1, 1, -1], [1, 1, -1, 1, 1, -1, -1, 1]]
    assert signs("x", 0, 3)[:, :8].tolist() == golden
    whole = signs("x", 0, 200)
    assert set(np.unique(whole)) == {-1.0, 1.0}
    for start, count in ((0, 1), (5, 20), (8, 8), (63, 137)):
        assert np.array_equal(signs("x", start, count), whole[start : start + count])
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    parts = sum(sums("y", x[a:b], a) for a, b in ((0, 13), (13, 14), (14, 50)))
    np.testing.assert_allclose(parts, sums("y", x), rtol=1e-5, atol=1e-5)
    assert not sums("y", x[:0]).any()


def test_a_sketch_tells_lengths_within_its_error() -> None:
    """Spread over many directions an eighth, of rank one twice that: standard deviations over 200 tensors."""
    generator = torch.Generator().manual_seed(1)
    for rank, expected in ((None, 0.125), (1, 0.25)):
        ratios = []
        for number in range(200):
            if rank is None:
                x = torch.randn(20, VOCAB, generator=generator)
            else:
                x = torch.randn(20, 1, generator=generator) @ torch.randn(1, VOCAB, generator=generator)
            found = sums(f"tensor {number}", x)
            assert len(found) == 1 + SIZE
            ratios.append(np.linalg.norm(found[1:]) / math.sqrt(found[0]))
        assert np.mean(np.square(ratios)) == pytest.approx(1, abs=0.12)
        assert np.std(ratios) < 1.15 * expected
