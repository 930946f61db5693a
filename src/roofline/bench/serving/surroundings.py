"""What a point says of the machine: the host, and what else runs on it."""

import platform
import time
from pathlib import Path

from roofline.bench.results.point import Host
from roofline.common.files import text_of
from roofline.hardware.detect import detect
from roofline.hardware.host_settings import host_settings

LOAD_SECONDS = 0.3  # over which the load of other programs is measured


def this_host() -> Host:
    """This machine, with the load of other programs over a moment in which this one sleeps."""
    machine, before = detect(), _busy_seconds()
    begin = time.monotonic()
    time.sleep(LOAD_SECONDS)
    load = max(0.0, _busy_seconds() - before) / (time.monotonic() - begin)
    return Host(
        chip=machine.chip,
        cores=machine.usable_cores,
        memory_bytes=machine.memory_total or 0,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load=round(load, 2),
        settings=host_settings(),
    )


def _busy_seconds() -> float:
    """Of all cores together, since the machine started; 0 where the system does not say."""
    line = (text_of(Path("/proc/stat")) or "").partition("\n")[0].split()
    if len(line) < 8:
        return 0.0
    user, nice, system, _, _, irq, softirq = (int(field) for field in line[1:8])
    return (user + nice + system + irq + softirq) / 100
