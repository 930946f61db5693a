"""A place of a fleet: a socket that outlives processes, and the server that answers on it."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from roofline.common import log
from roofline.common.errors import RooflineError
from roofline.common.json_types import JsonObject
from roofline.common.processes import describe_end
from roofline.deploy.router import FleetRouter
from roofline.deploy.supervisor.figures import ReplicaFigures
from roofline.deploy.supervisor.replica import MARGIN_SECONDS, ReplicaCommand, ReplicaProcess

LOG = log.get("deploy")
BACKLOG = 4096  # connections that wait in the socket while no process takes them
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before the second start in a row, and before each of many
CALM_SECONDS = 60.0  # that a server must have been ready for its failures before to be forgotten
MOST_UNREADY = 3  # starts in a row that a signal ended, of a fleet of which nothing was ever ready

SlotState = Literal["absent", "starting", "ready", "draining", "waiting"]


class ReplicaSlot:
    """Keeps one server running while it is wanted. number: from 1 on; command: how it is started, which a roll changes.

    changed: called when what `to_json` tells has changed; hopeless: called with an error when starting again would not
    help, and nothing of the fleet was ever ready.
    """

    def __init__(
        self,
        *,
        number: int,
        listening: socket.socket,
        command: ReplicaCommand,
        folder: Path,
        router: FleetRouter,
        start_seconds: float,
    ) -> None:
        self.number, self.listening, self.command = number, listening, command
        self.name = f"r{number}"
        self.figures: ReplicaFigures | None = None
        self.restarts = 0
        self.changed: Callable[[], None] = lambda: None
        self.hopeless: Callable[[RooflineError], None] = lambda error: None
        self.spare: Callable[[], bool] = lambda: False  # whether others are ready, so that this one may be left out
        self.ever_ready: Callable[[], bool] = lambda: False
        self.host, self.port = str(listening.getsockname()[0]), int(listening.getsockname()[1])
        self._folder, self._router, self._start_seconds = folder, router, start_seconds
        self._process: ReplicaProcess | None = None
        self._leaving: list[ReplicaProcess] = []
        self._keeping: asyncio.Task[None] | None = None
        self._failures = 0
        self._ready_since: float | None = None
        self._last_end = ""

    @property
    def is_ready(self) -> bool:
        """Whether its server takes requests."""
        return self._process is not None and self._process.is_ready and not self._process.ended.is_set()

    @property
    def is_wanted(self) -> bool:
        """Whether it is to have a server."""
        return self._keeping is not None

    @property
    def state(self) -> SlotState:
        """What it is doing, in a word."""
        if self.is_ready:
            return "ready"
        if self._keeping is None:
            return "draining" if self._leaving else "absent"
        return "waiting" if self._process is None else "starting"

    def to_json(self) -> JsonObject:
        """Return what status tells of it."""
        return {
            "name": self.name,
            "state": self.state,
            "model": self.command.model,
            "pid": None if self._process is None else self._process.pid,
            "host": self.host,
            "port": self.port,
            "cores": list(self.command.cores),
            "restarts": self.restarts,
            "last_end": self._last_end,
            "draining": [process.pid for process in self._leaving],
            "figures": None if self.figures is None or not self.is_ready else self.figures.to_json(),
        }

    def begin(self) -> None:
        """Have a server run here from now on."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    async def retire(self, seconds: float, *, hold: bool = False) -> None:
        """Have no server run here any more; answers that are open may take so long. hold: requests still come, and wait
        in the socket for the next server."""
        self._stop_keeping()
        process, self._process = self._process, None  # at once: a server may be wanted here again before the next line
        await (self._router.hold(self.name) if hold else self._router.disable(self.name))
        if process is not None:
            await self._leave(process, seconds)

    async def replace(self, command: ReplicaCommand, seconds: float, *, drain_first: bool) -> None:
        """Have a server that is started by another command answer here. seconds: that open answers of the earlier one
        may take; drain_first: it ends before the new one is started, as there is no memory for both.

        Raises RooflineError where the new one does not become ready; the earlier one then goes on, or is started again.
        """
        if drain_first:
            self._stop_keeping()
            if self.spare():
                await self._router.disable(self.name)
            earlier, self._process = self._process, None
            if earlier is not None:
                await self._leave(earlier, seconds)
        process = await self._start(command)
        try:
            if not await process.wait_ready(self._start_seconds):
                process.kill()
                await process.ended.wait()
                raise RooflineError(f"the new server of {self.name} did not become ready: {process.child.last_words()}")
        except BaseException:
            process.kill()
            self.begin()
            raise
        self._stop_keeping()
        earlier, self._process, self.command = self._process, process, command
        await self._enable()
        self.begin()
        if earlier is not None:
            await self._leave(earlier, seconds)

    def resident_bytes(self) -> int:
        """Return the memory that its server has to itself."""
        return 0 if self._process is None else self._process.resident_bytes()

    def hurry(self) -> None:
        """Have answers that are open end with an error that clients see."""
        for process in self._processes():
            process.hurry()

    def kill(self) -> None:
        """End all of its processes at once."""
        for process in self._processes():
            process.kill()

    def _processes(self) -> list[ReplicaProcess]:
        return [process for process in (self._process, *self._leaving) if process is not None]

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _keep(self) -> None:
        """Have a server run until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if self._process is None:
                await asyncio.sleep(pause_before(self._failures))
                self._process = await self._start(self.command)
                self.changed()
            process = self._process
            if not process.is_ready:
                if await process.wait_ready(self._start_seconds):
                    await self._enable()
                else:
                    process.kill()  # it takes too long, if it has not ended
            await process.ended.wait()
            if self._ready_since is not None and loop.time() - self._ready_since > CALM_SECONDS:
                self._failures = 0
            self._process, self._ready_since = None, None
            await self._note_end(process)

    async def _note_end(self, process: ReplicaProcess) -> None:
        """Count the end of a server that nobody told to end, and have no requests wait for the next one needlessly."""
        self._last_end = describe_end(process.child.status)
        self._failures += 1
        self.restarts += 1
        self.figures = None
        if self.spare():
            await self._router.disable(self.name)
        self.changed()
        status = process.child.status or 0
        if not process.is_ready and not self.ever_ready() and (status > 0 or self._failures >= MOST_UNREADY):
            self.hopeless(RooflineError(f"{self.name} ended before it was ready: {process.child.last_words()}"))
            return
        LOG.warning("%s ended (%s) and is started again; its log is %s", self.name, self._last_end, process.child.log)

    async def _enable(self) -> None:
        self._ready_since = asyncio.get_running_loop().time()
        await self._router.enable(self.name)
        self.changed()

    async def _start(self, command: ReplicaCommand) -> ReplicaProcess:
        return await ReplicaProcess.start(command, self.listening, self._folder, f"{self.name}.log")

    async def _leave(self, process: ReplicaProcess, seconds: float) -> None:
        """Have a server end with its last answer, at most after so long."""
        self._leaving.append(process)
        process.drain()
        self.changed()
        await process.end(seconds + MARGIN_SECONDS)
        self._leaving.remove(process)
        self.changed()


def pause_before(failures: int) -> float:
    """Return the seconds before a start, after so many ends in a row: none before the first two starts, then 1, 2, 4
    and so on."""
    return 0.0 if failures < 2 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 2))
