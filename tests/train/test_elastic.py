"""Sums over ranks in a fixed tree, with the ranks' exchange played by the test; what has no such sums is refused."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import UnsupportedError  # noqa: E402
from roofline.train.model.lockstep import Lockstep  # noqa: E402
from roofline.train.parallel import elastic, processes  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from tests.train import small  # noqa: E402


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_reduced_shard_is_the_tree_over_its_ranks_bit_by_bit(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of such different sizes have another sum in any other order."""
    generator = torch.Generator().manual_seed(ranks)
    inputs = torch.randn(ranks, ranks * 6, generator=generator) * 10.0 ** torch.arange(ranks)[:, None]
    group = object()

    def exchange(received: torch.Tensor, own: torch.Tensor, group: object) -> None:
        assert group is expected_group
        received.copy_(torch.cat([each.view(ranks, -1)[1 % ranks] for each in inputs]))  # rank 1 gets its part of each

    expected_group = group
    monkeypatch.setattr(elastic.dist, "get_world_size", lambda of: ranks if of is group else -1)
    monkeypatch.setattr(elastic.dist, "all_to_all_single", exchange)
    out = torch.empty(2, 3)
    work = elastic.TreeReduceScatter(Lockstep())(out, inputs[1 % ranks].clone(), group, None)
    parts = [each.view(ranks, -1)[1 % ranks] for each in inputs]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    assert work is None
    assert torch.equal(out, parts[0].view(2, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "muon", "lr": 1e-3}}, r"elastic with optimizer\.name=muon"),
        ({"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}}, "elastic with HYBRID_SHARD"),
        ({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, None),
        ({}, None),
    ],
)
def test_what_depends_on_the_number_of_ranks_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    config = small.config(tmp_path, tmp_path, elastic={"virtual_shards": 2}, **changes)
    if message is None:
        elastic.check(config)
    else:
        with pytest.raises(UnsupportedError, match=message):
            elastic.check(config)


@pytest.mark.parametrize("value", [0, 5, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -1])
def test_a_wrapped_sum_is_that_of_the_ranks_modulo_2_to_the_64(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same value, or a process that is alone."""
    monkeypatch.setattr(processes.dist, "all_reduce", lambda total: total.mul_(2))
    assert World(size=2, grouped=True).wrapped_sum(value) == 2 * value % (1 << 64)
    assert World().wrapped_sum(value) == value % (1 << 64)


def test_values_of_ranks_that_share_matrices_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, of which two each share a part of the batch: ranks 2 and 3 have the second one."""

    def reduce(values: torch.Tensor, op: object) -> None:
        values.mul_(4) if op == processes.dist.ReduceOp.SUM else values.add_(1)

    def gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        for rank, each in enumerate(into):
            each.copy_(own + rank)

    monkeypatch.setattr(processes.dist, "all_reduce", reduce)
    monkeypatch.setattr(processes.dist, "all_gather", gather)
    world = World(rank=3, size=4, grouped=True, tensor=processes.TensorRanks(1, 2))
    assert (world.data_rank, world.data_size) == (1, 2)
    assert world.sum([1.5, 2]) == [3.0, 4.0]
    assert world.most([1.5]) == [2.5]
    assert world.gather([0.5, 7]) == [[0.5, 7.0], [2.5, 9.0]]
    alone = World()
    assert (alone.sum([1.5]), alone.most([2]), alone.gather([3.5])) == ([1.5], [2.0], [[3.5]])


@pytest.mark.parametrize(("rank", "collected"), [(0, ["a", "b"]), (1, [])])
def test_rank_0_collects_the_values_of_all(rank: int, collected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(value: str, into: list[str] | None) -> None:
        assert value == "own"
        assert (into is None) == (rank != 0)
        if into is not None:
            into[:] = ["a", "b"][: len(into)]

    monkeypatch.setattr(processes.dist, "gather_object", gather)
    assert World(rank=rank, size=2, grouped=True).collect("own") == collected
    assert World().collect("own") == ["own"]


def test_ranks_ask_for_each_others_failures_only_while_they_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(World, "most", lambda self, values: asked.append(values[0]) or [1.0])
    World(watching=False).agree(True)
    assert not asked
    with pytest.raises(processes.OutOfMemory):
        World(watching=True).agree()
    assert asked == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "gather", "scatter"),
    [
        ({"fsdp_config": {}, "device_train_microbatch_size": 2}, None, None),
        ({"fsdp_config": {}}, ["_Counted"], ["_Counted", "DefaultReduceScatter"]),
        ({"elastic": {"virtual_shards": 2}, "device_train_microbatch_size": 2}, None, ["TreeReduceScatter"]),
        ({"elastic": {"virtual_shards": 2}}, ["_Counted"], ["TreeReduceScatter"]),
    ],
)
def test_how_the_ranks_of_a_run_exchange(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    gather: list[str] | None,
    scatter: list[str] | None,
) -> None:
    """Where the microbatch is found by trying, the exchanges are counted, which a tree does by itself."""
    from roofline.train.run.loop import Run

    gathers: list[list[str]] = []
    scatters: list[list[str]] = []

    def names(each: Any) -> list[str]:
        inner = [type(each.collective).__name__] if isinstance(each, processes._Counted) else []
        return [type(each).__name__, *inner]

    module = processes.FSDPModule
    monkeypatch.setattr(module, "set_custom_all_gather", lambda self, each: gathers.append(names(each)[:1]))
    monkeypatch.setattr(module, "set_custom_reduce_scatter", lambda self, each: scatters.append(names(each)))
    config = small.config(small.write_rows(tmp_path / "data", 20), tmp_path / "run", **changes)
    world = processes.join(config)
    try:
        run = Run(config, world)
        modules = 1 + len(run.model.blocks)
        run.close()
        del run
    finally:
        processes.leave(world)
    assert gathers == [gather] * modules * (gather is not None)
    assert scatters == [scatter] * modules * (scatter is not None)


def test_an_evaluation_leaves_no_parameter_gathered(tmp_path: Path) -> None:
    """The root's parameters stay gathered after a forward pass, until a backward pass or until they are told."""
    from torch.distributed.tensor import DTensor

    from roofline.train.run.loop import Run

    data = small.write_rows(tmp_path / "data", 20)
    config = small.config(data, tmp_path / "run", fsdp_config={}, eval_loader={"dataset": {"local": str(data)}})
    world = processes.join(config)
    try:
        run = Run(config, world)
        run.log.open(0, 0)
        run.evaluate()
        whole = [name for name, parameter in run.model.named_parameters() if not isinstance(parameter, DTensor)]
        run.close()
        del run
    finally:
        processes.leave(world)
    assert not whole
