"""A real supervisor and a real HAProxy over stub replicas, as a process of its own.

python -m tests.deploy.stub_fleet MODEL [options of `roofline up`]

STUB_POLICY: the number of replicas that a policy always asks for; STUB_DRAIN_FIRST: there is no memory for two servers.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from roofline.cli.deploy.up import command
from roofline.cli.parser import Parser
from roofline.common import log
from roofline.common.errors import RooflineError
from roofline.deploy.supervisor.autoscaler import FleetReading
from roofline.deploy.supervisor.folder import FleetFolder
from roofline.deploy.supervisor.replica import ReplicaCommand
from roofline.deploy.supervisor.setup import FleetSetup
from roofline.deploy.supervisor.slot import ReplicaSlot
from roofline.deploy.supervisor.supervisor import FleetSupervisor
from roofline.server.options import ServeOptions

STUB = Path(__file__).with_name("stub_replica.py")


@dataclass(frozen=True, kw_only=True)
class StubSetup(FleetSetup):
    """Replicas that are stubs; the model says what they do."""

    def commands(self, model: str | None = None) -> list[ReplicaCommand]:
        model = model or self.serve.model
        return [
            ReplicaCommand(words=[sys.executable, "-I", "-S", str(STUB), model, f"r{number}"], model=model)
            for number in range(1, self.max_count + 1)
        ]


class StubSupervisor(FleetSupervisor):
    """A supervisor of a machine with little memory, where that is asked for."""

    def _drains_first(self, slot: ReplicaSlot) -> bool:
        return "STUB_DRAIN_FIRST" in os.environ or super()._drains_first(slot)


def policy() -> Callable[[FleetReading], int | None] | None:
    count = os.environ.get("STUB_POLICY")
    return None if count is None else lambda reading: int(count)


def main(words: list[str]) -> int:
    read = Parser("up", command).parse(words)
    options = read["fleet"]
    log.configure("info")
    serve = ServeOptions(model=read["model"], request_timeout=read["options"].request_timeout)
    count = options.replicas
    max_count = max(count, options.max_replicas or 1)
    setup = StubSetup(
        options=options,
        serve=serve,
        replicas=count,
        max_count=max_count,
        scaling=replace(read["scaling"], max_replicas=max_count) if options.autoscale else None,
        slots=options.requests_per_replica or 0,
    )
    try:
        asyncio.run(StubSupervisor(setup, FleetFolder(options.name), policy()).run())
    except RooflineError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
