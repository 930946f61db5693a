"""Who asks: keys by name, what each may do, and the file they stand in, which is read again when it changes.

A file of keys is TOML, an entry a key:

    [[keys]]
    name = "alice"                  # in log lines and metrics
    sha256 = "9f86d081884c7d65..."  # of the key; or the key itself: key = "..."
    scopes = ["use"]                # or ["use", "admin"]; ["metrics"]: figures and readiness alone
    streams = 8                     # requests it may have open at a time; default: the server's
    priority = -10                  # the most urgent priority that its requests may name; default 0
    weight = 2.0                    # its share of the engine beside those of other keys; default 1

Nothing here keeps a key: only hashes of keys stay in memory, and no message says what a file has in place of one.
"""

import hashlib
import hmac
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.fields import Fields
from roofline.server.options import KEY
from roofline.server.watched import WatchedFiles

LOG = log.get("server")
USE, ADMIN, METRICS = "use", "admin", "metrics"  # scopes; routes declare what they need (server/scopes.py)
SCOPES = (USE, ADMIN, METRICS)
UNLIMITED = sys.maxsize  # streams of requests without a key: the queue alone bounds them
PRIORITIES = 1000  # priorities are from -PRIORITIES, the most urgent, to PRIORITIES
MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HASH = re.compile(r"[0-9a-f]{64}")
FIELDS = ("name", "key", "sha256", "scopes", "streams", "priority", "weight")


@dataclass(frozen=True)
class Principal:
    """Whoever a request comes from.

    salt: of its prefixes in the cache, which no other principal's requests are given pages of; made from the key, never
    by the client. streams: requests open at a time, None: as many as the server's limit. priority: the most urgent one
    that its requests may name. weight: its share of the engine while others wait too. background: its requests are
    those of batches, which are computed while there are no others.
    """

    name: str
    scopes: frozenset[str]
    salt: str = field(default="", repr=False)
    streams: int | None = None
    priority: int = 0
    weight: float = 1.0
    background: bool = False


# Without keys all requests come from these: whoever works on this machine, and whoever reaches an open address.
LOCAL = Principal("local", frozenset((USE, ADMIN)), streams=UNLIMITED, priority=-PRIORITIES)
ANYBODY = Principal("anybody", frozenset((USE,)), streams=UNLIMITED)
NOBODY = Principal("nobody", frozenset())  # without a key, on a route that needs none
# Of a single key, which clients are given: it administers nothing.
SINGLE = Principal("default", frozenset((USE,)))


class Keys:
    """The keys of a server: a single one, those of a file, or both. Without any, `required` is False.

    Raises ConfigError for a file that cannot be used; one that becomes so later leaves the keys as they were.
    """

    def __init__(self, single: str | None = None, file: Path | None = None) -> None:
        self._single = {} if single is None else {digest_of(single.encode()): SINGLE}
        self._file = file
        self._watched = WatchedFiles() if file is None else WatchedFiles(file)
        self._principals = self._read()
        self.required = bool(self._principals)

    def identify(self, key: bytes) -> Principal | None:
        """Whose key this is. Takes the same time whichever it is: all are compared, and only hashes of them."""
        digest, principal = digest_of(key), None
        for known, owner in self._principals.items():
            if hmac.compare_digest(known, digest):
                principal = owner
        return principal

    def refresh(self, force: bool = False) -> None:
        """Read the file again where it changed, or in any case."""
        if self._file is None or not (self._watched.changed() or force):
            return
        try:
            self._principals = self._read()
        except ConfigError as error:
            LOG.error("%s. The keys that were read before stay.", str(error).rstrip("."))
            return
        LOG.info("%s: %d keys", self._file, len(self._principals) - len(self._single))

    def named(self, name: str) -> Principal | None:
        """The principal of that name, None where no key has it."""
        return next((principal for principal in self._principals.values() if principal.name == name), None)

    def __len__(self) -> int:
        return len(self._principals)

    def _read(self) -> dict[bytes, Principal]:
        single = {digest: _salted(principal, digest) for digest, principal in self._single.items()}
        if self._file is None:
            return single
        from_file = read_keys(self._file)
        for digest, principal in from_file.items():
            if digest in single or any(principal.name == other.name for other in single.values()):
                raise ConfigError(f"{self._file}: {principal.name}: has the name or the key of --api-key")
        return {**single, **from_file}


