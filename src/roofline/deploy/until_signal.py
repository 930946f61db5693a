"""Running a coroutine until the program is told to end."""

import asyncio
import signal
from collections.abc import Coroutine


async def until_signal(running: Coroutine[object, None, None]) -> None:
    """Run a coroutine, and cancel it at SIGTERM or SIGINT, which then counts as its end."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(running)
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        if not signals:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
