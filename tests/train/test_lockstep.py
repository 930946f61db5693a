"""Collectives that a rank has been in already are left out when it computes its microbatch once more."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.model import tensor_parallel  # noqa: E402
from roofline.train.model.lockstep import Lockstep, is_in_collective  # noqa: E402
from roofline.train.model.tensor_parallel import TensorRanks  # noqa: E402
from roofline.train.parallel import processes  # noqa: E402


def test_collectives_behind_a_rank_are_left_out() -> None:
    lockstep = Lockstep()
    lockstep.begin(behind=2, tokens=5)
    results = [lockstep.call(lambda: "called", lambda: "left out") for _ in range(4)]
    assert results == ["left out", "left out", "called", "called"]
    assert (lockstep.count, lockstep.tokens) == (4, 5)
    lockstep.begin()
    assert lockstep.call(lambda: "called", lambda: "left out") == "called"
    assert (lockstep.count, lockstep.tokens) == (1, None)


def test_a_collective_that_fails_is_not_counted() -> None:
    lockstep = Lockstep()
    with pytest.raises(ValueError) as caught:  # torch's, as there is no process group
        lockstep.call(lambda: torch.distributed.all_reduce(torch.zeros(1)), lambda: None)
    assert lockstep.count == 0
    assert is_in_collective(caught.value)
    with pytest.raises(RuntimeError) as caught_elsewhere:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_in_collective(caught_elsewhere.value)


def test_the_others_get_tensors_of_the_shape_that_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short row of 2 tokens stands for 7: sums over tokens have 7 rows, those of a parameter's gradient its own."""
    shapes: list[tuple[int, ...]] = []

    def reduced(tensor: torch.Tensor, op: str, group: object) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor * 2

    monkeypatch.setattr(tensor_parallel.collectives, "all_reduce", reduced)
    monkeypatch.setattr(tensor_parallel.collectives, "wait_tensor", lambda tensor: tensor)
    group: Any = object()
    ranks = TensorRanks(0, 2, group)
    x, parameter = torch.ones(2, 3), torch.ones(4)
    assert torch.equal(ranks.sum(x), 2 * x)
    ranks.lockstep.begin(behind=1, tokens=7)
    for tensor, per_token in ((x, True), (x, True), (parameter, False)):
        assert ranks.sum(tensor, per_token) is tensor
    assert shapes == [(2, 3), (7, 3), (4,)], "the first one of the short row is left out"


def test_what_was_not_gathered_again_is_zeros() -> None:
    gathered: list[Any] = []
    counted = processes._Counted(Lockstep(), lambda output_tensor, *_, **__: gathered.append(output_tensor))
    counted.lockstep.begin(behind=1, tokens=8)
    first, second = torch.ones(3), torch.ones(3)
    for output in (first, second):
        counted(output_tensor=output, input_tensor=torch.ones(1), group=None)
    assert not first.any()
    assert gathered[0] is second


def test_a_module_whose_copies_have_been_summed_is_not_summed_again() -> None:
    class Module:
        def __init__(self) -> None:
            self.asked: list[bool] = []

        def set_requires_all_reduce(self, value: bool, recurse: bool) -> None:
            assert not recurse
            self.asked.append(value)

    model: Any = Module()
    model.blocks = [Module(), Module()]
    world = processes.World()
    world.lockstep.count = 3
    processes._count_sum(world.lockstep, id(model.blocks[0]), torch.zeros(1))
    with processes.follow(model, world, 7, joins=True):
        assert [module.asked for module in (model, *model.blocks)] == [[True], [False], [True]]
        assert world.lockstep.tokens == 7
        assert [world.lockstep.call(lambda: 1, lambda: 0) for _ in range(4)] == [0, 0, 0, 1]
    assert all(module.asked[-1] for module in (model, *model.blocks))
    assert world.lockstep.tokens is None
    with processes.follow(model, world, 7, joins=False):
        assert world.lockstep.call(lambda: 1, lambda: 0) == 1, "of a later microbatch it has been in none"
        assert all(module.asked[-1] for module in (model, *model.blocks))
