"""A run's series: every figure of every scrape, in a folder of Parquet files that is readable at any moment.

A Parquet file can be read once its end is written. So rows are gathered, written as a file of their own under another
name, and renamed: what is in the folder is whole, also after `kill -9`, which loses what was gathered and not yet
written. A file is written every 10 s, later every hundredth of the time that the run has taken (at most 10 minutes), so
that an hour has about 230 files and a day 550; and whenever MAX_ROWS rows are gathered, which bounds the memory.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common import log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import cause_of
from roofline.deploy.collector.page import MetricsPage, SeriesKey

if TYPE_CHECKING:
    import pyarrow

LOG = log.get("deploy")
MAX_ROWS = 50_000  # of a file: 170 pages of `roofline serve`
MAX_WAITING_ROWS = 4 * MAX_ROWS  # beyond which scrapes are left out, as on a disk that does not answer
FIRST_SECONDS, LAST_SECONDS, SHARE = 10.0, 600.0, 0.01  # between two files
COLUMNS = ("time", "replica", "name", "labels", "value")
Row = tuple[float, str, str, str, float]  # as COLUMNS; time in seconds since 1970


class SeriesFolder:
    """Writes what is scraped into a folder: a row for each series of a page, and one named `up` for each scrape.

    Raises UnsupportedError without pyarrow, and ConfigError where the folder cannot be written. What cannot be written
    later is left out, with a warning.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            remedy = "pip install 'roofline[series]' brings it"
            raise UnsupportedError("series of metrics without pyarrow", remedy) from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "permission is missing", str(folder))
        except OSError as error:
            raise ConfigError(
                f"series cannot be written to {folder}: {cause_of(error)}; name another folder"
            ) from error
        self.folder = folder
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"  # in the files' names
        self._began = self._written = time.monotonic()
        self._rows: list[Row] = []
        self._texts: dict[SeriesKey, str] = {}  # of labels, as they are written
        self._files = self._lost = 0
        self._writing: asyncio.Task[None] | None = None

    async def scraped(self, moment: float, replica: str, page: MetricsPage | None) -> None:
        """Gather the rows of a scrape, and have a file written where it is time."""
        rows = [(moment, replica, "up", "", float(page is not None))]
        for family in () if page is None else page.families.values():
            rows += [(moment, replica, key[0], self._text(key), value) for key, value in family.series.items()]
        if len(self._rows) + len(rows) > MAX_WAITING_ROWS:
            self._lose(len(rows), "they are not written as fast as they come")
            return
        self._rows += rows
        if self._is_due() and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Write what is gathered."""
        if self._writing is not None:
            await self._writing
        while self._rows:
            await self._write()

    def _is_due(self) -> bool:
        now = time.monotonic()
        wait = min(max(FIRST_SECONDS, SHARE * (now - self._began)), LAST_SECONDS)
        return len(self._rows) >= MAX_ROWS or now - self._written >= wait

    async def _write(self) -> None:
        rows, self._rows = self._rows[:MAX_ROWS], self._rows[MAX_ROWS:]
        self._written = time.monotonic()
        self._files += 1
        path = self.folder / f"{self._run}-{self._files:06d}.parquet"
        try:
            await asyncio.to_thread(write_rows, rows, path)
        except OSError as error:
            self._lose(len(rows), cause_of(error))

    def _lose(self, count: int, cause: str) -> None:
        """Count rows that are left out; the first are told of."""
        if not self._lost:
            LOG.warning("%s: series of metrics are left out: %s", self.folder, cause)
        self._lost += count

    def _text(self, key: SeriesKey) -> str:
        """A series' labels in one text: `le="0.1",model_name="tiny"`."""
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= MAX_ROWS:  # labels that come and go
                self._texts.clear()
            text = self._texts[key] = ",".join(f'{label}="{_escaped(value)}"' for label, value in key[1])
        return text


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as one Parquet file, which is there as a whole or not at all. Raises OSError, with nothing left
    behind."""
    from pyarrow import parquet

    part = path.with_suffix(".part")
    try:
        with part.open("wb") as stream:
            parquet.write_table(_table(rows), stream, compression="zstd")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _table(rows: Sequence[Row]) -> "pyarrow.Table":
    import pyarrow

    columns = list(zip(*rows, strict=True))
    moments = pyarrow.array([round(moment * 1e6) for moment in columns[0]], pyarrow.timestamp("us", "UTC"))
    texts = [pyarrow.array(column, pyarrow.string()).dictionary_encode() for column in columns[1:4]]
    return pyarrow.table([moments, *texts, pyarrow.array(columns[4], pyarrow.float64())], names=list(COLUMNS))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
