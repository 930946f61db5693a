"""Collecting the metrics of servers while they are under load: in a thread, as the load has a process of its own."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from roofline.bench.results.collected import series_folder
from roofline.common.errors import ConfigError
from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.series import SeriesFolder
from roofline.deploy.collector.targets import read_targets

END_SECONDS = 60.0  # that the last files may take


@contextmanager
def collecting(addresses: Sequence[str], results: Path | None, key: str | None, interval: float) -> Iterator[None]:
    """Around the measuring: the metrics of these servers go into files beside the results. key: sent to the servers.
    Raises ConfigError for what is no address, and without a file of results."""
    if not addresses:
        yield
        return
    if results is None:
        raise ConfigError("--collect writes beside the results: name their file with --out")
    targets = read_targets(addresses, {"Authorization": f"Bearer {key}"} if key else {})
    collector = MetricsCollector(targets, interval, min(interval, 10.0), SeriesFolder(series_folder(results)))
    begun, ended = threading.Event(), threading.Event()

    async def run() -> None:
        running = asyncio.create_task(collector.run())
        await asyncio.sleep(0)
        await collector.first_round()
        begun.set()
        await asyncio.to_thread(ended.wait)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="collector")
    thread.start()
    try:
        begun.wait(END_SECONDS)  # the figures before the load are there, too
        yield
    finally:
        ended.set()
        thread.join(END_SECONDS)
