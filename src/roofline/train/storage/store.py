"""A place where objects lie under names: a local folder, or a bucket of an object store, behind one interface."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from roofline.common.errors import ConfigError

Data = bytes | bytearray | memoryview


class StoreError(ConfigError):
    """A place, or an object in it, that cannot be used; the message names its URL, the cause and the remedy."""


class MissingError(StoreError):
    """There is no object of that name."""


class ExistsError(StoreError):
    """There is an object of that name already."""


class UnreachableError(StoreError):
    """No answer, also after all retries; the same call may succeed later."""


class Entry(NamedTuple):
    """An object of a listing. size: in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Patience:
    """How long an object store may fail (5xx, a lost connection, no answer) before a call does.

    retries: of each request, and of each part of a large object, with waits that double from `wait` to 15 seconds.
    seconds: no retry starts later than this after the request began.
    stall: seconds without a byte of the answer after which a connection counts as lost. A part (8 MiB, more in objects
        over 70 GB) has to be sent within it.
    """

    retries: int = 10
    wait: float = 0.1
    seconds: float = 180
    stall: float = 60


class Store(Protocol):
    """Objects by name; a name is relative, its parts divided by slashes. All methods may be used by several threads.

    An object is whole or not there: nobody sees half of one, however a put ends. All methods raise StoreError;
    MissingError where an object that they read is not there; UnreachableError where a retry later may help.
    """

    @property
    def url(self) -> str:
        """The folder, or scheme://bucket/prefix."""

    def path(self, name: str) -> Path | None:
        """The file that the object is, if it is one of this machine's."""

    def get(self, name: str) -> bytes: ...

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes. Raises StoreError where the object ends before."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The object in pieces of about a MiB."""

    def fetch(self, name: str, target: Path) -> None:
        """Copy the object to a file, which is there whole or not at all."""

    def put(self, name: str, data: Data) -> None:
        """Write an object, or replace the one of that name."""

    def put_file(self, name: str, path: Path) -> None:
        """As `put`, from a file; a large one goes in parts, at most four of which are in memory."""

    def put_new(self, name: str, data: Data) -> None:
        """Write a small object where there is none yet; of several callers one wins. Raises ExistsError.

        Where the answer to a request was lost and the object is there afterwards, equal bytes count as our own: callers
        that race put something of their own into `data`.
        """

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """What lies below the folder `prefix` at any depth, by name; empty where there is no such folder."""

    def exists(self, name: str) -> bool: ...

    def version(self, name: str) -> str:
        """A text that changes whenever the object is written again."""

    def delete(self, name: str) -> None:
        """No error where there is none."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete what `list(prefix)` would name. Raises ConfigError on an empty prefix, which would mean all."""


def checked(name: str, what: str = "name") -> str:
    """The name itself. Raises ConfigError on one that is no relative path, or that leads elsewhere."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(letter) < 32 for letter in name):
        raise ConfigError(f"{name!r} is no {what} of an object: relative parts divided by single slashes are")
    return name
