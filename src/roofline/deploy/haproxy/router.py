"""HAProxy as the router of a fleet: its processes, one after the other on the same sockets."""

import asyncio
import contextlib
import csv
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.deploy.children import ChildCommand, ChildProcess, log_tail
from roofline.deploy.haproxy.config import ProxyDescription, haproxy_configuration
from roofline.deploy.haproxy.runtime import RuntimeCommandError, ask_haproxy, order_haproxy

LOG = log.get("deploy")
OLDEST = (2, 6)  # whose `balance hash`, `json_query` and inherited sockets are used
INSTALL = "install it: apt-get install haproxy (Debian, Ubuntu), dnf install haproxy (Fedora), apk add haproxy (Alpine)"
START_SECONDS = 10.0
MOST_CONNECTIONS = 65_536
DESCRIPTORS_BESIDE = 200  # open files of HAProxy that are no connections
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds before it is started again, each time that it ended
CALM_SECONDS = 60.0  # after which its earlier ends are forgotten


def find_haproxy() -> str:
    """Return the path of the program. Raises ConfigError where there is none, or an old one, with what to do."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise ConfigError(f"HAProxy is not installed, and a fleet stands behind it; {INSTALL}")
    answer = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=30).stdout
    version = re.search(r"(?i)ha-?proxy version (\d+)\.(\d+)", answer)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        found_version = answer.partition("\n")[0] or "a version that it does not tell"
        raise ConfigError(f"{program} is {found_version}, and {OLDEST[0]}.{OLDEST[1]} or later is needed; {INSTALL}")
    return program


def most_connections() -> int:
    """Return how many connections HAProxy may have open here: each takes two descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(16, min(MOST_CONNECTIONS, (hard - DESCRIPTORS_BESIDE) // 2))


class HaproxyRouter:
    """HAProxy before the replicas. program: its path; folder: for its configuration, sockets and log; describe: what
    it is to do, asked at each start, whose `runtime_socket` is chosen here; descriptors: its listening sockets."""

    def __init__(
        self, program: str, folder: Path, describe: Callable[[], ProxyDescription], descriptors: tuple[int, ...]
    ) -> None:
        self._program, self._folder, self._describe, self._descriptors = program, folder, describe, descriptors
        self._enabled: dict[str, bool] = {}
        self._held: set[str] = set()  # whose health is not asked for
        self._unchecked: frozenset[str] = frozenset()  # those that were held when the process was started
        self._process: ChildProcess | None = None
        self._leaving: list[ChildProcess] = []  # earlier ones, which end with their last request
        self._watching: asyncio.Task[None] | None = None
        self._generation = 0
        self._changing = asyncio.Lock()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The id of the process that takes requests."""
        return None if self._process is None else self._process.pid

    @property
    def log_file(self) -> Path:
        """Where it writes what it has to say."""
        return self._folder / "haproxy.log"

    async def start(self) -> None:
        """Start it, and keep it running. Raises ConfigError with what HAProxy refuses."""
        async with self._changing:
            self._watch(await self._launch())

    async def enable(self, name: str) -> None:
        """Have requests go to a replica, whatever was known of its health."""
        await self._set(name, True)
        if name in self._unchecked:  # checks that a process was started without cannot be switched on
            await self.reload()

    async def hold(self, name: str) -> None:
        """Have requests go to a replica that does not run: they wait in its socket, and its health is not asked for."""
        await self._set(name, True, held=True)

    async def disable(self, name: str) -> None:
        """Have no more requests go to a replica; those that are open end as they would."""
        await self._set(name, False)

    async def reload(self) -> None:
        """Start another process on the same sockets, and have the earlier one end with its last request."""
        async with self._changing:
            before = self._process
            self._watch(await self._launch())
            if before is not None:
                before.send(signal.SIGUSR1)
                self._leaving = [leaving for leaving in self._leaving if not leaving.ended.is_set()] + [before]

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and end with the last one, at most after so long."""
        if self._watching is not None:
            self._watching.cancel()
        processes = [process for process in (*self._leaving, self._process) if process is not None]
        for process in processes:
            process.send(signal.SIGUSR1)
        await asyncio.gather(*(process.end(seconds) for process in processes))

    def kill(self) -> None:
        """End it at once, with all connections; `stop` then waits for the end alone."""
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            self._leaving, self._process = [*self._leaving, self._process], None
        for process in self._leaving:
            process.send(signal.SIGKILL)

    async def states(self) -> dict[str, str]:
        """Return what HAProxy thinks of each replica: UP, DOWN, MAINT; nothing while it does not answer."""
        try:
            table = await ask_haproxy(self._socket(self._generation), "show stat")
        except RuntimeCommandError:
            return {}
        rows = csv.DictReader(table.removeprefix("# ").splitlines())
        replicas = [row for row in rows if row.get("pxname") == "replicas" and row["svname"] in self._enabled]
        return {row["svname"]: row["status"].split()[0] for row in replicas}

    async def _set(self, name: str, enabled: bool, held: bool = False) -> None:
        async with self._changing:
            self._enabled[name] = enabled
            self._held = self._held | {name} if held else self._held - {name}
            if self._process is None or self._process.ended.is_set():
                return  # it learns of it when it is started again
            server, path = f"replicas/{name}", self._socket(self._generation)
            orders = [f"set server {server} state {'ready' if enabled else 'maint'}"]
            if enabled:
                checks = [] if name in self._unchecked else [f"{'disable' if held else 'enable'} health {server}"]
                orders += [*checks, f"set server {server} health up"]
            try:
                for order in orders:
                    await order_haproxy(path, order)
            except RuntimeCommandError as error:
                LOG.warning("%s", error)

    async def _launch(self) -> ChildProcess:
        """Start a process on the sockets, and return it once it answers. Raises ConfigError."""
        generation = self._generation + 1
        path = self._socket(generation)
        about = self._describe()
        servers = tuple(
            replace(s, enabled=self._enabled.setdefault(s.name, s.enabled), checked=s.name not in self._held)
            for s in about.servers
        )
        configuration = self._folder / "haproxy.cfg"
        text = haproxy_configuration(replace(about, runtime_socket=path, servers=servers))
        configuration.touch(mode=0o600)  # a key may stand in it
        write_atomically(configuration, text)
        configuration.chmod(0o600)
        words = [self._program, "-db", "-f", str(configuration)]
        process = await ChildProcess.start(ChildCommand(words=words, log=self.log_file, descriptors=self._descriptors))
        if not await self._answers(process, path):
            process.send(signal.SIGKILL)
            await process.ended.wait()
            raise ConfigError(f"HAProxy does not start: {configuration}\n{log_tail(self.log_file)}")
        self._socket(self._generation).unlink(missing_ok=True)
        self._generation, self._unchecked = generation, frozenset(self._held)
        return process

    async def _answers(self, process: ChildProcess, path: Path) -> bool:
        end = asyncio.get_running_loop().time() + START_SECONDS
        while not process.ended.is_set() and asyncio.get_running_loop().time() < end:
            with contextlib.suppress(RuntimeCommandError):
                if await ask_haproxy(path, "show info"):
                    return True
            await asyncio.sleep(0.02)
        return False

    def _watch(self, process: ChildProcess, failures: int = 0) -> None:
        """Have a process be the one that takes requests. failures: that came before it, one soon after the other."""
        if self._watching is not None:
            self._watching.cancel()
        self._process = process
        self._watching = asyncio.create_task(self._keep(process, failures))

    async def _keep(self, process: ChildProcess, failures: int) -> None:
        """Start another process where this one ends by itself. Connections wait in the sockets meanwhile."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await process.ended.wait()
        LOG.warning("HAProxy ended by itself: %s", process.last_words())
        failures = 0 if loop.time() - begun > CALM_SECONDS else failures
        while True:
            await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
            failures, self.restarts = failures + 1, self.restarts + 1
            async with self._changing:
                if process is not self._process:
                    return
                try:
                    return self._watch(await self._launch(), failures)
                except ConfigError as error:
                    LOG.error("%s", error)

    def _socket(self, generation: int) -> Path:
        return self._folder / f"haproxy-{generation}.sock"
