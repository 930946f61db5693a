"""The options of a collector of metrics."""

from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.options import Options, option
from roofline.deploy.collector.targets import INTERVAL
from roofline.server.options import KEY


@dataclass(frozen=True)
class CollectOptions(Options):
    """How replicas are read, and where what they have together is served."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(9081, "Port; 0 takes a free one.", minimum=0, maximum=65535)
    interval: float = option(
        INTERVAL, "From one scrape of a replica to the next.", minimum=0.1, maximum=3600, unit="seconds"
    )
    timeout: float | None = option(
        None, "That a scrape may take. Default: the interval, 10 at most.", minimum=0.1, maximum=60, unit="seconds"
    )
    api_key: str | None = option(None, "Needed to read /metrics and /replicas of the collector.", secret=True)
    replica_key: str | None = option(
        None, "Sent to the replicas as a bearer token. Default: ROOFLINE_API_KEY.", secret=True
    )
    trust: Path | None = option(
        None, "Certificates (PEM) of those who vouch for https:// replicas. Default: this machine's."
    )
    series: Path | None = option(
        None, "Folder that every figure of every scrape is written into, as Parquet files: time, replica, name, value."
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for keys that no header can hold."""
        super().__post_init__()
        for name in ("api_key", "replica_key"):
            key = getattr(self, name)
            if key is not None and not KEY.fullmatch(key):
                raise ConfigError(f"{name} is no key: use printable ASCII without spaces, up to 1,024 characters")

    @property
    def scrape_seconds(self) -> float:
        """That a scrape may take."""
        return min(self.interval, 10.0) if self.timeout is None else self.timeout
