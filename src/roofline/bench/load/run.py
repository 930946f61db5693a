"""Runs plans in processes of their own, and reads the events that these write."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from roofline.bench.load.events import Events, read_events
from roofline.bench.load.plan import Plan
from roofline.bench.load.progress import Progress
from roofline.common.errors import ConfigError
from roofline.common.processes import describe_end

OnProgress = Callable[[Progress], None]
PATIENCE = 20.0  # seconds in which a generator that is to end writes its events


def run_plan(plan: Plan, key: str | None = None, on_progress: OnProgress | None = None) -> Events:
    """The events of a plan. key: sent as a bearer token; on_progress: called every half second.

    After Ctrl-C the events up to there, with `head.interrupted`. Raises ConfigError where the generator could not run.
    """
    with tempfile.TemporaryDirectory(prefix="roofline-load-") as folder, tempfile.TemporaryFile("w+") as complaints:
        path = Path(folder) / "plan.json"
        path.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "roofline.bench.load", str(path), *(["--key"] if key else [])]
        command += ["--progress"] if on_progress else []
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        try:
            _follow(process, key, on_progress)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise KeyboardInterrupt from None
        except BaseException:
            process.kill()
            process.wait()
            raise
        complaints.seek(0)
        complaint = complaints.read().strip()
    if process.returncode not in (0, 130):
        cause = complaint.splitlines()[-1] if complaint else describe_end(process.returncode)
        raise ConfigError(f"the load generator could not run: {cause}")
    return read_events(Path(plan.events))


def _follow(process: "subprocess.Popen[str]", key: str | None, on_progress: OnProgress | None) -> None:
    """Give the process its key, and pass on what it tells until it ends."""
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(f"{key}\n" if key else "")
    for line in process.stdout:
        if on_progress is not None:
            on_progress(msgspec.json.decode(line, type=Progress))
    process.wait()
    process.stdout.close()
