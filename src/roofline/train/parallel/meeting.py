"""Where the processes of a run find each other, and tell who of them still answers.

Those of `--nproc` meet in a file. Those that torchrun starts meet at its agent's store; with MASTER_ADDR alone rank 0
holds the store, and listens on that address and no other. torch's store and gloo ask nobody who they are, so the
network between machines has to be a private one.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from roofline.common import env, log
from roofline.common.errors import ConfigError, RooflineError
from roofline.train.parallel.placement import meeting_place
from roofline.train.parallel.stopping import StopNotes

ANSWER_SECONDS = 3.0  # that ranks which have waited in vain have to say so
PATIENCE = 20.0  # seconds that ranks are waited for before it is said who has not come
_POLL = 0.05  # seconds

_log = log.get("train")


class Meeting:
    """The store that all ranks of a run reach.

    Args:
        file: of the store, where the processes are those of our launcher.
        seconds: that a rank waits for the others.
    """

    def __init__(self, rank: int, size: int, seconds: float, file: Path | None = None) -> None:
        self.rank, self.size, self.seconds, self.file = rank, size, seconds, file
        self.store = self._open()
        self.store.set_timeout(timedelta(seconds=seconds))

    def join(self) -> None:
        """Wait until all ranks are here. Raises RooflineError with the numbers of those that did not come."""
        self.store.set(f"here/{self.rank}", "")
        absent = self._without("here", min(PATIENCE, self.seconds))
        if absent and self.seconds > PATIENCE:
            if self.rank == min(rank for rank in range(self.size) if rank not in absent):
                _log.warning("still waiting for %s to join", _named(absent, self.size))
            absent = self._without("here", self.seconds - PATIENCE)
        if absent:
            raise RooflineError(
                f"{_named(absent, self.size)} did not join within {self.seconds:g} s (dist_timeout): start all of "
                "them with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each with a RANK of its own"
            )
        if self.file is not None:
            StopNotes(self.file.parent).meet()

    def silent(self) -> list[int]:
        """The ranks that do not answer, asked by one that has waited in vain: all that are well ask it too.

        Rank 0 is named where the store, which it may hold, does not answer.
        """
        silent = [0]

        def ask() -> None:
            self.store.set(f"late/{self.rank}", "")
            self.store.set(f"well/{self.rank}", "")
            silent[:] = self._without("well", ANSWER_SECONDS)

        self._within(2 * ANSWER_SECONDS, ask)
        return list(silent)

    def late(self, seconds: float = 0.0) -> list[int]:
        """Return the ranks that have waited in vain and have said so, as soon as one has, or after so many seconds."""
        late: list[int] = []

        def ask() -> None:
            deadline = time.monotonic() + seconds
            while True:
                late[:] = [rank for rank in range(self.size) if self.store.check([f"late/{rank}"])]
                if late or time.monotonic() > deadline:
                    return
                time.sleep(_POLL)

        self._within(seconds + ANSWER_SECONDS, ask)
        return list(late)

    def answer(self) -> None:
        """Tell ranks that have waited in vain that this one is well."""
        self._within(ANSWER_SECONDS, lambda: self.store.set(f"well/{self.rank}", ""))

    @staticmethod
    def _within(seconds: float, ask: Callable[[], None]) -> None:
        """Call a function of the store, which may be gone, or never answer."""

        def call() -> None:
            with suppress(RuntimeError):
                ask()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds)

    def _without(self, word: str, seconds: float) -> list[int]:
        """The ranks that have not said a word after so long."""
        deadline = time.monotonic() + seconds
        while not self.store.check([f"{word}/{rank}" for rank in range(self.size)]):
            if time.monotonic() > deadline:
                return [rank for rank in range(self.size) if not self.store.check([f"{word}/{rank}"])]
            time.sleep(_POLL)
        return []

    def _open(self) -> dist.Store:
        if self.file is not None:
            return dist.FileStore(str(self.file), self.size)
        place = meeting_place(self.size)
        if place is None:
            return dist.HashStore()
        address, port = place
        if self.rank == 0 and env.foreign("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return self._listen(address, port)
        self._reach(address, port)
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=self.seconds))

    def _listen(self, address: str, port: int) -> dist.Store:
        """Rank 0's store on the address that was asked for; torch by itself would listen on all."""
        try:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen on MASTER_ADDR={address}, MASTER_PORT={port}: {error.strerror or error}: "
                "name an address of the machine that rank 0 runs on, and a free port"
            ) from error
        seconds = timedelta(seconds=self.seconds)
        descriptor = listener.detach()  # the store's from here on
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=seconds, master_listen_fd=descriptor
        )

    def _reach(self, address: str, port: int) -> None:
        """Wait for rank 0's store without torch's warnings. Raises RooflineError."""
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                socket.create_connection((address, port), timeout=max(1.0, deadline - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RooflineError(
                        f"process {self.rank} of {self.size} has not reached rank 0 at MASTER_ADDR={address}, "
                        f"MASTER_PORT={port} within {self.seconds:g} s (dist_timeout): {error.strerror or error}: "
                        "start rank 0 there, and look at names and firewalls"
                    ) from error
                time.sleep(_POLL)


def _named(ranks: Sequence[int], size: int) -> str:
    words = "process" if len(ranks) == 1 else "processes"
    return f"{words} {', '.join(map(str, ranks))} of {size}"
