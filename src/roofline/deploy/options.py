"""The options of a fleet, beside those of the servers in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

FLEET, PROXY = "The fleet", "The proxy before it"
MAX_REPLICAS = 64
NAME_CHARACTERS = 40  # of a fleet: its folder has sockets, whose paths may have some hundred bytes


@dataclass(frozen=True)
class FleetOptions(Options):
    """How many servers there are, on which ports, and what stands before them."""

    replicas: int | Literal["auto"] = option(
        "auto", "Servers of the model. auto: one for each device, or group of --tp devices; on a host's cores one for "
        "each NUMA node, and two at least where there are threads for two.",
        minimum=1, maximum=MAX_REPLICAS, unit="replicas", topic=FLEET,
    )  # fmt: skip
    max_replicas: int | None = option(
        None, "Cores and devices are divided among so many, of which `roofline scale` runs more or fewer. Default: as "
        "many as replicas.",
        minimum=1, maximum=MAX_REPLICAS, unit="replicas", topic=FLEET,
    )  # fmt: skip
    name: str = option("default", "Name of the fleet, by which other commands find it.", topic=FLEET)
    replica_port: int = option(
        8001, "Port of the first server, on 127.0.0.1; the others have those after it; 0 takes free ones.",
        minimum=0, maximum=65535 - MAX_REPLICAS, topic=FLEET,
    )  # fmt: skip
    start_timeout: float = option(
        600.0, "A server that is not ready after so long is ended and started again.",
        minimum=1, unit="seconds", topic=FLEET,
    )  # fmt: skip
    host: str = option("127.0.0.1", "Address that the proxy listens on.", topic=PROXY)
    port: int = option(9080, "Port of the proxy; 0 takes a free one.", minimum=0, maximum=65535, topic=PROXY)
    balance: Literal["leastconn", "roundrobin", "prefix", "key"] = option(
        "leastconn", "Which server a request goes to: the one with the fewest requests open, the next one, always the "
        "same one for one beginning of a conversation (its pages are in that server's cache), or for one API key.",
        topic=PROXY,
    )  # fmt: skip
    tls_certificate: Path | None = option(
        None, "Certificate (PEM, with its chain): the proxy speaks TLS and HTTP/2, with --tls-key.", topic=PROXY
    )
    tls_key: Path | None = option(None, "Private key of --tls-certificate (PEM).", topic=PROXY)
    statistics_port: int = option(
        9082, "Port of HAProxy's statistics page, on 127.0.0.1; 0 takes a free one.",
        minimum=0, maximum=65535, topic=PROXY,
    )  # fmt: skip
    metrics_port: int = option(
        9081, "Port of the fleet's metrics, on 127.0.0.1; the proxy has them at /metrics too; 0 takes a free one.",
        minimum=0, maximum=65535, topic=PROXY,
    )  # fmt: skip
    autoscale: bool = option(
        False, "Have the load say how many servers run, from --min-replicas to --max-replicas.", topic=FLEET
    )
    requests_per_replica: int | None = option(
        None, "Requests that one server computes at a time, of which --utilisation is a share. Default: --max-running.",
        minimum=1, unit="requests", topic=FLEET,
    )  # fmt: skip
    drain_seconds: int = option(
        120, "Answers may still take so long when a server is replaced or the fleet is told to end; what is not "
        "complete by then ends with an error.",
        minimum=0, unit="seconds", topic=FLEET,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fleet_name(self.name)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both --tls-certificate and --tls-key")
        if self.max_replicas is not None and self.replicas != "auto" and self.replicas > self.max_replicas:
            raise ConfigError(
                f"replicas={self.replicas} is more than max_replicas={self.max_replicas}: raise the latter"
            )


def check_fleet_name(name: str) -> None:
    """Raise ConfigError for a name that a folder, and sockets in it, cannot have."""
    if not name or len(name) > NAME_CHARACTERS or not all(c.isascii() and (c.isalnum() or c in "-_") for c in name):
        raise ConfigError(f"name={name!r} cannot be used: give 1 to {NAME_CHARACTERS} letters, digits, - and _")
