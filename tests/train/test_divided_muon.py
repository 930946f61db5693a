"""Muon where ranks have parts of matrices, beside torch's Muon on the full ones; ranks are threads of this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import multi_threaded_pg as threads  # noqa: E402

from roofline.models.spec import Param  # noqa: E402
from roofline.train.config.schema import ModelSection, OptimizerSection  # noqa: E402
from roofline.train.model.divided_muon import DividedMuon  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.train.model.optim import is_hidden_matrix, optimizer  # noqa: E402
from roofline.train.model.shapes import model_config  # noqa: E402
from roofline.train.model.tensor_parallel import TensorRanks, part  # noqa: E402

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
STEPS = 3


@contextmanager
def thread_group() -> Iterator[None]:
    """Groups of the threads of this process."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads._install_threaded_pg()
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()
        threads.ProcessLocalGroup.reset()


def on_ranks(count: int, act: Callable[[int], None]) -> None:
    """Call `act` with the number of each rank, in a thread that is that rank of a group."""
    store, errors = dist.HashStore(), []

    def rank(number: int) -> None:
        try:
            dist.init_process_group("threaded", rank=number, world_size=count, store=store)
            act(number)
        except BaseException as error:
            errors.append(error)
            threads.ProcessLocalGroup.exception_handle(error)

    with thread_group():
        working = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()
    assert not errors, errors


@pytest.mark.parametrize(
    ("param", "count"),
    [
        (Param("layers.0.up", (96, 32), "column"), 2),
        (Param("layers.0.qkv", (80, 40), "column", parts=(40, 20, 20)), 4),
        (Param("layers.0.k", (24, 48), "column"), 2),
        (Param("layers.0.down", (32, 96), "row"), 3),
        (Param("layers.0.out", (40, 40), "row"), 2),
    ],
)
def test_the_step_of_parts_is_that_of_the_full_matrix(param: Param, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(param.shape, generator=generator) for _ in range(1 + STEPS))
    expected = stepped(start, gradients, lambda p: torch.optim.Muon([p], adjust_lr_fn="match_rms_adamw", **OPTIONS))
    shares = [part(param, TensorRanks(rank, count)) for rank in range(count)]

    def divided(rank: int) -> Callable[[Any], Any]:
        group: Any = dist.group.WORLD  # of this thread
        return lambda p: DividedMuon([(p, shares[rank])], group, **OPTIONS)

    def act(rank: int) -> None:
        mine = [shares[rank].cut(tensor) for tensor in (start, *gradients)]
        moved = stepped(mine[0], mine[1:], divided(rank)) - mine[0]
        of_full = shares[rank].cut(expected - start)
        assert float((moved - of_full).norm() / of_full.norm()) < 0.03  # products are computed in bfloat16
        halves = stepped(mine[0], mine[1:], lambda p: torch.optim.Muon([p], adjust_lr_fn="match_rms_adamw", **OPTIONS))
        assert float((halves - mine[0] - of_full).norm() / of_full.norm()) > 0.1

    on_ranks(count, act)


def stepped(start: Any, gradients: list[Any], make: Callable[[Any], Any]) -> Any:
    """A matrix after steps with these gradients, at falling rates."""
    parameter = torch.nn.Parameter(start.clone())
    made = make(parameter)
    for number, gradient in enumerate(gradients):
        made.param_groups[0]["lr"] = OPTIONS["lr"] / (1 + number)
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach()


def test_a_divided_model_has_its_divided_matrices_stepped_in_full() -> None:
    section = ModelSection(name="mpt_causal_lm", d_model=32, n_heads=4, n_layers=2, vocab_size=96)
    group: Any = object()
    model = Model(model_config(section, 16), "meta", ranks=TensorRanks(0, 2, group))
    made = optimizer(OptimizerSection(name="muon", lr=1e-3), model)
    (divided,) = (each for each in made.parts.values() if isinstance(each, DividedMuon))
    stepped_in_full = {id(tensor): share.shape for tensor, share in divided._parts.items()}
    hidden = {id(tensor): param.shape for _, param, tensor in model.canonical() if is_hidden_matrix(param)}
    assert stepped_in_full == hidden
    assert not any(isinstance(each, torch.optim.Muon) for each in made.parts.values())
