"""Several processes of one run on this machine, by torch's own launcher."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def launch(count: int, config: Path, changes: Sequence[str], out: int | None = None) -> int:
    """Start them and wait; the exit status. When one ends in an error the launcher ends the others.

    out: the file descriptor that their output goes to, None: to ours.
    """
    options = [f"--set={change}" for change in changes]
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    environment = {"OMP_NUM_THREADS": threads} | dict(os.environ)
    return subprocess.call(
        [sys.executable, *command, "-m", "roofline.train", str(config), *options], env=environment, stdout=out
    )
