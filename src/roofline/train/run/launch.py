"""Starts several processes of one run on this machine with torch's launcher."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def launch(count: int, config: Path, changes: Sequence[str], out: int | None = None) -> int:
    """Start `count` processes and wait; returns the exit status. If one fails, the launcher ends the others.

    out: the file descriptor for their standard output; None: that of this process.
    """
    options = [f"--set={change}" for change in changes]
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    environment = {"OMP_NUM_THREADS": threads} | dict(os.environ)
    return subprocess.call(
        [sys.executable, *command, "-m", "roofline.train", str(config), *options], env=environment, stdout=out
    )
