"""The real Prometheus, as Debian packages it, while a test runs."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt install prometheus)")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (apt install prometheus)")


class Prometheus:
    """A running Prometheus. client: to its API."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def query(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """The value of each series that an expression has now, by its labels."""
        answer = (await self._client.get("/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", answer
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in answer["data"]["result"]}

    async def value(self, expression: str) -> float | None:
        """The value of an expression of one series, None while there is none."""
        values = await self.query(expression)
        assert len(values) < 2, values
        return next(iter(values.values()), None)

    async def becomes(self, expression: str, value: float, seconds: float = 60) -> None:
        """Wait until an expression has a value; fail after so many seconds."""
        end = asyncio.get_running_loop().time() + seconds
        while (now := await self.value(expression)) != value:
            assert asyncio.get_running_loop().time() < end, f"{expression} is {now}, not {value}"
            await asyncio.sleep(0.1)

    async def get(self, path: str) -> dict:
        return (await self._client.get(path)).json()


@asynccontextmanager
async def prometheus(configuration: str, folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus of this configuration, which keeps what it has in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "prometheus.yml").write_text(configuration)
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
    with (folder / "prometheus.log").open("w") as log:
        command = [str(PROMETHEUS), *words, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
            for _ in range(600):
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                try:
                    if (await client.get("/-/ready")).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.05)
            yield Prometheus(client)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
