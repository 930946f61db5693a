"""A clock that only a simulation moves."""


class VirtualClock:
    """Seconds since the simulation began; see `backends.base.Clock`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, "time does not go back"
        self._now += seconds

    def reach(self, moment: float) -> None:
        """Let time pass until a moment; one that has passed changes nothing."""
        self._now = max(self._now, moment)
