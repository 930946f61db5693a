"""The ranks of a model that several processes run together, and what they tell each other (torch.distributed).

Rank 0 is the one an engine sees. The others wait for its batch as long as there is none, but inside a step nobody waits
for longer than `patience`: a rank that is gone, or stuck, is an error on all others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from roofline.backends.base import LostError
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.loopback import gloo_on_loopback, suggest_nccl_loopback
from roofline.ops.collectives import RANK_ORDER
from roofline.program.ir import Share

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store, Work

PATIENCE = 300.0  # seconds; a rank that ended is noticed at once, so this is for stuck ones alone
_FOREVER = timedelta(days=365)
_LOOK = 0.5  # seconds between two looks at the processes while rank 0 waits for them


class RankError(LostError):
    """Another rank is gone or stuck. Nothing can be computed without it: the model must be loaded again."""


@dataclass(frozen=True)
class RankGrid:
    """How many ranks share each layer's matrices (tensor), and how many stages share the layers (pipeline).

    Rank r is tensor rank r % tensor of stage r // tensor. Raises ConfigError on numbers below 1.
    """

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}_parallel={value!r} is not a whole number of at least 1")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    def share(self, rank: int) -> Share:
        """Return which part of the model a rank has."""
        return Share(rank % self.tensor, self.tensor, rank // self.tensor, self.pipeline)


class Ranks:
    """All ranks, seen from one of them; as `group`, those that share its matrices (ops.collectives.RankGroup).

    Args:
        store: where the ranks find each other.
        device: of this rank, as torch names it: tensors there go through NCCL or RCCL, those of the CPU through gloo.
        patience: longest wait for another rank inside a step, in seconds.
        lost: on rank 0, why a rank has failed or ended, or None: gloo may miss that a connection was closed.

    Raises ConfigError where this process has a default process group already: torch allows one.
    """

    def __init__(
        self,
        rank: int,
        grid: RankGrid,
        store: "Store",
        patience: float = PATIENCE,
        device: str = "cpu",
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            raise ConfigError("this process is a rank of something else already: load the model in one of its own")
        self.rank, self.grid, self.share, self.store = rank, grid, grid.share(rank), store
        self.size = grid.tensor
        self._patience, self._device, self._lost_rank = patience, device, lost
        wait = timedelta(seconds=patience)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # what ROCm's torch calls nccl is RCCL
        if device != "cpu":
            suggest_nccl_loopback()
            torch.cuda.set_device(device)
        with self._lost(), gloo_on_loopback():
            dist.init_process_group(backend, store=store, rank=rank, world_size=grid.size, timeout=_FOREVER)
            self._stages: ProcessGroup = dist.new_group(timeout=wait)
            # Everybody takes part in making every group.
            rows = [range(stage * grid.tensor, (stage + 1) * grid.tensor) for stage in range(grid.pipeline)]
            groups = [dist.new_group(list(row), timeout=wait) for row in rows]
        self._tensor: ProcessGroup = groups[self.share.stage]

    def sum(self, x: "Tensor", order: str) -> "Tensor":
        """The sum of x over the ranks that share this one's matrices; order: "rank", or "" for torch's choice."""
        import torch.distributed as dist

        if order not in ("", RANK_ORDER):
            raise UnsupportedError(f"all_reduce in order {order!r}", "ranks do not know it", [RANK_ORDER])
        if not x.numel():
            return x
        if order == RANK_ORDER:
            first, *others_parts = (part.float() for part in self._all(x))
            for other in others_parts:
                first = first + other
            return first.to(x.dtype)
        total = x.clone()
        with self._lost():
            self._finish(dist.all_reduce(total, group=self._tensor, async_op=True))
        return total

    def gather(self, x: "Tensor", widths: Sequence[int]) -> "list[Tensor]":
        """x [rows, widths[rank]] of every rank that shares this one's matrices."""
        from torch.nn.functional import pad

        if not x.numel():
            return [x.new_empty(len(x), width) for width in widths]
        parts = self._all(pad(x, (0, max(widths) - x.shape[1])))  # gloo takes tensors of one shape
        return [part[:, :width] for part, width in zip(parts, widths, strict=True)]

    def send(self, x: "Tensor", to: int) -> None:
        """Hand x to a rank that is to receive it now."""
        import torch.distributed as dist

        if x.numel():
            with self._lost():
                dist.send(x.contiguous(), to, group=self._stages)

    def receive(self, shape: tuple[int, ...], source: int) -> "Tensor":
        """The float32 tensor that a rank sends, on this rank's device."""
        import torch
        import torch.distributed as dist

        x = torch.empty(shape, device=self._device)
        if x.numel():
            with self._lost():
                dist.recv(x, source, group=self._stages)
        return x

    def share_batch(self, buffer: "np.ndarray") -> None:
        """Rank 0's int32 batch buffer on all ranks; the others wait for it as long as it takes."""
        import torch
        import torch.distributed as dist

        with self._lost():
            work = dist.broadcast(torch.from_numpy(buffer), 0, async_op=True)
            # It leaves rank 0 only once the others ask for it: one that is stuck never does.
            if self.rank == 0:
                self._wait(work)
            else:
                work.wait(_FOREVER)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        import torch
        import torch.distributed as dist

        smallest = torch.tensor([number])
        with self._lost():
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest.item())

    def close(self) -> None:
        """Leave. The others' next exchange with this rank fails."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
            # The threads of gloo end with the last reference: one that releases a tensor while the interpreter ends
            # would abort the process.
            del self._stages, self._tensor

    def _finish(self, work: "Work") -> None:
        """Wait for a collective of this rank's device, with NCCL the device's stream and not this thread."""
        if self._device == "cpu":
            self._wait(work)
        else:
            work.wait()

    def _wait(self, work: "Work") -> None:
        """Wait for gloo. Raises RankError where a rank has ended; RuntimeError where the work fails or is late."""
        end = time.monotonic() + self._patience
        while True:
            seconds_left = end - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(_LOOK, seconds_left))))
                return
            except RuntimeError:
                if work.is_completed() or seconds_left <= _LOOK:
                    raise
            if reason := self._lost_rank():
                raise RankError(reason)

    def _all(self, x: "Tensor") -> "list[Tensor]":
        import torch
        import torch.distributed as dist

        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._lost():
            self._finish(dist.all_gather(parts, x, group=self._tensor, async_op=True))
        return parts

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """What torch raises when another rank is gone or late, as a RankError."""
        try:
            yield
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            what = "has not answered in time" if late else "is gone"
            raise RankError(f"rank {self.rank} of {self.grid.size}: another rank {what}") from error
