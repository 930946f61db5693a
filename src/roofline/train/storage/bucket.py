"""A store that is a bucket: S3 and what speaks like it, Google's and Azure's, through obstore."""

import functools
import importlib.util
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from roofline.common import env
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.storage.local import explained, written
from roofline.train.storage.store import (
    Data,
    Entry,
    ExistsError,
    MissingError,
    Patience,
    StoreError,
    UnreachableError,
    checked,
)

BLOCK = 1 << 20
PART = 8 << 20  # bytes of a part of a large object
PARTS = 9_000  # S3 takes 10,000
LONGEST = 15.0  # seconds between two tries
T = TypeVar("T")

_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY",
}
SCHEMES = tuple(_KEYS)
_Cause = tuple[type[StoreError], str, str]  # kind, cause, remedy
_REGION: _Cause = (StoreError, "the bucket lies in another region", "set AWS_REGION to that of the bucket")
_BUSY: _Cause = (UnreachableError, "others are writing it", "try again")
_CODES: dict[str, _Cause] = {  # of S3
    "NoSuchBucket": (StoreError, "there is no such bucket", "create it, or correct the URL"),
    "InvalidAccessKeyId": (StoreError, "the server does not know this access key", "correct AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": (StoreError, "the secret key is wrong", "correct AWS_SECRET_ACCESS_KEY"),
    "ExpiredToken": (StoreError, "the session token has expired", "get new keys"),
    "RequestTimeTooSkewed": (StoreError, "this machine's clock differs from the server's", "set the clock"),
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "ConditionalRequestConflict": _BUSY,
    "OperationAborted": _BUSY,
}
_PHRASES: tuple[tuple[str, _Cause], ...] = (  # in the first line of an error
    (r"performing \w+ http://(169\.254\.169\.254|metadata\.google)|performing token request",
     (StoreError, "no keys were given", "{keys}")),
    ("^Generic MicrosoftAzure error: Account must be", (StoreError, "no account is named",
                                                        "set AZURE_STORAGE_ACCOUNT_NAME")),
    ("Received redirect without LOCATION", _REGION),
)  # fmt: skip
_TRANSPORT: tuple[tuple[str, _Cause], ...] = (  # below a failed connection; the last fits all
    ("BadScheme", (StoreError, "its server is reached without encryption", "set AWS_ALLOW_HTTP=true to permit it")),
    ("dns error", (UnreachableError, "no address was found for its server", "correct AWS_ENDPOINT_URL")),
    ("ConnectionRefused", (UnreachableError, "nothing listens there", "correct AWS_ENDPOINT_URL, or start the server")),
    (
        "NetworkUnreachable|HostUnreachable",
        (UnreachableError, "there is no route to its server", "look at the network"),
    ),
    ("InvalidContentType", (StoreError, "its server does not encrypt", "begin AWS_ENDPOINT_URL with http://")),
    ("ertificate|UnknownIssuer", (StoreError, "its server's certificate is not trusted here", "have it trusted")),
    ("TimedOut|kind: Timeout", (UnreachableError, "its server did not answer in time", "look at the network")),
    ("", (UnreachableError, "the connection broke", "look at the network")),
)


@functools.cache
def _first_process() -> int:
    """The process that obstore was first used in: its threads do not survive a fork, and calls would wait for ever."""
    return os.getpid()


class ObjectStore:
    """Objects below a prefix of a bucket. A large object goes up in parts and is there when the last one is.

    A process that is killed meanwhile leaves parts that nobody sees and that some servers bill: give the bucket a rule
    that removes unfinished uploads after some days.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.rstrip("/").partition("/")
        if not bucket:
            raise ConfigError(f"{url}: no bucket is named: {scheme}://BUCKET/PREFIX is the form")
        if prefix:
            checked(prefix, "prefix")
        if importlib.util.find_spec("obstore") is None:
            raise UnsupportedError(url, "obstore is not installed", ["roofline[train]", "a local folder"])
        self._patience = patience
        self._scheme, self._bucket, self._prefix = scheme, bucket, prefix
        self._clients: dict[int | None, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url, self._patience)

    @property
    def url(self) -> str:
        return "/".join(filter(None, (f"{self._scheme}://{self._bucket}", self._prefix)))

    def path(self, name: str) -> Path | None:
        return None

    def get(self, name: str) -> bytes:
        import obstore

        client = self._client()
        return self._call(name, lambda: bytes(obstore.get(client, checked(name)).bytes()))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        import obstore

        if not length:
            return b""
        client = self._client()
        read = functools.partial(obstore.get_range, client, checked(name), start=start, length=length)
        try:
            data = self._call(name, lambda: bytes(read()))
        except StoreError as error:
            if _status(str(error.__cause__)) != 416:  # the range begins behind the end
                raise
            data = b""
        if len(data) != length:
            raise StoreError(f"{self._named(name)} ends before byte {start + length:,}: it is cut or another object")
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        import obstore

        client = self._client()
        stream = self._call(name, lambda: obstore.get(client, checked(name)).stream(BLOCK))
        while (data := self._call(name, lambda: next(stream, None))) is not None:
            yield bytes(data)

    def fetch(self, name: str, target: Path) -> None:
        with explained(target), written(target) as file:
            for data in self.chunks(name):
                file.write(data)

    def put(self, name: str, data: Data) -> None:
        self._put(name, data, len(data))

    def put_file(self, name: str, path: Path) -> None:
        with explained(path):
            size = path.stat().st_size
        self._put(name, path, size)

    def put_new(self, name: str, data: Data) -> None:
        import obstore

        client = self._client(retries=0)
        put = functools.partial(obstore.put, client, checked(name), data, mode="create", use_multipart=False)
        until, wait, lost = time.monotonic() + self._patience.seconds, self._patience.wait, False
        for left in range(self._patience.retries, -1, -1):
            try:
                self._call(name, put)
                return
            except ExistsError:
                # A lost answer: whether the earlier try has written it, only its content can tell.
                if lost and self.get(name) == bytes(data):
                    return
                raise
            except UnreachableError:
                if not left or time.monotonic() > until:
                    raise
                lost = True
            time.sleep(wait * random.uniform(0.5, 1))
            wait = min(2 * wait, LONGEST)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        import obstore

        client, below = self._client(), checked(prefix, "prefix") if prefix else None
        found = self._call(prefix, lambda: obstore.list(client, below, chunk_size=1000).collect())
        return sorted(Entry(about["path"], about["size"]) for about in found)

    def exists(self, name: str) -> bool:
        try:
            self.version(name)
        except MissingError:
            return False
        return True

    def version(self, name: str) -> str:
        import obstore

        client = self._client()
        about = self._call(name, lambda: obstore.head(client, checked(name)))
        return f"{about['e_tag']}-{about['version']}-{about['last_modified'].isoformat()}"

    def delete(self, name: str) -> None:
        import obstore

        client = self._client()
        try:
            self._call(name, lambda: obstore.delete(client, checked(name)))
        except MissingError:
            return

    def delete_prefix(self, prefix: str) -> None:
        import obstore

        client, names = self._client(), [entry.name for entry in self.list(checked(prefix, "prefix"))]
        if names:
            self._call(prefix, lambda: obstore.delete(client, names))

    def _put(self, name: str, data: Data | Path, size: int) -> None:
        import obstore

        part = max(PART, -(-size // PARTS // BLOCK) * BLOCK)
        client = self._client()
        self._call(name, lambda: obstore.put(client, checked(name), data, chunk_size=part, max_concurrency=4))

    def _named(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _client(self, retries: int | None = None) -> Any:
        """obstore's object for so many retries (None: those of our patience); it keeps its connections."""
        if _first_process() != os.getpid():
            raise UnsupportedError(
                f"{self.url} in a forked process",
                "the process it was forked from has used an object store, whose threads a fork does not copy",
                ["multiprocessing's start method 'spawn' or 'forkserver'"],
            )
        if retries not in self._clients:
            from obstore.store import from_url

            endpoint = self._endpoint()
            if endpoint and not endpoint.startswith(("http://", "https://")):
                raise ConfigError(f"AWS_ENDPOINT_URL={endpoint!r} is no URL: begin it with https:// or http://")
            quoted = f"{self._scheme}://{self._bucket}/{urllib.parse.quote(self._prefix)}"
            self._clients[retries] = self._call("", lambda: from_url(quoted, **self._options(retries)))
        return self._clients[retries]

    def _options(self, retries: int | None) -> dict[str, Any]:
        patience = self._patience
        return {
            "client_options": {  # given any, obstore does not look for these in the environment
                "allow_http": (env.foreign("AWS_ALLOW_HTTP") or "").lower() in ("1", "true", "yes", "on"),
                "read_timeout": timedelta(seconds=patience.stall),
                "timeout": timedelta(hours=1),
            },
            "retry_config": {
                "max_retries": patience.retries if retries is None else retries,
                "retry_timeout": timedelta(seconds=patience.seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=patience.wait),
                    "max_backoff": timedelta(seconds=LONGEST),
                    "base": 2,
                },
            },
        }

    def _call(self, name: str, function: Callable[[], T]) -> T:
        """What the function returns. Raises StoreError: its error, explained."""
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            return _interruptible(function)
        except AlreadyExistsError as error:
            raise ExistsError(f"{self._named(name)} exists already") from error
        except (BaseError, OSError, ValueError) as error:
            raise self._explain(name, error) from error

    def _endpoint(self) -> str | None:
        """Of S3, where it is not Amazon's own; the names in the order in which obstore looks at them."""
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if self._scheme == "s3" else ()
        return next(filter(None, map(env.foreign, names)), None)

    def _explain(self, name: str, error: Exception) -> StoreError:
        where = self._named(name)
        if endpoint := self._endpoint():
            where += f" at {endpoint}"
        text = str(error)
        found = _cause(text)
        if found:
            kind, cause, remedy = found
            return kind(f"{where}: {cause}: {remedy.format(keys=_KEYS[self._scheme])}")
        status = _status(text)
        if isinstance(error, FileNotFoundError) or status == 404:
            return MissingError(f"{where} is missing: correct the name, or write it first")
        if status in (401, 403):
            return StoreError(f"{where}: these keys do not permit it: {_KEYS[self._scheme]}, or have it permitted")
        if status >= 500 or status in (408, 429):
            return UnreachableError(f"{where}: its server answers {status}: try later, or ask who runs it")
        return StoreError(f"{where}: {' '.join(text.partition('Debug source')[0].split())[:300]}: look at its server")


def _cause(text: str) -> _Cause | None:
    """What an error of obstore says, where it is one that we know; names of objects in its text are not looked at."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    if code and code[1] in _CODES:
        return _CODES[code[1]]
    for pattern, cause in _PHRASES:
        if re.search(pattern, text.partition("\n")[0]):
            return cause
    _, failed, inner = text.rpartition("HttpError {")
    if failed:
        return next(cause for pattern, cause in _TRANSPORT if re.search(pattern, inner))
    return None


def _status(text: str) -> int:
    found = re.search(r"status code: (\d{3})", text)
    return int(found[1]) if found else 0


def _interruptible(function: Callable[[], T]) -> T:
    """The function's result; in the main thread Ctrl-C ends the wait, which obstore alone would sit out."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(function())
        except BaseException as error:  # raised again in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
