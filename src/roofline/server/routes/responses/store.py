"""Responses that are kept, in SQLite: in memory, or in a file that outlives the server. Bounded, and each its owner's.

A row holds the items of one request and its response. A conversation is the chain of rows by `previous`, and whoever
goes on from a response uses all of its chain. What was used least recently is removed first, of the owner who has the
most where there is not room for all.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from roofline.common import log
from roofline.common.errors import ConfigError, RequestError
from roofline.common.files import cause_of
from roofline.common.json_types import JsonObject
from roofline.server.limits import Limits

if TYPE_CHECKING:
    from sqlite3 import Connection, Error

LOG = log.get("server")
T = TypeVar("T")
APPLICATION = 0x526F666C  # "Rofl": SQLite's mark of whose file it is
VERSION = 1
ROW_BYTES = 512  # what a row takes beside its items and its response
LOCK_SECONDS = 1.0
TABLE = """
create table if not exists responses (
    id text primary key, owner text not null, previous text, used real not null, bytes integer not null,
    ended integer not null, input blob not null, output blob not null, response blob not null
) without rowid;
create index if not exists by_use on responses (owner, used);
create index if not exists by_age on responses (used)
"""
CHAIN = """
with recursive chain(id, previous, depth) as (
    select id, previous, 0 from responses where id = :id and owner = :owner
    union all
    select r.id, r.previous, depth + 1 from responses r join chain on r.id = chain.previous
    where r.owner = :owner and depth < :most
)
"""
INTERRUPTED = {"code": "server_error", "message": "The server ended before this response was complete."}


@dataclass(frozen=True)
class Kept:
    """A response and the items of its request. owner: whose it is; nobody else is told of it."""

    id: str
    owner: str
    previous: str | None
    input: Sequence[JsonObject]
    response: JsonObject


class ResponseStore:
    """Kept responses. Where they lie in a file all work on it is done by one thread, in the order of the calls.

    Args:
        file: None: in memory, until the server ends.
        clock: seconds since 1970.
    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self, file: Path | None = None, limits: Limits = Limits(), clock: Callable[[], float] = time.time
    ) -> None:
        self._file, self._limits, self._clock = file, limits, clock
        self._where = "memory" if file is None else str(file)
        self._latest = 0.0
        self._totals: dict[str, list[int]] = {}  # of each owner: rows, bytes
        self._connection: Connection | None = None  # in memory: made when first used
        self._thread = ThreadPoolExecutor(1, "responses") if file is not None else None
        if file is not None and self.keeps:
            self._connection = _open_file(file)
            self._read_file(file)

    def _read_file(self, file: Path) -> None:
        """Begin with what the file has. Raises ConfigError."""
        import sqlite3

        try:
            self._count()
            self._end_interrupted()
            self._expire()
        except (sqlite3.Error, msgspec.DecodeError) as error:
            self.close()
            raise ConfigError(f"--response-store {file}: {_problem(error)}") from error

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._limits.stored_responses > 0

    async def keep(self, kept: Kept) -> bool:
        """Keep a response, in place of an earlier state of it. False: it is too large, or cannot be written."""
        return await self._run(lambda: self._keep(kept))

    def keep_soon(self, kept: Kept) -> None:
        """`keep` from where nothing can be waited for; what is asked for later finds it."""
        if self._thread is None:
            self._keep(kept)
        else:
            self._thread.submit(self._keep, kept)

    async def find(self, owner: str, response: str) -> JsonObject:
        """A response of the owner's. Raises RequestError 404."""
        head, output = await self._run(lambda: self._find(owner, response, "response, output"))
        return {**msgspec.json.decode(head), "output": msgspec.json.decode(output)}

    async def find_input(self, owner: str, response: str) -> list[JsonObject]:
        """The items of the request that a response answers. Raises RequestError 404."""
        (items,) = await self._run(lambda: self._find(owner, response, "input"))
        return msgspec.json.decode(items)

    async def history(self, owner: str, response: str) -> list[bytes]:
        """The items of the conversation up to a response, its output among them: lists as JSON, oldest first.

        Raises RequestError: 404 where the response or one before it is not kept, 400 where they are too many to read.
        """
        return await self._run(lambda: self._history(owner, response))

    async def remove(self, owner: str, response: str) -> None:
        """Remove a response of the owner's. Raises RequestError 404."""
        await self._run(lambda: self._remove(owner, response))

    async def expire(self) -> None:
        """Remove what is too old, where no new response has done so."""
        if self._connection is not None:
            await self._run(self._expire)

    def close(self) -> None:
        """Write what is left to write, and let go of the file. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _run(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises RequestError 500 where the file cannot be read."""
        import sqlite3

        try:
            if self._thread is None:
                return work()
            return await asyncio.wrap_future(self._thread.submit(work))
        except (sqlite3.Error, msgspec.DecodeError) as error:
            LOG.error("responses in %s: %s", self._where, _problem(error))
            raise RequestError(500, "responses_unreadable", "The stored responses cannot be read.") from error

    @property
    def _open(self) -> "Connection":
        if self._connection is None:
            self._connection = _connect(":memory:")
            self._connection.executescript(TABLE)
        return self._connection

    def _keep(self, kept: Kept) -> bool:
        import sqlite3

        head = {name: value for name, value in kept.response.items() if name != "output"}
        parts = [msgspec.json.encode(part) for part in (kept.input, kept.response["output"], head)]
        size = ROW_BYTES + sum(map(len, parts))
        if size > self._limits.stored_bytes:
            return False
        ended = kept.response["status"] not in ("queued", "in_progress")
        row = (kept.id, kept.owner, kept.previous, self._now(), size, ended, *parts)
        before = {owner: [*total] for owner, total in self._totals.items()}
        try:
            with self._open as connection:
                connection.execute("begin")
                self._forget("id = ?", kept.id)
                connection.execute("insert into responses values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
                self._add(kept.owner, 1, size)
                self._make_room(kept.id)
        except sqlite3.Error as error:
            LOG.error("a response cannot be kept in %s: %s", self._where, _problem(error))
            self._totals = before
            return False
        return True

    def _expire(self) -> None:
        with self._open as connection:
            connection.execute("begin")
            self._forget_old()

    def _forget_old(self) -> None:
        self._forget("used < ? and ended", self._clock() - self._limits.stored_seconds)

    def _make_room(self, newest: str) -> None:
        """Remove what is too old, and what was used least recently of the owner who has the most."""
        self._forget_old()
        for at, most in ((0, self._limits.stored_responses), (1, self._limits.stored_bytes)):
            while sum(total[at] for total in self._totals.values()) > most:
                owners = sorted(self._totals, key=lambda owner: self._totals[owner][at], reverse=True)
                oldest = "select id from responses where owner = ? and id != ? order by used limit 1"
                if not any(self._forget(f"id = ({oldest})", owner, newest) for owner in owners):
                    return

    def _forget(self, which: str, *values: object) -> int:
        """Remove rows; returns how many there were."""
        rows = self._open.execute(f"delete from responses where {which} returning owner, bytes", values).fetchall()
        for owner, size in rows:
            self._add(owner, -1, -size)
        return len(rows)

    def _add(self, owner: str, rows: int, size: int) -> None:
        total = self._totals.setdefault(owner, [0, 0])
        total[0], total[1] = total[0] + rows, total[1] + size
        if total[0] == 0:
            del self._totals[owner]

    def _find(self, owner: str, response: str, columns: str) -> tuple[bytes, ...]:
        since = self._clock() - self._limits.stored_seconds
        where = "where id = ? and owner = ? and used >= ?"
        row = self._open.execute(f"select {columns} from responses {where}", (response, owner, since)).fetchone()
        if row is None:
            raise not_kept(response)
        return row

    def _history(self, owner: str, response: str) -> list[bytes]:
        most, since = self._limits.messages, self._clock() - self._limits.stored_seconds
        names = {"id": response, "owner": owner, "most": most, "now": self._now(), "since": since}
        joined = "from chain join responses using (id) order by depth desc"
        sizes = self._open.execute(f"{CHAIN} select responses.previous, bytes, used, ended {joined}", names).fetchall()
        field = "previous_response_id"
        if not sizes or sizes[0][0] is not None or min(used for _, _, used, _ in sizes) < since:
            if len(sizes) > most:
                raise RequestError(400, "invalid_value", f"{field}: has more than {most} responses.", param=field)
            which = "it" if not sizes else "a response before it"
            message = f"{field}: {response[:100]!r} cannot be gone on from: {which} is not stored."
            raise RequestError(404, "previous_response_not_found", message, param=field)
        if not sizes[-1][3]:
            raise RequestError(400, "invalid_value", f"{field}: the response is not complete yet.", param=field)
        if sum(size for _, size, _, _ in sizes) > self._limits.body_bytes:
            message = f"{field}: the conversation has more than {self._limits.body_bytes} bytes."
            raise RequestError(400, "invalid_value", message, param=field)
        rows = self._open.execute(f"{CHAIN} select input, output {joined}", names).fetchall()
        with self._open as connection:
            connection.execute(f"{CHAIN} update responses set used = :now where id in (select id from chain)", names)
        return [part for row in rows for part in row]

    def _remove(self, owner: str, response: str) -> None:
        with self._open as connection:
            connection.execute("begin")
            if not self._forget("id = ? and owner = ?", response, owner):
                raise not_kept(response)

    def _now(self) -> float:
        """The time, later than any before: what was used last is last in order."""
        self._latest = max(self._clock(), self._latest + 1e-6)
        return self._latest

    def _count(self) -> None:
        rows = self._open.execute("select owner, count(*), sum(bytes) from responses group by owner")
        self._totals = {owner: [count, size] for owner, count, size in rows}

    def _end_interrupted(self) -> None:
        """Responses that a server which ended was computing have failed."""
        rows = self._open.execute("select response from responses where not ended").fetchall()
        with self._open as connection:
            for (raw,) in rows:
                response = {**msgspec.json.decode(raw), "status": "failed", "error": INTERRUPTED}
                values = (msgspec.json.encode(response), response["id"])
                connection.execute("update responses set response = ?, ended = 1 where id = ?", values)


def not_kept(response: str) -> RequestError:
    """What anybody is told of a response that is not kept, or is another's."""
    message = f"There is no stored response {response[:100]!r}."
    return RequestError(404, "response_not_found", message, param="response_id")


def _connect(database: str) -> "Connection":
    import sqlite3

    return sqlite3.connect(database, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)


def check_file(file: Path) -> None:
    """Make the file where there is none. Raises ConfigError where it cannot be written."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # texts of users: nobody else's
    except OSError as error:
        raise ConfigError(f"--response-store {file}: cannot be opened: {cause_of(error)}") from error


def _open_file(file: Path) -> "Connection":
    """The file, for this process alone. Raises ConfigError."""
    import sqlite3

    check_file(file)
    connection = _connect(str(file))
    try:
        connection.execute("pragma locking_mode = exclusive")
        mark, version = (
            connection.execute(f"pragma {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        tables = connection.execute("select count(*) from sqlite_master").fetchone()[0]
        if tables and mark != APPLICATION:
            raise ConfigError(f"--response-store {file}: is a database of another program; name another file")
        if tables and version != VERSION:
            raise ConfigError(
                f"--response-store {file}: has the form of another version of Roofline; name another file"
            )
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute("pragma secure_delete = on")  # what a client deletes is overwritten
        if connection.execute("pragma quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("quick_check")
        connection.executescript(f"pragma application_id = {APPLICATION}; pragma user_version = {VERSION}; {TABLE}")
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(f"--response-store {file}: {_problem(error)}") from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _problem(error: "Error | msgspec.DecodeError") -> str:
    """What is wrong with a file, and what can be done."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "is in use by another process; end that one, or name another file"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return "cannot be written; name a file in a folder that can be"
    if name.startswith("SQLITE_FULL"):
        return "cannot be written: the disk is full"
    if name.startswith("SQLITE_IOERR"):
        return "cannot be read or written: the disk reports an error"
    return "is damaged; remove it, with the responses that it holds, or name another file"
