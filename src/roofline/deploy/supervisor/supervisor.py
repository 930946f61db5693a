"""The process behind `roofline up`: it holds the sockets, and keeps servers and the proxy running behind them."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from roofline.common import log
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.files import cause_of, read_regular
from roofline.common.json_types import JsonObject
from roofline.common.units import now_utc
from roofline.deploy.children import bound_log
from roofline.deploy.haproxy.config import ProxyDescription, ProxyServer
from roofline.deploy.haproxy.router import HaproxyRouter, find_haproxy, most_connections
from roofline.deploy.supervisor.autoscaler import RECORD, Autoscaler, FleetReading
from roofline.deploy.supervisor.control import ControlServer, Tell
from roofline.deploy.supervisor.figures import read_figures
from roofline.deploy.supervisor.folder import FleetFolder
from roofline.deploy.supervisor.metrics import FleetMetrics
from roofline.deploy.supervisor.replica import ReplicaCommand
from roofline.deploy.supervisor.setup import LOOPBACK, FleetSetup
from roofline.deploy.supervisor.slot import BACKLOG, ReplicaSlot
from roofline.hardware.detect import detect
from roofline.server.keys import Keys

LOG = log.get("deploy")
MAX_CERTIFICATE_BYTES = 1 << 20
SPARE_SHARE = 1.25  # of what a server has in memory must be free for another one to be started beside it
READING_SECONDS = 1.0
HURRY_SECONDS = 5.0  # for the last errors of answers that are cut off to be sent


class FleetSupervisor:
    """A fleet that runs until it is told to end. policy: asked each second how many replicas there should be, in place
    of the setup's scaling; None for as many as there are."""

    def __init__(
        self, setup: FleetSetup, folder: FleetFolder, policy: Callable[[FleetReading], int | None] | None = None
    ) -> None:
        self._setup, self._folder, self._policy = setup, folder, policy
        self._model = setup.serve.model
        self._slots: list[ReplicaSlot] = []
        self._changing = asyncio.Lock()  # one roll, or one change of the number of replicas, at a time
        self._stopping, self._killing = asyncio.Event(), asyncio.Event()
        self._failure: RooflineError | None = None
        self._ever_ready = False
        self._started = now_utc()
        self._is_knocked = False  # a request came while no server runs
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run the fleet until SIGTERM, SIGINT or `roofline down`; at the second one it ends at once.

        Raises ConfigError for ports that are taken and for what HAProxy refuses, RooflineError where no server ever
        became ready, with the reason.
        """
        program = find_haproxy()
        self._folder.acquire()
        try:
            self._listen(program)
            self._heed_signals()
            control = ControlServer(self._folder.control, self._handle)
            try:
                await self._router.start()
                await control.start()
                await self._serve()
            finally:
                await self._end()
                control.close()
        finally:
            self._folder.release()
        if self._failure is not None:
            raise self._failure

    # Starting.

    def _listen(self, program: str) -> None:
        """Bind all sockets before anything is started: an address that is taken should cost nothing."""
        options, path = self._setup.options, self._folder.path
        self._front = bind(options.host, options.port, "--port")
        self._statistics = bind(LOOPBACK, options.statistics_port, "--statistics-port")
        keys = Keys(self._setup.serve.api_key, self._setup.serve.api_keys)
        metrics_socket = bind(LOOPBACK, options.metrics_port, "--metrics-port")
        self._metrics = FleetMetrics(metrics_socket, options.host, self._setup.key, keys)
        if self._setup.scaling is not None and self._policy is None:
            record = path / RECORD
            record.unlink(missing_ok=True)  # of a fleet before this one, whose decisions are others
            self._policy = Autoscaler(self._setup.scaling, self._setup.slots, self._metrics.latencies, record)
        self.address = (
            f"{'http' if options.tls_certificate is None else 'https'}://{_written(options.host, self._front)}"
        )
        self._statistics_address = f"http://{_written(LOOPBACK, self._statistics)}"
        descriptors = (self._front.fileno(), self._statistics.fileno())
        self._router = HaproxyRouter(program, path, self._describe, descriptors)
        for number, command in enumerate(self._setup.commands(), 1):
            port = options.replica_port + number - 1 if options.replica_port else 0
            listening = bind(LOOPBACK, port, "--replica-port")
            slot = ReplicaSlot(
                number=number,
                listening=listening,
                command=command,
                folder=path,
                router=self._router,
                start_seconds=options.start_timeout,
            )
            slot.changed, slot.hopeless = self._note, self._give_up
            slot.ever_ready = lambda: self._ever_ready
            slot.spare = lambda slot=slot: any(other.is_ready for other in self._slots if other is not slot)  # type: ignore[misc]
            self._slots.append(slot)

    def _describe(self) -> ProxyDescription:
        """What HAProxy is to do: its sockets are those that it inherits, from descriptor 3 on."""
        enabled_slots = [slot.is_wanted or slot.number <= self._setup.replicas for slot in self._slots]
        servers = tuple(
            ProxyServer(slot.name, slot.host, slot.port, enabled)
            for slot, enabled in zip(self._slots, enabled_slots, strict=True)
        )
        return self._setup.proxy(servers, "fd@3", "fd@4", self._certificate(), most_connections(), self._metrics.port)

    def _certificate(self) -> Path | None:
        """The file that HAProxy reads: chain and key in one, which only this user can read."""
        certificate, key = self._setup.options.tls_certificate, self._setup.options.tls_key
        if certificate is None or key is None:
            return None
        path = self._folder.path / "proxy.pem"
        path.touch(mode=0o600)
        path.write_bytes(b"\n".join(read_regular(part, MAX_CERTIFICATE_BYTES) for part in (certificate, key)))
        return path

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._tasks.append(loop.create_task(self._reload())))

    def stop(self) -> None:
        """End the fleet: what runs may finish; called again, at once."""
        if self._stopping.is_set():
            self._killing.set()
        self._stopping.set()

    async def _reload(self) -> None:
        try:
            await self._router.reload()
        except ConfigError as error:
            LOG.error("%s", error)

    # Running.

    async def _serve(self) -> None:
        names = ", ".join(str(slot.port) for slot in self._slots[: self._setup.replicas])
        log.say(f"Listening on {self.address}; replicas on {names}; statistics on {self._statistics_address}")
        for slot in self._slots[: self._setup.replicas]:
            slot.begin()
        self._note()
        for running in (self._read(), self._metrics.run()):
            task = asyncio.create_task(running)
            task.add_done_callback(_say_failure)
            self._tasks.append(task)
        await self._stopping.wait()

    @property
    def _wanted_slots(self) -> list[ReplicaSlot]:
        return [slot for slot in self._slots if slot.is_wanted]

    def _note(self) -> None:
        """Write down what has changed, and say once that all are ready."""
        ready = [slot for slot in self._slots if slot.is_ready]
        if ready and not self._ever_ready:
            log.say(f"Ready: {self._setup.served_name}, the first of {len(self._wanted_slots)} replicas")
        self._ever_ready = self._ever_ready or bool(ready)
        self._metrics.follow(self._slots)
        with suppress(OSError):  # a full disk ends no fleet
            self._folder.write_state(self.to_json())

    def _give_up(self, error: RooflineError) -> None:
        self._failure = error
        self._stopping.set()
        self._killing.set()

    async def _read(self) -> None:
        """Read what replicas tell of themselves each second, ask the policy, and bound the logs."""
        while True:
            await asyncio.sleep(READING_SECONDS)
            ready = [slot for slot in self._slots if slot.is_ready]
            readings = await asyncio.gather(
                *(
                    asyncio.to_thread(read_figures, slot.host, slot.port, self._setup.key, slot.figures)
                    for slot in ready
                )
            )
            for slot, figures in zip(ready, readings, strict=True):
                slot.figures = figures or slot.figures
            for path in (*(self._folder.path / f"{slot.name}.log" for slot in self._slots), self._router.log_file):
                bound_log(path)
            self._metrics.refresh()
            await self._ask_policy()

    async def _ask_policy(self) -> None:
        if self._policy is None or self._changing.locked():
            return
        figures = [slot.figures for slot in self._slots if slot.is_ready and slot.figures is not None]
        knocking, self._is_knocked = int(self._is_knocked), False
        ready = sum(slot.is_ready for slot in self._slots)
        count = self._policy(FleetReading(len(self._wanted_slots), ready, figures, knocking))
        if count is not None and count != len(self._wanted_slots):
            self._tasks.append(asyncio.create_task(self._scale_quietly(count)))

    def _knock(self) -> None:
        """Ask the policy at once: a request waits in the first socket, and no server runs."""
        asyncio.get_running_loop().remove_reader(self._slots[0].listening)
        if self._stopping.is_set():
            return
        self._is_knocked = True
        self._tasks.append(asyncio.create_task(self._ask_policy()))

    async def _scale_quietly(self, count: int) -> None:
        try:
            await self.scale(count)
        except RooflineError as error:
            LOG.warning("%s", error)

    # What commands ask for.

    async def _handle(self, command: JsonObject, tell: Tell) -> JsonObject:
        match command:
            case {"command": "status"}:
                return self.to_json(await self._router.states())
            case {"command": "down", **further}:
                self.stop()
                if further.get("now"):
                    self.stop()
                return {"pid": os.getpid()}
            case {"command": "reload"}:
                await self._router.reload()
                return self.to_json()
            case {"command": "scale", "replicas": int(count)}:
                if self._setup.scaling is not None:
                    raise ConfigError("the load says how many servers of this fleet run (--autoscale)")
                await self.scale(count)
                return self.to_json()
            case {"command": "roll", "model": str() | None as model}:
                await self.roll(model, tell)
                return self.to_json()
        raise ConfigError(f"there is no command {command.get('command')!r} of a fleet")

    def to_json(self, in_proxy: Mapping[str, str] = MappingProxyType({})) -> JsonObject:
        """Return the state of the fleet, as `roofline status --json` prints it. in_proxy: what the proxy thinks of each
        replica."""
        return {
            "name": self._folder.name,
            "pid": os.getpid(),
            "started": self._started,
            "address": self.address,
            "statistics": self._statistics_address,
            "folder": str(self._folder.path),
            "served_name": self._setup.served_name,
            "model": self._model,
            "balance": self._setup.options.balance,
            "wanted": len(self._wanted_slots),
            "most": len(self._slots),
            "metrics": f"http://{LOOPBACK}:{self._metrics.port}/metrics",
            "scaling": self._scaling_state(),
            "stopping": self._stopping.is_set(),
            "router": {"program": "haproxy", "pid": self._router.pid, "restarts": self._router.restarts},
            "replicas": [slot.to_json() | {"proxy": in_proxy.get(slot.name)} for slot in self._slots],
        }

    def _scaling_state(self) -> JsonObject | None:
        """What the load last asked for, and why; None where it does not say how many servers run."""
        if not isinstance(self._policy, Autoscaler) or self._policy.last is None:
            return None
        return {"replicas": self._policy.last.replicas, "reason": self._policy.last.reason}

    async def scale(self, count: int) -> None:
        """Have so many replicas run. Returns once those that are to leave have finished what they had open. Raises
        ConfigError for a number that there is no place for."""
        fewest = 0 if self._setup.scaling is not None else 1
        if not fewest <= count <= len(self._slots):
            raise ConfigError(
                f"{count} replicas: there are places for {fewest} to {len(self._slots)}, among which cores and devices "
                "were divided when the fleet was started; --max-replicas of `roofline up` sets their number"
            )
        async with self._alone():
            seconds, first = self._setup.options.drain_seconds, self._slots[0]
            leaving = [
                asyncio.create_task(slot.retire(seconds, hold=slot is first))
                for slot in self._slots[count:]
                if slot.is_wanted
            ]
            for slot in self._slots[:count]:
                slot.begin()
            await asyncio.sleep(0)  # from here on those that leave are not wanted
            loop = asyncio.get_running_loop()
            loop.remove_reader(first.listening)
            if count == 0:
                loop.add_reader(first.listening, self._knock)
            self._note()
        await asyncio.gather(*leaving)  # meanwhile others may come
        self._note()

    async def roll(self, model: str | None, tell: Tell) -> None:
        """Replace each server by a new one, one after the other: of another model, or started as the first ones were.

        Raises RooflineError where a new one does not become ready: those that were replaced are put back.
        """
        async with self._alone():
            commands = self._setup.commands(model or self._model)
            replaced: list[tuple[ReplicaSlot, int]] = []
            earlier = [slot.command for slot in self._slots]
            for at, slot in enumerate(self._slots):
                if not slot.is_wanted:
                    slot.command = commands[at]
                    continue
                await tell(f"{slot.name}: starting {commands[at].model}")
                try:
                    await slot.replace(
                        commands[at], self._setup.options.drain_seconds, drain_first=self._drains_first(slot)
                    )
                except RooflineError as error:
                    await tell(f"{slot.name}: {error}")
                    await self._put_back(replaced, earlier, tell)
                    raise
                replaced.append((slot, at))
                await tell(f"{slot.name}: replaced")
            self._model = model or self._model
            self._note()

    async def _put_back(
        self, replaced: list[tuple[ReplicaSlot, int]], earlier: Sequence[ReplicaCommand], tell: Tell
    ) -> None:
        """Undo a roll that failed."""
        for slot, command in zip(self._slots, earlier, strict=True):
            if not slot.is_wanted:
                slot.command = command
        for slot, at in reversed(replaced):
            await tell(f"{slot.name}: starting {earlier[at].model} again")
            await slot.replace(earlier[at], self._setup.options.drain_seconds, drain_first=self._drains_first(slot))

    def _drains_first(self, slot: ReplicaSlot) -> bool:
        """Whether there is no room for a second server beside one: on devices, whose memory the first one has; on a
        host, where less is free than it has."""
        if self._setup.serve.load.backend == "gpu":
            return True
        free = detect().memory_available
        return free is not None and free < SPARE_SHARE * slot.resident_bytes()

    def _alone(self) -> asyncio.Lock:
        if self._changing.locked():
            raise ConfigError("a roll, or a change of the number of replicas, is under way: wait for its end")
        if self._stopping.is_set():
            raise ConfigError("the fleet is ending")
        return self._changing

    # Ending.

    async def _end(self) -> None:
        """End everything: requests that are open may finish, in the proxy's time, or until told a second time."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        self._front.close()  # from here on connections are refused, and not left waiting
        graceful = asyncio.create_task(self._drain())
        killing = asyncio.create_task(self._killing.wait())
        await asyncio.wait([graceful, killing], return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        self._router.kill()
        for slot in self._slots:
            slot.kill()
        if not graceful.done():
            graceful.cancel()
        await asyncio.gather(graceful, self._router.stop(0), return_exceptions=True)
        await asyncio.gather(*(slot.retire(0) for slot in self._slots), return_exceptions=True)
        for listening in (self._statistics, *(slot.listening for slot in self._slots)):
            listening.close()

    async def _drain(self) -> None:
        """Have the proxy take no more requests, and the servers end after it; answers that are still open after
        `drain_seconds` end with an error that their clients see."""
        seconds = self._setup.options.drain_seconds
        leaving = asyncio.create_task(self._router.stop(seconds + HURRY_SECONDS))
        await asyncio.wait([leaving], timeout=seconds)
        if not leaving.done():
            for slot in self._slots:
                slot.hurry()
        await leaving
        await asyncio.gather(*(slot.retire(HURRY_SECONDS) for slot in self._slots))


def _say_failure(task: "asyncio.Task[None]") -> None:
    """Log why a task that should run as long as the fleet has ended: the servers go on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        LOG.error("figures and metrics of the fleet are no longer read: %s: %s", type(error).__name__, error)


def _written(host: str, listening: socket.socket) -> str:
    """Return host and port as an address has them."""
    return f"{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that listens. Raises ConfigError, which names the flag, where the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {cause_of(error)}. Choose another {flag}.") from error
    return listening
