"""Where a server listens: an address and port, or a unix socket, bound before anything is loaded.

An address that is taken should cost nothing, and a socket of a server that runs is never taken from it: whether
somebody listens is asked, and answered by binding, while the socket's folder is locked.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.server.options import ServeOptions, is_loopback

LOG = log.get("server")
MOST_PATH_BYTES = 107  # of a unix socket's address in Linux, less the zero at its end
BACKLOG = 2048  # of a unix socket until uvicorn sets it: connections that wait while the server starts
ASK_SECONDS = 1.0  # for a socket that is there to take a connection


@contextlib.contextmanager
def listening_on(options: ServeOptions, inherited: socket.socket | None = None) -> Iterator[socket.socket]:
    """The bound socket, and at the end no file of a unix one. Warns of an address that others reach without a key.

    inherited: a socket that this process was started with, which is taken in place of one that the options name.
    Raises ConfigError for what cannot be listened on."""
    if inherited is not None:
        _warn_if_open(options)
        with inherited:
            yield inherited
        return
    if options.uds is None:
        with contextlib.closing(_bound(options)) as listening:
            yield listening
        return
    listening, place = _bound_unix(options.uds, int(options.uds_mode, 8))
    try:
        yield listening
    finally:
        listening.close()
        with contextlib.suppress(OSError):  # gone, or another server's by now
            if _identity(options.uds) == place:
                options.uds.unlink()


def address_of(options: ServeOptions, listening: socket.socket) -> str:
    """Where clients reach the server, as they would write it."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{options.uds}"
    scheme = "http" if options.tls_certificate is None else "https"
    host = f"[{options.host}]" if listening.family == socket.AF_INET6 else options.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def widest_host(host: str, address: str) -> str:
    """Return the address by which a server with an inherited socket is reached: the socket's own, unless that is one
    of this machine alone and `host` is not, as behind a proxy that other machines reach. Without a key, whoever comes
    by an address of this machine alone is taken for its user."""
    return host if is_loopback(address) else address


def _warn_if_open(options: ServeOptions) -> None:
    if not options.local and options.api_key is None and options.api_keys is None:
        LOG.warning("%s can be reached from other machines and there is no --api-key", options.host)


def _bound(options: ServeOptions) -> socket.socket:
    _warn_if_open(options)
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
    except OSError as error:
        other = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}. Choose another {other}."
        ) from error
    return listening


def _bound_unix(path: Path, mode: int) -> tuple[socket.socket, tuple[int, int]]:
    """A unix socket that listens, and the identity of its file."""
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ConfigError(f"cannot listen on {path}: a unix socket's path has at most {MOST_PATH_BYTES} bytes")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_stale(path)
            listening.bind(os.fspath(path))
            path.chmod(mode)  # before it listens, so nobody connects by the mode that it was made with
            listening.listen(BACKLOG)
            return listening, _identity(path)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}. Choose another --uds.") from error
    except ConfigError:
        listening.close()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Around a look at a folder's sockets and the making of one. The kernel unlocks it when the descriptor closes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone. Raises ConfigError for one that somebody listens on, and for what is
    no socket."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ConfigError(f"cannot listen on {path}: it is there and is no socket. Choose another --uds.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ASK_SECONDS)
        try:
            asking.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except (BlockingIOError, TimeoutError):  # somebody listens, and does not come round to it
            pass
    raise ConfigError(f"cannot listen on {path}: another process listens there. Choose another --uds, or end it.")


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
