"""A server whose every answer a test writes itself, and plans for it."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from roofline.bench.load.generator import Generator
from roofline.bench.load.plan import Plan
from roofline.bench.traffic.traffic import Traffic, TrafficRequest, read_traffic, write_traffic


@pytest.fixture
def scripted():
    """scripted(answer) -> url. answer(body, writer, number of the connection) is a coroutine that writes an answer.
    scripted.heads has the heads of all requests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def start(answer):
        connections = []

        async def serve(reader, writer):
            connections.append(writer)
            number = len(connections)
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    start.heads.append(head.decode())
                    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    await answer(json.loads(await reader.readexactly(size)), writer, number)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop).result()
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    start.heads = []
    yield start

    async def shut():
        for server in servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(shut(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def make_plan(tmp_path):
    """make_plan(url, requests, **fields) -> a plan whose traffic is in a file."""

    def make(url, requests=4, **fields):
        if isinstance(requests, int):
            requests = [TrafficRequest(prompt=f"p{n}", prompt_tokens=1, max_tokens=3) for n in range(requests)]
        traffic = Traffic(name="test", version=1, seed=0, stop="ignored", source="a test", requests=requests)
        write_traffic(traffic, tmp_path / "traffic.jsonl")
        places = {"traffic": str(tmp_path / "traffic.jsonl"), "events": str(tmp_path / "events.jsonl")}
        return Plan(**{**places, "url": url, "model": "m", "arrivals": "closed", "requests": len(requests), **fields})

    return make


@pytest.fixture
def generate():
    """generate(plan) -> the events of a plan, run in this process."""

    def run(plan):
        return asyncio.run(Generator(plan, read_traffic(Path(plan.traffic))).run())

    return run
