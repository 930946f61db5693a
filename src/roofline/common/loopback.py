"""Sockets of processes of one machine, which no other machine can reach.

Gloo listens on the address of the host's name otherwise, and NCCL on that of a network card; neither asks who connects.
"""

import socket
from contextlib import AbstractContextManager, nullcontext

from roofline.common import env

INTERFACE = "lo"  # of Linux
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # its names


def gloo_on_loopback() -> AbstractContextManager[None]:
    """Inside the block groups of torch.distributed that are made over gloo listen on the loopback interface alone."""
    if INTERFACE not in (name for _, name in socket.if_nameindex()):
        return nullcontext()
    return env.foreign_set("GLOO_SOCKET_IFNAME", INTERFACE)


def suggest_nccl_loopback() -> None:
    """Have NCCL, or RCCL, listen on the loopback interface in this process, unless the user has named another one.

    It stays so: NCCL reads it when the first exchange is made. Devices of one machine exchange tensors without sockets.
    """
    env.suggest("NCCL_SOCKET_IFNAME", f"={INTERFACE}")
