"""What stands before replicas and chooses one for each request, as the supervisor sees it."""

from typing import Protocol


class FleetRouter(Protocol):
    """A load balancer. Its listening sockets are the supervisor's, so that no connection is lost when it is replaced.
    Replicas are called by their names; all that there may be are known when it is started."""

    async def start(self) -> None:
        """Start it, and return once it takes requests. Raises ConfigError with what it refuses."""

    async def enable(self, name: str) -> None:
        """Have requests go to a replica, whatever was known of its health."""

    async def disable(self, name: str) -> None:
        """Have no more requests go to a replica; those that are open end as they would."""

    async def hold(self, name: str) -> None:
        """Have requests go to a replica that does not run: they wait in its socket, and its health is not asked for."""

    async def states(self) -> dict[str, str]:
        """Return what it thinks of each replica, in its own words."""

    async def reload(self) -> None:
        """Read the configuration again; open requests go on. Raises ConfigError, and then nothing has changed."""

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and return once those that are open have ended, at most after so long."""
