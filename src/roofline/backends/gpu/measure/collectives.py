"""All-reduce measured on sets of devices through torch.distributed: NCCL or RCCL on GPUs, gloo between CPU processes.

One process for each device, all sets in one run, so that the clocks and the library's choices are the same for all. A
set's first all-reduce is checked against the sum that it must give.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import RooflineError
from roofline.common.loopback import gloo_on_loopback, suggest_nccl_loopback

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_ROUND_BYTES, _ROUND_MOST = 64 << 20, 50  # bytes and all-reduces of one repeat: short ones need many to be timed
_TENSOR_TYPE_BYTES = 4  # float32, which gloo adds as well


@dataclass(frozen=True)
class AllReduceTiming:
    """members: ranks; nbytes: of the tensor; seconds: of one all-reduce in each repeat, at the slowest member."""

    members: tuple[int, ...]
    nbytes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of one all-reduce."""
        return statistics.median(self.seconds)

    @property
    def bus_rate(self) -> float:
        """Bytes a second that each link of a ring would carry, as nccl-tests' bus bandwidth: 2 (n - 1) / n of the
        tensor."""
        return 2 * (len(self.members) - 1) / len(self.members) * self.nbytes / self.median


def measure(
    sets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    processes: int,
    devices: Sequence[int] | None = None,
    repeats: int = 5,
    timeout: float = 300.0,
) -> list[AllReduceTiming]:
    """Time an all-reduce of each of `sizes` bytes on each of `sets`.

    sets: ranks below `processes`, two or more each; devices: torch's number of each rank's device, None for CPU
    processes; timeout: seconds for all of it. Raises RooflineError with a process's last words where one fails.
    """
    with tempfile.TemporaryDirectory(prefix="roofline-links-") as place:
        plan = {
            "sets": [list(members) for members in sets],
            "sizes": list(sizes),
            "processes": processes,
            "devices": None if devices is None else list(devices),
            "repeats": repeats,
            "timeout": timeout,
        }
        (Path(place) / "plan.json").write_text(json.dumps(plan))
        _run(Path(place), processes, timeout)
        times_by_rank = [json.loads((Path(place) / f"rank{rank}.json").read_text()) for rank in range(processes)]
    timings = []
    for at, members in enumerate(sets):
        for nth, nbytes in enumerate(sizes):
            times_by_member = [times_by_rank[rank][f"{at}.{nth}"] for rank in members]
            timings.append(
                AllReduceTiming(
                    tuple(members), nbytes, tuple(max(times) for times in zip(*times_by_member, strict=True))
                )
            )
    return timings


def _run(place: Path, processes: int, timeout: float) -> None:
    """One process a rank; the first that fails, or the end of the time, ends the others."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    running: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout
    try:
        for rank in range(processes):
            with (place / f"rank{rank}.err").open("w") as errors:
                command = [sys.executable, "-m", __name__, str(place), str(rank)]
                running.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=environment))
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            if time.monotonic() > deadline:
                raise RooflineError(f"measuring the links took longer than {timeout:.0f} s")
            time.sleep(0.02)
        failed = next((rank for rank, process in enumerate(running) if process.poll()), None)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if failed is not None:
        words = (place / f"rank{failed}.err").read_text().strip().splitlines() or ["it said nothing"]
        raise RooflineError(f"measuring the links: the process of rank {failed} failed: {words[-1]}")


def _work(place: Path, rank: int) -> None:
    """What each process does."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    plan = json.loads((place / "plan.json").read_text())
    cuda, count = plan["devices"] is not None, plan["processes"]
    if cuda:
        torch.cuda.set_device(plan["devices"][rank])
    device = torch.device("cuda", plan["devices"][rank]) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(str(place / "store"), count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=plan["timeout"]),
    )
    times = {}
    for at, members in enumerate(plan["sets"]):
        group = dist.new_group(members)  # by all ranks, in one order
        for nth, nbytes in enumerate(plan["sizes"]):
            if rank in members:
                times[f"{at}.{nth}"] = _times(group, members, rank, nbytes, plan["repeats"], device)
    (place / f"rank{rank}.json").write_text(json.dumps(times))
    dist.barrier()  # nobody leaves while others still talk to it
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _times(
    group: "ProcessGroup", members: Sequence[int], rank: int, nbytes: int, repeats: int, device: "torch.device"
) -> list[float]:
    """Seconds of one all-reduce, `repeats` times."""
    import torch
    import torch.distributed as dist

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    values = torch.full((max(1, nbytes // _TENSOR_TYPE_BYTES),), float(rank + 1), device=device)  # [numbers]
    dist.all_reduce(values, group=group)
    want = sum(member + 1 for member in members)
    if not bool((values == want).all()):
        raise RuntimeError(f"the all-reduce over ranks {members} is wrong")
    values.zero_()  # sums of it do not grow
    rounds = max(1, min(_ROUND_MOST, _ROUND_BYTES // max(1, nbytes)))
    seconds = []
    for _ in range(repeats + 1):  # the first warms up
        dist.barrier(group=group)
        finish()
        started = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(values, group=group)
        finish()
        seconds.append((time.perf_counter() - started) / rounds)
    return seconds[1:]


if __name__ == "__main__":
    suggest_nccl_loopback()
    with gloo_on_loopback():
        _work(Path(sys.argv[1]), int(sys.argv[2]))
