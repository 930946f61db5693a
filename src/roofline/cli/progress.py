"""A bar on stderr for work that takes minutes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counted_bar(stage: str) -> Iterator[Callable[[int, int], None]]:
    """Gives what is told (how many are done, all) and shows it, where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = Console(stderr=True)
    columns = TextColumn("{task.description:>11}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    with Progress(*columns, TimeRemainingColumn(), console=terminal, disable=not terminal.is_terminal) as bars:
        task = bars.add_task(stage, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
