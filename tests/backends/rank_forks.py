"""Ranks as processes, forked from one that has everything imported: most of the time of a short run is that."""

import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roofline.backends.parallel.launch import new_file, store_of

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
    file = new_file()
    pids = [_forked(name, rank, work, file, folder) for rank in range(size)]
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(file)  # this process has no store in it
    return not any(ends)


def _forked(name: str, rank: int, work: Work, file: int, folder: Path) -> int:
    """Its process id. file: where the ranks meet."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        store = store_of(file)
        work(name, rank, store, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
