"""What a generator tells of a run while it goes on: a line of JSON every half second."""

import msgspec

SECONDS_BETWEEN = 0.5


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is.

    elapsed: seconds since its beginning; completed, failed, in_flight: requests; tokens_per_s: that came
    since the last report; cpu: share of a core that the generator used since then, None where an engine is in its
    process; slip_ms: how late the last request was sent.
    """

    elapsed: float
    completed: int
    failed: int
    in_flight: int
    tokens_per_s: float
    cpu: float | None
    slip_ms: float


class Tally:
    """Counts as requests begin and end, so that a report costs nothing that grows with the run.

    under_way: by number, the moments of the parts that came of each answer so far; tokens: of those that ended."""

    def __init__(self) -> None:
        self.begun = self.completed = self.failed = self.tokens = self.slip = 0
        self.under_way: dict[int, list[int]] = {}
        self._before = (0.0, 0.0, 0)  # seconds elapsed and used, tokens, of the last report

    def report(self, elapsed: float, used: float) -> Progress:
        """The progress after so many seconds, of which the process has used so many."""
        last_elapsed, last_used, last_tokens = self._before
        tokens = self.tokens + sum(map(len, self.under_way.values()))
        self._before = (elapsed, used, tokens)
        span = max(elapsed - last_elapsed, 1e-9)
        return Progress(
            elapsed=elapsed,
            completed=self.completed,
            failed=self.failed,
            in_flight=self.begun - self.completed - self.failed,
            tokens_per_s=max(tokens - last_tokens, 0) / span,
            cpu=(used - last_used) / span,
            slip_ms=self.slip / 1e6,
        )
