"""Whom a collector asks: a replica's name, where its metrics are, and what it needs to be asked with."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from roofline.common.addresses import check_address
from roofline.common.errors import ConfigError

UNIX = "unix:"
MAX_TARGETS = 1000
INTERVAL = 2.0  # seconds from one scrape of a replica to the next
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\[\]-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class CollectorTarget:
    """A replica whose metrics are read.

    name: its label `replica`; address: http://HOST:PORT, https://HOST:PORT or unix:PATH of a socket, with the path of
    its metrics where that is not /metrics; headers: sent along, such as a key; trust: certificates (PEM) of those who
    may vouch for it, None: of the authorities that this machine trusts.
    """

    name: str
    address: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    trust: Path | None = None

    @property
    def socket(self) -> str | None:
        """The path of its Unix socket, None where it has a port."""
        return self.address.removeprefix(UNIX) if self.address.startswith(UNIX) else None

    @property
    def url(self) -> str:
        """What is asked for."""
        if self.socket is not None:
            return "http://localhost/metrics"
        return self.address if urlsplit(self.address).path.strip("/") else self.address.rstrip("/") + "/metrics"


def read_targets(words: Sequence[str], headers: Mapping[str, str], trust: Path | None = None) -> list[CollectorTarget]:
    """Return targets as a command line names them: ADDRESS, or NAME=ADDRESS. Raises ConfigError for what is none, and
    for a name that is there twice."""
    targets = []
    for word in words:
        name, equals, address = word.partition("=")
        if not equals or "/" in name:
            name, address = "", word
        targets.append(
            CollectorTarget(name=name or _default_name(address), address=address, headers=headers, trust=trust)
        )
    check_targets(targets)
    return targets


def check_targets(targets: Sequence[CollectorTarget]) -> None:
    """Raise ConfigError for targets that cannot be asked, or told apart."""
    if len(targets) > MAX_TARGETS:
        raise ConfigError(f"{len(targets):,} replicas are more than a collector reads ({MAX_TARGETS:,}); start several")
    names: dict[str, str] = {}
    for target in targets:
        if not _NAME.fullmatch(target.name):
            raise ConfigError(f"{target.name!r} cannot name a replica: use letters, digits and . _ : - (up to 100)")
        if target.name in names:
            raise ConfigError(
                f"{names[target.name]} and {target.address} are both called {target.name!r}: write NAME=ADDRESS"
            )
        names[target.name] = target.address
        if target.socket is None:
            check_address(target.address)
            if "@" in urlsplit(target.address).netloc:  # it would be in logs and in /replicas
                raise ConfigError(f"the address of {target.name!r} has a name or password in it: give a key beside it")
        elif not target.socket.startswith("/"):
            raise ConfigError(f"{target.address} is no socket: write unix: and its whole path, as unix:/run/r1.sock")
        if target.trust is not None and not target.address.startswith("https:"):
            raise ConfigError(f"{target.address} has no TLS, so there is no certificate to check: write https://")


def _default_name(address: str) -> str:
    """Host and port, or the name of the socket's file."""
    if address.startswith(UNIX):
        return Path(address.removeprefix(UNIX)).stem
    check_address(address)
    return urlsplit(address).netloc.rpartition("@")[2]
