"""A store in a bucket: S3 and compatible servers, Google Cloud Storage and Azure, through obstore."""

import contextlib
import functools
import importlib.util
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from roofline.common import env
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.storage.store import (
    ChangedError,
    Data,
    Entry,
    MissingError,
    Patience,
    StoreError,
    UnreachableError,
    checked_name,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client

BLOCK = 1 << 20  # bytes of a chunk
PART = 8 << 20  # bytes of a part of a large object
MOST_PARTS = 9_000  # of an object; S3 accepts 10,000
LONGEST_WAIT = 15.0  # seconds between two tries
T = TypeVar("T")

_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY",
}
SCHEMES = tuple(_KEYS)
_Cause = tuple[type[StoreError], str, str]  # the error to raise, its cause, the remedy
_REGION: _Cause = (StoreError, "the bucket lies in another region", "set AWS_REGION to that of the bucket")
_BUSY: _Cause = (UnreachableError, "others are writing it", "try again")
_CODES: dict[str, _Cause] = {  # by the error code of S3
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
_PHRASES: tuple[tuple[str, _Cause], ...] = (  # by a pattern in the first line of obstore's error
    (r"performing \w+ http://(169\.254\.169\.254|metadata\.google)|performing token request",
     (StoreError, "no keys were given", "{keys}")),
    ("^Generic MicrosoftAzure error: Account must be", (StoreError, "no account is named",
                                                        "set AZURE_STORAGE_ACCOUNT_NAME")),
    ("Received redirect without LOCATION", _REGION),
)  # fmt: skip
_TRANSPORT: tuple[tuple[str, _Cause], ...] = (  # by a pattern behind HttpError; the last one fits all
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
    """The process that first used obstore: its threads do not survive a fork, and calls would wait for ever."""
    return os.getpid()


class ObjectStore:
    """The objects below a prefix of a bucket. A large object is uploaded in parts and exists once the last one arrives.

    A process that is killed during an upload leaves invisible parts, which some servers bill: give the bucket a rule
    that removes unfinished uploads after some days.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        scheme, _, location = url.partition("://")
        bucket, _, prefix = location.rstrip("/").partition("/")
        if not bucket:
            raise ConfigError(f"{url}: no bucket is named: {scheme}://BUCKET/PREFIX is the form")
        if prefix:
            checked_name(prefix, "prefix")
        if importlib.util.find_spec("obstore") is None:
            raise UnsupportedError(url, "obstore is not installed", ["roofline[train]", "a local folder"])
        self._patience = patience
        self._scheme, self._bucket, self._prefix = scheme, bucket, prefix

    def __reduce__(self) -> tuple[type["ObjectStore"], tuple[str, Patience]]:
        return ObjectStore, (self.url, self._patience)

    @property
    def url(self) -> str:
        return "/".join(filter(None, (f"{self._scheme}://{self._bucket}", self._prefix)))

    def path(self, name: str) -> Path | None:
        return None

    def get(self, name: str) -> bytes:
        return self._call(checked_name(name), lambda client: bytes(client.get(name).bytes()))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        try:
            data = self._call(
                checked_name(name), lambda client: bytes(client.get_range(name, start=start, length=length))
            )
        except StoreError as error:
            if _status(str(error.__cause__)) != 416:  # the range begins behind the object's end
                raise
            data = b""
        if len(data) != length:
            raise StoreError(f"{self._location(name)} ends before byte {start + length:,}: it is cut or another object")
        return data

    def chunks(self, name: str, tag: str | None = None) -> Iterator[bytes]:
        answer = self._call(checked_name(name), lambda client: client.get(name))
        # The answer's own head says which object its bytes are of, whether or not the server knows If-Match.
        if tag is not None and tag not in (_tag(answer.meta), _time_tag(answer.meta)):
            raise ChangedError(f"{self._location(name)} has been replaced")
        stream = answer.stream(BLOCK)
        while (data := self._result(name, lambda: next(stream, None))) is not None:
            yield bytes(data)

    def put(self, name: str, data: Data) -> None:
        part = max(PART, -(-len(data) // MOST_PARTS // BLOCK) * BLOCK)
        self._call(checked_name(name), lambda client: client.put(name, data, chunk_size=part, max_concurrency=4))

    def create(self, name: str, data: Data) -> bool:
        """Write an object unless there is one of that name; returns whether it was written.

        A server that knows no conditional writes may let two of them through: read it again to know who was the last.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def write(client: "Client") -> bool:
            try:
                client.put(name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return self._call(checked_name(name), write)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        folder = checked_name(prefix, "prefix") if prefix else None
        objects = self._call(prefix, lambda client: client.list(folder, chunk_size=1000).collect())
        return sorted(Entry(fact["path"], fact["size"]) for fact in objects)

    def exists(self, name: str) -> bool:
        try:
            self.version(name)
        except MissingError:
            return False
        return True

    def version(self, name: str) -> str:
        head = self._call(checked_name(name), lambda client: client.head(name))
        return f"{head['e_tag']}-{head['version']}-{head['last_modified'].isoformat()}"

    def tag(self, name: str) -> str:
        return _tag(self._call(checked_name(name), lambda client: client.head(name)))

    def tags(self) -> Mapping[str, str]:
        listing = self._call("", lambda client: client.list_with_delimiter())
        return {fact["path"]: _tag(fact) for fact in listing["objects"]}

    def delete(self, name: str) -> None:
        with contextlib.suppress(MissingError):
            self._call(checked_name(name), lambda client: client.delete(name))

    def delete_prefix(self, prefix: str) -> None:
        names = [entry.name for entry in self.list(checked_name(prefix, "prefix"))]
        if names:
            self._call(prefix, lambda client: client.delete(names))

    def _location(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @functools.cached_property
    def _client(self) -> "Client":
        """obstore's store object, which keeps its connections."""
        from obstore.store import from_url

        endpoint = self._endpoint()
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"AWS_ENDPOINT_URL={endpoint!r} is no URL: begin it with https:// or http://")
        quoted = f"{self._scheme}://{self._bucket}/{urllib.parse.quote(self._prefix)}"
        patience = self._patience
        return self._result("", lambda: from_url(
            quoted,
            client_options={  # once any option is given, obstore no longer reads these from the environment
                "allow_http": (env.foreign("AWS_ALLOW_HTTP") or "").lower() in ("1", "true", "yes", "on"),
                "read_timeout": timedelta(seconds=patience.stall),
                "timeout": timedelta(hours=1),
            },
            retry_config={
                "max_retries": patience.retries,
                "retry_timeout": timedelta(seconds=patience.seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=patience.wait),
                    "max_backoff": timedelta(seconds=LONGEST_WAIT),
                    "base": 2,
                },
            },
        ))  # fmt: skip

    def _call(self, name: str, function: Callable[["Client"], T]) -> T:
        """The function's result for obstore's client. Raises StoreError, which explains what obstore raised."""
        if _first_process() != os.getpid():
            raise UnsupportedError(
                f"{self.url} in a forked process",
                "the process it was forked from has used an object store, whose threads a fork does not copy",
                ["multiprocessing's start method 'spawn' or 'forkserver'"],
            )
        client = self._client
        return self._result(name, lambda: function(client))

    def _result(self, name: str, function: Callable[[], T]) -> T:
        from obstore.exceptions import BaseError

        try:
            return _interruptible(function)
        except (BaseError, OSError, ValueError) as error:
            raise self._explain(name, error) from error

    def _endpoint(self) -> str | None:
        """The address of an S3 server that is not Amazon's, from the variables that obstore reads, in its order."""
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if self._scheme == "s3" else ()
        return next(filter(None, map(env.foreign, names)), None)

    def _explain(self, name: str, error: Exception) -> StoreError:
        where = self._location(name)
        if endpoint := self._endpoint():
            where += f" at {endpoint}"
        text = str(error)
        if known_cause := _cause(text):
            kind, cause, remedy = known_cause
            return kind(f"{where}: {cause}: {remedy.format(keys=_KEYS[self._scheme])}")
        status = _status(text)
        if isinstance(error, FileNotFoundError) or status == 404:
            return MissingError(f"{where} is missing: correct the name, or write it first")
        if status in (401, 403):
            return StoreError(f"{where}: these keys do not permit it: {_KEYS[self._scheme]}, or have it permitted")
        if status >= 500 or status in (408, 429):
            return UnreachableError(f"{where}: its server answers {status}: try later, or ask who runs it")
        return StoreError(f"{where}: {' '.join(text.partition('Debug source')[0].split())[:300]}: look at its server")


def _tag(about: "ObjectMeta") -> str:
    """An object's entity tag, which listings of Azure give without its quotes, or else what tells of its age."""
    entity = about["e_tag"]
    return f"{entity.removeprefix('W/').strip(chr(34))}-{about['size']}" if entity else _time_tag(about)


def _time_tag(about: "ObjectMeta") -> str:
    """An object's time, in whole seconds as heads of answers have it, and its size."""
    return f"{int(about['last_modified'].timestamp())}-{about['size']}"


def _cause(text: str) -> _Cause | None:
    """The cause of an error of obstore, if its text shows one of ours; names of objects in the text are ignored."""
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
    """The HTTP status in an error of obstore, 0 where it has none."""
    match = re.search(r"status code: (\d{3})", text)
    return int(match[1]) if match else 0


def _interruptible(function: Callable[[], T]) -> T:
    """The function's result. In the main thread Ctrl-C ends the wait, which obstore alone would sit out."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised again in the thread that waits
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result.result()
