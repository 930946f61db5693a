"""Series of a run as Parquet files: complete, readable by others while they grow, whole after kill -9, bounded."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from roofline.common.errors import ConfigError
from roofline.deploy.collector import series as series_module
from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.page import read_page
from roofline.deploy.collector.series import SeriesFolder
from roofline.deploy.collector.targets import CollectorTarget
from tests.command_line import call_roofline
from tests.deploy.collector.fake_replicas import TEXT, FakeReplica, listening, read_head, shows, until

pyarrow = pytest.importorskip("pyarrow")
dataset = pytest.importorskip("pyarrow.dataset")


def rows_of(folder, **filters):
    """All rows of a folder as pyarrow's own reader of data sets has them."""
    table = dataset.dataset(folder, format="parquet").to_table()
    rows = table.to_pylist()
    return [row for row in rows if all(row[name] == value for name, value in filters.items())]


def page(text: bytes):
    return read_page(text, TEXT, 10)


def test_every_figure_of_every_scrape_is_a_row(tmp_path):
    async def run() -> None:
        a = FakeReplica("a")
        async with listening(shows(a)) as address:
            targets = [CollectorTarget(name="a", address=address), CollectorTarget(name="b", address="http://[::1]:9")]
            collector = MetricsCollector(targets, sink=SeriesFolder(tmp_path / "x.series"))
            for tokens in (5, 7):
                a.answer(tokens, 0.3)
                await collector.scrape()
            await collector.close()
            shown = [
                line for line in a.page().decode().splitlines() if line and line[0] != "#" and "_created" not in line
            ]
        rows = rows_of(tmp_path / "x.series", replica="a")
        assert len(rows) == 2 * (len(shown) + 1)  # and `up`
        tokens = [row for row in rows if row["name"] == "vllm:generation_tokens_total"]
        assert [(row["value"], row["labels"]) for row in tokens] == [
            (5, 'model_name="tiny"'),
            (12, 'model_name="tiny"'),
        ]
        bucket = {"name": "vllm:time_to_first_token_seconds_bucket", "labels": 'le="0.5",model_name="tiny"'}
        assert [row["value"] for row in rows_of(tmp_path / "x.series", **bucket)] == [1, 2]
        assert abs(tokens[0]["time"].timestamp() - time.time()) < 60
        assert tokens[0]["time"] < tokens[1]["time"]
        assert [row["value"] for row in rows_of(tmp_path / "x.series", name="up", replica="b")] == [0, 0]

    asyncio.run(run())


def test_files_are_written_when_it_is_time_and_are_whole_at_any_moment(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(series_module.time, "monotonic", lambda: now[0])

    async def run() -> None:
        sink = SeriesFolder(tmp_path)
        counts = []
        for _ in range(12):
            await sink.scraped(time.time(), "a", page(b"x 1\n"))
            if sink._writing is not None:
                await sink._writing
            counts.append(len(list(tmp_path.iterdir())))
            now[0] += 3
        assert counts == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
        assert len(rows_of(tmp_path)) == 2 * 9  # while it grows
        now[0] += 5_000  # a hundredth of the run's time is 50 s now
        for _ in range(3):
            await sink.scraped(time.time(), "a", page(b"x 1\n"))
            await sink._writing
            now[0] += 20
        assert len(list(tmp_path.iterdir())) == 3
        await sink.close()
        assert len(rows_of(tmp_path)) == 2 * 15

    asyncio.run(run())


def test_the_memory_is_bounded_by_rows_that_wait(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(series_module, "MAX_ROWS", 10)
    monkeypatch.setattr(series_module, "MAX_WAITING_ROWS", 30)
    blocked = asyncio.Event()

    async def run() -> None:
        sink = SeriesFolder(tmp_path)
        plain = asyncio.to_thread

        async def stuck(function, *arguments):
            await blocked.wait()
            return await plain(function, *arguments)

        monkeypatch.setattr(series_module.asyncio, "to_thread", stuck)
        for _ in range(50):
            await sink.scraped(time.time(), "a", page(b"x 1\n"))
            await asyncio.sleep(0)
            assert len(sink._rows) <= 30
        blocked.set()
        await sink.close()
        assert 30 <= len(rows_of(tmp_path)) <= 40
        assert len(rows_of(tmp_path)) + sink._lost == 100

    asyncio.run(run())
    assert caplog.text.count("series of metrics are left out") == 1


def test_a_disk_that_is_full_leaves_rows_out_and_nothing_behind(tmp_path, monkeypatch, caplog):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        sink = SeriesFolder(tmp_path)
        await sink.scraped(time.time(), "a", page(b"x 1\n"))
        with monkeypatch.context() as patch:
            patch.setattr(series_module.os, "fsync", full)
            await sink._write()
        assert list(tmp_path.iterdir()) == []
        await sink.scraped(time.time(), "a", page(b"x 2\n"))
        await sink.close()
        assert [row["value"] for row in rows_of(tmp_path, name="x")] == [2]

    asyncio.run(run())
    assert "series of metrics are left out: the disk is full" in caplog.text


@pytest.mark.slow
def test_after_kill_9_what_was_written_is_whole(tmp_path):
    """The command writes every scrape at once here, and is killed in the middle of it."""

    async def run() -> None:
        a = FakeReplica("a")
        async with listening(shows(a)) as address:
            code = (
                "import sys; from roofline.deploy.collector import series; series.MAX_ROWS = 10\n"
                "from roofline.cli.main import main; sys.exit(main())"
            )
            words = ["collect", f"a={address}", "--port", "0", "--interval", "0.1", "--series", str(tmp_path / "s")]
            process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.DEVNULL)
            try:
                end = time.monotonic() + 60
                while len(list(tmp_path.glob("s/*.parquet"))) < 20 and time.monotonic() < end:
                    assert process.poll() is None
                    await asyncio.sleep(0.02)
            finally:
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)

    asyncio.run(run())
    files = list(tmp_path.glob("s/*.parquet"))
    assert len(files) >= 20
    for path in files:
        assert 0 < dataset.dataset(path, format="parquet").count_rows() <= 10
    assert len(list(tmp_path.glob("s/*"))) - len(files) <= 1  # one that was being written, under another name


def test_what_is_gathered_is_written_when_the_command_is_told_to_end(tmp_path):
    async def run() -> int:
        a, scraped = FakeReplica("a"), list[bytes]()

        async def answer(reader, writer):
            while head := await read_head(reader):
                scraped.append(head)
                body = a.page()
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
                writer.write(body)

        async with listening(answer) as address:
            words = ["collect", f"a={address}", "--port", "0", "--interval", "0.1", "--series", str(tmp_path / "s")]
            process = subprocess.Popen([sys.executable, "-m", "roofline", *words], stderr=subprocess.DEVNULL)
            try:
                await until(lambda: len(scraped) > 3, 60)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 30) == 0
            finally:
                process.kill()
        return len(scraped)

    scrapes = asyncio.run(run())
    assert scrapes - 1 <= len(rows_of(tmp_path / "s", name="up")) <= scrapes
    assert len(list((tmp_path / "s").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: a part of the path is a file; name another folder"):
        SeriesFolder(tmp_path / "file")
    result = call_roofline(["collect", "http://127.0.0.1:1", "--series", tmp_path / "file"])
    assert "series cannot be written to" in result.output.replace("\n", " ")


def test_without_pyarrow_it_says_what_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    result = call_roofline(["collect", "http://127.0.0.1:1", "--series", tmp_path / "s"])
    assert "pip install 'roofline[series]' brings it" in result.output.replace("\n", " ")
    assert not (tmp_path / "s").exists()
