"""What a point says of the machine: the host, and what else runs on it."""

import platform

from roofline.bench.results.point import Host
from roofline.hardware.busy import load_of_others
from roofline.hardware.detect import detect
from roofline.hardware.host_settings import host_settings

LOAD_SECONDS = 0.3  # over which the load of other programs is measured


def this_host() -> Host:
    """This machine, with the load of other programs over a moment in which this one sleeps."""
    machine, load = detect(), load_of_others(LOAD_SECONDS)
    return Host(
        chip=machine.chip,
        cores=machine.usable_cores,
        memory_bytes=machine.memory_total or 0,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load=round(load, 2),
        settings=host_settings(),
    )
