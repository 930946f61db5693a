"""The interface of a store, which keeps objects under names: in a local folder or in a bucket of an object store."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from roofline.common.errors import ConfigError

Data = bytes | bytearray | memoryview
LISTING_SECONDS = 30.0  # that an object may be missing from listings after it was written


class StoreError(ConfigError):
    """A store or an object cannot be used; the message names its URL, the cause and the remedy."""


class MissingError(StoreError):
    """There is no object of that name."""


class ChangedError(StoreError):
    """The object is not the one that was asked for: it has been replaced."""


class UnreachableError(StoreError):
    """The server did not answer, not even after all retries; the same call may succeed later."""


class Entry(NamedTuple):
    """An object in a listing. size: in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Patience:
    """How long an object store may fail (status 5xx, a lost connection, no answer) before a call raises.

    retries: of each request and of each part of a large object. The waits between them double from `wait` seconds up
        to 15.
    seconds: no retry starts later than this after the request began.
    stall: a connection that brings no byte for so many seconds counts as lost. A part (8 MiB, more in objects over
        70 GB) has to be sent within this time.
    """

    retries: int = 10
    wait: float = 0.1
    seconds: float = 180
    stall: float = 60


class Store(Protocol):
    """Objects by name; a name is a relative path with slashes. Several threads may use all methods.

    Writes are atomic: nobody sees half an object, however a put ends. All methods raise StoreError: MissingError where
    the object to read does not exist, UnreachableError where a later retry may help.
    """

    @property
    def url(self) -> str:
        """The folder, or scheme://bucket/prefix."""

    def path(self, name: str) -> Path | None:
        """The object's file, if it is one on this machine."""

    def get(self, name: str) -> bytes: ...

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes. Raises StoreError where the object ends before."""

    def chunks(self, name: str, tag: str | None = None) -> Iterator[bytes]:
        """The object's bytes in pieces of about a MiB. Raises ChangedError unless its tag is the one that is named."""

    def put(self, name: str, data: Data) -> None:
        """Write an object, or replace the one of that name; a large one is sent in parts."""

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """The objects below the folder `prefix` at any depth, sorted by name; empty if there is no such folder."""

    def exists(self, name: str) -> bool: ...

    def version(self, name: str) -> str:
        """A text that changes whenever the object is rewritten."""

    def tag(self, name: str) -> str:
        """A text that tells the object from one with other content that takes its name."""

    def tags(self) -> Mapping[str, str]:
        """The tags of the objects directly in the store's folder, by name, with few requests."""

    def delete(self, name: str) -> None:
        """Delete the object; it is no error if there is none."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete all that `list(prefix)` names. Raises ConfigError on an empty prefix, which would mean everything."""


def unlisted(store: Store, name: str) -> StoreError:
    """The error for an object that can be read but is in no listing, by which checkpoints are found again."""
    return StoreError(
        f"{store.url} takes objects and does not list them: {name} is there, and in no listing for "
        f"{LISTING_SECONDS:g} s, so no checkpoint would be found again: name another bucket, or ask who runs the server"
    )


def checked_name(name: str, what: str = "name") -> str:
    """The name itself. Raises ConfigError if it is not a relative path or leads out of the store."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(letter) < 32 for letter in name):
        raise ConfigError(f"{name!r} is no {what} of an object: relative parts divided by single slashes are")
    return name
