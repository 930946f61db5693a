"""What a service manager is told (sd_notify(3)): systemd sets NOTIFY_SOCKET, and others do as it does.

READY=1 once the model is loaded and connections are taken, STOPPING=1 when the end begins, and WATCHDOG=1 in time while
the event loop turns and the engine does not stand still, where WATCHDOG_USEC asks for it. An engine process that dies
is started again by the server itself, which is no reason to restart it; neither is a file that does not compute what it
says (/ready tells), since the same file would be loaded again.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterable

from roofline.common import env, log

LOG = log.get("server")
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
SHARE = 0.5  # of the time that the watchdog gives, after which it is told again


class ServiceManager:
    """Whoever started this process and waits for its readiness.

    address: of its socket of datagrams, "@NAME" for an abstract one. watchdog_seconds: within which it wants to hear
    that all is well; None: never.
    """

    def __init__(self, address: str, watchdog_seconds: float | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._heard = True  # whether the latest message was taken

    def tell(self, *facts: str) -> None:
        """Send facts such as "READY=1", in one message. That nobody takes it is logged, and no reason to end."""
        message = "\n".join(" ".join(fact.splitlines()) for fact in facts)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sending:
                sending.connect(self._address)
                sending.send(message.encode())
            self._heard = True
        except OSError as error:
            if self._heard:
                LOG.warning("the service manager at NOTIFY_SOCKET cannot be told %r: %s", facts[0], error.strerror)
            self._heard = False

    def stopping(self) -> None:
        """Say that the end has begun."""
        self.tell("STOPPING=1", "STATUS=Answers that run are finished.")

    async def watch(
        self, name: str, starts: "Iterable[asyncio.Task[object]]", trouble: Callable[[], str | None]
    ) -> None:
        """Say that the server is ready once all `starts` have ended well, and then that it is well, until cancelled.

        name: of the model. trouble: why the engine stands still, None where it does not.
        """
        starts = list(starts)
        self.tell(f"STATUS=Loading {name}.")
        await asyncio.wait(starts)
        if any(start.cancelled() or start.exception() is not None for start in starts):
            return  # the server ends with the reason
        self.tell("READY=1", f"MAINPID={os.getpid()}", f"STATUS=Serving {name}.")
        problem: str | None = None
        while self._watchdog_seconds is not None:
            before, problem = problem, trouble()
            if problem is None:
                self.tell("WATCHDOG=1")
            elif before is None:
                LOG.warning("the service manager's watchdog is not told that all is well: %s", problem)
            await asyncio.sleep(self._watchdog_seconds * SHARE)


def service_manager() -> ServiceManager | None:
    """Take what the environment says of a service manager, so that processes that are started from here do not speak to
    it; None where there is none."""
    address, microseconds, pid = (env.foreign(name) for name in VARIABLES)
    for name in VARIABLES:
        env.forget(name)
    if address is None:
        return None
    if not address.startswith(("/", "@")):
        LOG.warning("NOTIFY_SOCKET=%r is no unix socket: nobody is told when the server is ready", address)
        return None
    watched = microseconds is not None and microseconds.isdigit() and pid in (None, str(os.getpid()))
    seconds = int(microseconds) / 1e6 if watched and microseconds is not None else 0.0
    return ServiceManager(address, seconds or None)
