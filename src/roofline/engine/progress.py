"""A line on a terminal that says how many of many prompts are answered."""

import sys
import time
from collections.abc import Callable

EVERY = 0.1  # seconds between two looks at it
CELLS = 24


class ProgressBar:
    """The line on stderr, for `total` prompts; drawn over itself, and removed in the end."""

    def __init__(self, total: int) -> None:
        self.total, self._began, self._drawn = total, time.monotonic(), 0.0

    def update(self, answered: Callable[[], int]) -> None:
        """Draw the line with as many prompts as `answered` counts, unless it was drawn just now."""
        now = time.monotonic()
        if now - self._drawn < EVERY:
            return
        self._drawn, done = now, answered()
        remaining = f", {(now - self._began) * (self.total - done) / done:.0f} s left" if done else ""
        filled = "#" * (CELLS * done // self.total)
        sys.stderr.write(f"\r\x1b[K[{filled:.<{CELLS}}] {done} of {self.total} prompts{remaining}")
        sys.stderr.flush()

    def close(self) -> None:
        """Remove the line."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def bar_for(prompts: int) -> ProgressBar | None:
    """A bar where a person sees it and has to wait: for several prompts, with stderr on a terminal."""
    return ProgressBar(prompts) if prompts > 1 and sys.stderr is not None and sys.stderr.isatty() else None
