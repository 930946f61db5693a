"""The metrics of a fleet that runs: every server's, read and summed, at one port and behind the proxy's /metrics."""

import socket
from collections.abc import Iterable

from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.quantiles import RecentQuantiles
from roofline.deploy.collector.service import KeyCheck, serve_collector
from roofline.deploy.collector.targets import CollectorTarget
from roofline.deploy.supervisor.slot import ReplicaSlot
from roofline.server.keys import Keys
from roofline.server.scopes import ENOUGH, WATCH

FIRST_TOKEN, BETWEEN_TOKENS = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
SHARE = 0.95  # of the requests, by whose latency a fleet is scaled
INTERVAL = 1.0  # seconds between two scrapes of a server


class FleetMetrics:
    """Reads the metrics of a fleet's servers and serves what they have together.

    listening: a bound socket of this machine; host: at which clients reach the proxy; key: that servers are asked with;
    keys: of those who may read, none of which leave the metrics open.
    """

    def __init__(self, listening: socket.socket, host: str, key: str | None, keys: Keys) -> None:
        self.port = int(listening.getsockname()[1])
        self._listening, self._host, self._keys = listening, host, keys
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._collector = MetricsCollector((), INTERVAL)
        self._quantiles = RecentQuantiles(self._collector)

    def follow(self, slots: Iterable[ReplicaSlot]) -> None:
        """Read the servers that are to run now, and say that there are to be so many."""
        wanted = [slot for slot in slots if slot.is_wanted]
        self._collector.set_targets(
            [
                CollectorTarget(name=slot.name, address=f"http://{slot.host}:{slot.port}", headers=self._headers)
                for slot in wanted
            ]
        )
        self._collector.set_wanted(len(wanted))

    def latencies(self) -> tuple[float | None, float | None]:
        """Return the 95th percentiles of the time to the first token and between two, in seconds, of what was computed
        since this was asked last; None where nothing was."""
        return self._quantiles.since_last(FIRST_TOKEN, SHARE), self._quantiles.since_last(BETWEEN_TOKENS, SHARE)

    async def run(self) -> None:
        """Read and serve until cancelled."""
        await serve_collector(self._collector, self._listening, self._host, self._admits())

    def refresh(self) -> None:
        """Read a file of keys again where it changed."""
        self._keys.refresh()

    def _admits(self) -> KeyCheck | None:
        if not self._keys.required:
            return None

        def may_read(key: bytes) -> bool:
            principal = self._keys.identify(key)
            return principal is not None and bool(principal.scopes & ENOUGH[WATCH])

        return may_read
