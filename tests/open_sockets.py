"""Which addresses the processes of a command listen on, as the kernel lists them (Linux)."""

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

LISTENS = "0A"  # TCP_LISTEN of the kernel's list
CONNECTED = "01"
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class OpenSocket:
    """protocol: "tcp", "tcp6", "udp" or "udp6"; command: the beginning of its process's command line."""

    protocol: str
    address: str
    port: int
    command: str

    @property
    def local(self) -> bool:
        """Whether programs of this machine alone reach it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def family_of(pid: int) -> list[int]:
    """A process, and those that it and its children have started."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            pids += family_of(int(child))
    return pids


def open_sockets(pid: int) -> list[OpenSocket]:
    """The sockets on which a process and those below it take connections, or datagrams of whoever sends some."""
    family = family_of(pid)
    names = {each: _inodes(each) for each in family}
    waiting = _waiting(pid)  # of all processes: those of a command share the network of its first
    sockets = []
    for each, inodes in names.items():
        command = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
        for inode in inodes & waiting.keys():
            protocol, address, port = waiting[inode]
            sockets.append(OpenSocket(protocol, _address(address), int(port, 16), command))
    return sockets


def outward_interface() -> str:
    """The name of an interface whose address other machines may reach, "lo" where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:  # ifreq of netdevice(7)
                fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if name != "lo":
                return name
    return "lo"


def _waiting(pid: int) -> dict[str, tuple[str, str, str]]:
    """The protocol, address and port of each socket of a process's network that waits for others, by its inode."""
    found = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        waits = LISTENS if protocol.startswith("tcp") else ""
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            words = line.split(maxsplit=10)
            if words[3] == waits or (not waits and words[3] != CONNECTED):
                address, port = words[1].split(":")
                found[f"socket:[{words[9]}]"] = (protocol, address, port)
    return found


def _inodes(pid: int) -> set[str]:
    names = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.add(os.readlink(file))
        except OSError:  # closed meanwhile
            continue
    return names


def _address(text: str) -> str:
    """The address of a kernel's list, whose words of four bytes are in the byte order of this machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
