"""Becomes a child of the supervisor: it dies with it, keeps to its cores, and finds its sockets from descriptor 3 on.

launcher.py PARENT CORES DESCRIPTORS PROGRAM [ARGUMENTS]: cores and descriptors with commas between them, or empty. It
is run by its path and without the package, whose import would be a tenth of a second more of each start.
"""

import ctypes
import fcntl
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
FIRST = 3  # descriptor, as systemd has it
SPARE = 100  # from here on descriptors are in nobody's way while they change places


def main(words: list[str]) -> None:
    """Prepare this process and become the program."""
    parent, cores, descriptors, program, *arguments = words
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it died before that
        sys.exit(1)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    numbers = [int(number) for number in descriptors.split(",") if number]
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, SPARE) for number in numbers]
    for number in numbers:
        os.close(number)
    for place, number in enumerate(moved, FIRST):
        os.dup2(number, place)  # inheritable
        os.close(number)
    variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(moved))}
    os.execve(program, [program, *arguments], {**os.environ, **variables})


if __name__ == "__main__":
    main(sys.argv[1:])
