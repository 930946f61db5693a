"""Runs plans in processes of their own, and reads the events that these write."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from roofline.bench.load.events import Events, read_events
from roofline.bench.load.plan import Plan
from roofline.common.errors import ConfigError
from roofline.common.processes import describe_end

PATIENCE = 20.0  # seconds in which a generator that is to end writes its events


def run_plan(plan: Plan, key: str | None = None) -> Events:
    """The events of a plan. key: sent as a bearer token.

    After Ctrl-C the events up to there, with `head.interrupted`. Raises ConfigError where the generator could not run.
    """
    with tempfile.TemporaryDirectory(prefix="roofline-load-") as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "roofline.bench.load", str(path), *(["--key"] if key else [])]
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, complaint = process.communicate(f"{key}\n" if key else None)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                _, complaint = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise KeyboardInterrupt from None
        except BaseException:
            process.kill()
            process.communicate()
            raise
    if process.returncode not in (0, 130):
        cause = complaint.strip().splitlines()[-1] if complaint.strip() else describe_end(process.returncode)
        raise ConfigError(f"the load generator could not run: {cause}")
    return read_events(Path(plan.events))
