"""What a supervisor hands to a server, and what it is told, as systemd has it: a socket that is bound already
(sd_listen_fds(3)) and the word that the server is ready (sd_notify(3))."""

import os
import socket

from roofline.common import env
from roofline.common.errors import ConfigError

FIRST_DESCRIPTOR = 3  # of the sockets that are handed over
SOCKET_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited_socket() -> socket.socket | None:
    """Return the socket that this process was started with, None where it was started with none.

    The variables that tell of it leave the environment, so that no child takes the socket for its own. Raises
    ConfigError for several sockets, or a descriptor that is no TCP socket.
    """
    process, count = env.foreign("LISTEN_PID"), env.foreign("LISTEN_FDS")
    if process != str(os.getpid()) or count is None:
        return None
    for variable in SOCKET_VARIABLES:
        env.forget(variable)
    if count != "1":
        raise ConfigError(f"LISTEN_FDS={count}: a server listens on one socket; name one in the socket unit")
    try:
        listening = socket.socket(fileno=FIRST_DESCRIPTOR)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS=1, but descriptor {FIRST_DESCRIPTOR} is no socket: {error.strerror}") from error
    if listening.type != socket.SOCK_STREAM or listening.family not in (socket.AF_INET, socket.AF_INET6):
        listening.detach()
        raise ConfigError("the socket that was handed over is not one of TCP: use ListenStream=HOST:PORT")
    listening.set_inheritable(False)
    return listening


def tell_supervisor(words: str) -> None:
    """Send a line such as READY=1 to whoever asked for it by NOTIFY_SOCKET. Nobody may listen any more: no error."""
    address = env.foreign("NOTIFY_SOCKET")
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(words.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError:
        return
