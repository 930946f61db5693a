"""Which rows of a gradient each rank of a run sums up: every row counts once, however it is sharded and copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from roofline.train.run.probe import _local  # noqa: E402

ROWS = 5


@contextmanager
def rank_of(rank: int, sizes: tuple[int, ...]) -> Iterator[Any]:
    """The mesh of a rank, in a group whose exchanges do nothing."""
    size = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def rows_of(rank: int, sizes: tuple[int, ...], places: tuple[Any, ...], sharded: int) -> tuple[list[float], int]:
    """The rows that a rank sums up, of a tensor whose row i holds i, and the number of the first."""
    with rank_of(rank, sizes) as mesh:
        full = torch.arange(float(ROWS))[:, None].expand(ROWS, 2).contiguous()
        chunks = list(full.chunk(mesh.size(sharded)))
        at = mesh.get_local_rank(sharded)
        local = chunks[at] if at < len(chunks) else full[:0]
        grad = DTensor.from_local(local, mesh, places, run_check=False, shape=full.shape, stride=full.stride())
        mine, first = _local(grad, rank)
        return mine[:, 0].tolist(), first


def test_shards_are_summed_up_where_they_lie() -> None:
    parts = [rows_of(rank, (3,), (Shard(0),), 0) for rank in range(3)]
    assert parts == [([0.0, 1.0], 0), ([2.0, 3.0], 2), ([4.0], 4)]


def test_of_copies_the_first_is_summed_up() -> None:
    """Two copies of two shards: ranks 2 and 3 have what 0 and 1 have."""
    parts = [rows_of(rank, (2, 2), (Replicate(), Shard(0)), 1) for rank in range(4)]
    assert parts == [([0.0, 1.0, 2.0], 0), ([3.0, 4.0], 3), ([], 0), ([], 0)]
    parts = [rows_of(rank, (2, 2), (Shard(0), Replicate()), 0) for rank in range(4)]
    assert parts == [([0.0, 1.0, 2.0], 0), ([], 0), ([3.0, 4.0], 3), ([], 0)]


def test_what_is_divided_otherwise_is_put_together_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.ones(ROWS, 2)
    monkeypatch.setattr(DTensor, "full_tensor", lambda self: whole)
    for rank in range(2):
        with rank_of(rank, (2,)) as mesh:
            for place in (Shard(1), Partial()):
                grad = DTensor.from_local(torch.zeros(ROWS, 1), mesh, (place,), run_check=False)
                mine, first = _local(grad, rank)
                assert (len(mine), first) == (ROWS if rank == 0 else 0, 0)
    assert _local(whole, 1) == (whole, 0), "one that is not divided"
