"""How many cores other programs keep busy."""

import time
from pathlib import Path

from roofline.common.files import text_of


def busy_seconds() -> float:
    """Of all cores together, since the machine started; 0 where the system does not say."""
    line = (text_of(Path("/proc/stat")) or "").partition("\n")[0].split()
    if len(line) < 8:
        return 0.0
    user, nice, system, _, _, irq, softirq = (int(field) for field in line[1:8])
    return (user + nice + system + irq + softirq) / 100


class OtherLoad:
    """Cores that other programs used from its making until `cores` is called."""

    def __init__(self) -> None:
        self._busy, self._ours, self._begin = busy_seconds(), time.process_time(), time.monotonic()

    def cores(self) -> float:
        """0 where the system does not say."""
        seconds = max(time.monotonic() - self._begin, 1e-3)
        by_others = busy_seconds() - self._busy - (time.process_time() - self._ours)
        return max(0.0, by_others / seconds)


def load_of_others(seconds: float) -> float:
    """Cores that other programs use for a moment in which this one sleeps."""
    load = OtherLoad()
    time.sleep(seconds)
    return load.cores()
