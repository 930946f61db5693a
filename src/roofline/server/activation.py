"""The socket, bound already, that a server may be started with, as systemd hands it over (sd_listen_fds(3))."""

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
