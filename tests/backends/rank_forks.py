"""Ranks as processes, forked from one that has everything imported: most of the time of a short run is that."""

import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roofline.backends.parallel.launch import store_of

Work = Callable[[str, int, Any, Path], None]  # (case, rank, store, folder for results)


class Unwatched:
    """The parent looks after the processes."""

    def reason(self) -> None:
        return None

    def close(self, wait: float) -> None:
        pass


def run_cases(sizes: Mapping[str, int], work: Work, folder: Path) -> bool:
    """`work` in as many processes as each case has ranks, one case after the other; whether any did not end well."""
    fine = [_case(name, size, work, folder) for name, size in sizes.items()]  # all of them, though one fails
    return not all(fine)


def _case(name: str, size: int, work: Work, folder: Path) -> bool:
    pipes = [os.pipe() for _ in range(size - 1)]
    pids = [_forked(name, rank, work, pipes, folder) for rank in range(size)]
    for pipe in pipes:
        for end in pipe:
            os.close(end)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    return not any(ends)


def _forked(name: str, rank: int, work: Work, pipes: list[tuple[int, int]], folder: Path) -> int:
    """Its process id. Rank 0 makes the store and tells the others its port."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if rank == 0:
            store = store_of()
            for _, write in pipes:
                os.write(write, str(store.port).encode())  # type: ignore[attr-defined]
        else:
            store = store_of(int(os.read(pipes[rank - 1][0], 16)))
        work(name, rank, store, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