def new_entry(name: str, scopes: Sequence[str] = (USE,)) -> tuple[str, str]:
    """A fresh key, and its entry for a file of keys, which has only its hash. Raises ConfigError for a bad name."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not 1 to 64 letters, digits, '.', '_' and '-'")
    key = f"rl-{secrets.token_urlsafe(32)}"
    listed = ", ".join(f'"{scope}"' for scope in scopes)
    entry = ["[[keys]]", f'name = "{name}"', f'sha256 = "{digest_of(key.encode()).hex()}"', f"scopes = [{listed}]"]
    return key, "\n".join(entry) + "\n"


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> dict[bytes, Principal]:
    """The principals of a file of keys, by the hashes of their keys. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
        content = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:  # its words may repeat what stands in the file
        place = re.search(r"\(at [^()]*\)$", str(error))
        raise ConfigError(f"{path}: is not TOML {place[0] if place else ''}".rstrip()) from None
    except ValueError:  # a number of thousands of digits
        raise ConfigError(f"{path}: has a value that cannot be read") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None
    _refuse_unknown(path, content, ("keys",), "")
    entries = Fields(path, content).objects("keys") if "keys" in content else []
    if not 1 <= len(entries) <= MAX_KEYS:
        raise ConfigError(f"{path}: keys: has {len(entries)} entries, and 1 to {MAX_KEYS} are needed")
    principals: dict[bytes, Principal] = {}
    names: set[str] = set()
    for entry in entries:
        digest, principal = _entry(path, entry)
        if digest in principals or principal.name in names:
            entry.refuse("name", f"{principal.name!r} or its key is there twice")
        principals[digest] = principal
        names.add(principal.name)
    return principals


def _entry(path: Path, entry: Fields) -> tuple[bytes, Principal]:
    """The hash of an entry's key, and whose it is."""
    _refuse_unknown(path, entry.values, FIELDS, entry.within)
    name = entry.need("name", str)
    if not NAME.fullmatch(name):
        entry.refuse("name", "is not 1 to 64 letters, digits, '.', '_' and '-'")
    listed = entry.elements("scopes", str)
    scopes = frozenset((USE,) if listed is None else listed)  # an empty list: a key that may do nothing for now
    if not scopes <= set(SCOPES):
        entry.refuse("scopes", f"are not among {', '.join(map(repr, SCOPES))}")
    streams, weight = entry.get("streams", int), entry.get("weight", float, 1.0)
    priority = entry.get("priority", int, 0)
    if streams is not None and streams < 1:
        entry.refuse("streams", "is less than 1")
    if not -PRIORITIES <= priority <= PRIORITIES:
        entry.refuse("priority", f"is not within {-PRIORITIES} and {PRIORITIES}")
    if not 0.001 <= weight <= 1000:
        entry.refuse("weight", "is not within 0.001 and 1000")
    digest = _digest(entry)
    return digest, _salted(
        Principal(name=name, scopes=scopes, salt="", streams=streams, priority=priority, weight=weight), digest
    )


def _digest(entry: Fields) -> bytes:
    """The hash of an entry's key. Neither of the two is repeated in an error."""
    key, sha256 = entry.values.get("key"), entry.values.get("sha256")
    if (key is None) == (sha256 is None):
        entry.refuse("key", "one of key and sha256 is needed")
    if sha256 is not None:
        if not isinstance(sha256, str) or not HASH.fullmatch(sha256.lower()):
            entry.refuse("sha256", "is not 64 hexadecimal digits")
        return bytes.fromhex(sha256)
    if not isinstance(key, str) or not KEY.fullmatch(key):
        entry.refuse("key", "is not 1 to 1024 visible ASCII characters")
    return digest_of(key.encode())


def _refuse_unknown(path: Path, values: Mapping[str, object], known: tuple[str, ...], within: str) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:  # not by its name, which may be a key in the wrong place
        raise ConfigError(f"{path}: {within or 'the file'}: has a field other than {', '.join(known)}")


def _salted(principal: Principal, digest: bytes) -> Principal:
    """With a salt that neither tells the key's hash nor changes with the key's name."""
    salt = hashlib.sha256(b"roofline prefix cache\0" + digest).hexdigest()[:32]
    return replace(principal, salt=salt)
