"""What this machine is and what of it we may use: chip, instruction sets, cores, cgroup limits, memory, huge pages.

Everything but chip and caches is read from /proc and /sys at each call; a file that is not there gives None, never a
guess.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from roofline.common.files import integer, text_of

# An ISA's variant of our kernels needs all of these flags of /proc/cpuinfo (x86 "flags", aarch64 "Features").
ISA_NEEDS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "neon": frozenset({"asimd", "asimddp"}),
    "portable": frozenset(),
}


@dataclass(frozen=True)
class CpuCache:
    """One level of data or unified cache as the first core sees it."""

    level: int
    bytes: int
    shared_by: int  # cores that share it


@dataclass(frozen=True)
class Machine:
    """A description of this machine. Memory sizes are bytes; None means the system does not say."""

    chip: str
    vendor: str
    arch: str
    isas: tuple[str, ...]  # fastest first
    cores_online: int
    cores_allowed: int  # by the affinity mask
    cpu_quota: float | None  # cores' worth of time the cgroup allows
    usable_cores: int  # min(affinity, floor(quota)), at least 1
    memory_total: int | None
    memory_limit: int | None  # the cgroup's
    memory_available: int | None  # now, within the limit
    numa_nodes: int
    numa_balancing: bool | None
    huge_pages: str | None  # always, madvise or never
    caches: tuple[CpuCache, ...]
    warnings: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hex name of this kind of machine: what measured figures may depend on."""
        memory = (self.memory_total or 0) >> 30  # whole GiB: the exact figure changes from boot to boot
        facts = (self.chip, self.vendor, self.arch, self.isas, self.usable_cores, memory, self.caches)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def detect(root: Path = Path("/")) -> Machine:
    """Describe this machine. `root` is where /proc and /sys are looked for (tests give a made-up tree)."""
    info = _cpuinfo(root)
    allowed, quota = cores_allowed(), cpu_quota(root)
    limit = memory_limit(root)
    meminfo = _meminfo(root)
    total, available = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    if limit is not None and total is not None and limit >= total:
        limit = None
    if limit is not None:
        used = _cgroup_number(root, "memory.current", "memory/memory.usage_in_bytes") or 0
        room = max(0, limit - used)
        available = room if available is None else min(available, room)
    balancing = text_of(root / "proc/sys/kernel/numa_balancing")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    machine = Machine(
        chip=info.get("model name") or info.get("CPU part") or "unknown",
        vendor=info.get("vendor_id") or info.get("CPU implementer") or "unknown",
        arch=os.uname().machine,
        isas=tuple(isa for isa, needs in ISA_NEEDS.items() if needs <= flags),
        cores_online=os.cpu_count() or 1,
        cores_allowed=allowed,
        cpu_quota=quota,
        usable_cores=usable_cores(allowed, quota),
        memory_total=total,
        memory_limit=limit,
        memory_available=available,
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        numa_balancing=None if balancing is None else balancing != "0",
        huge_pages=bracketed(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        caches=_caches(root),
    )
    return replace(machine, warnings=_warnings(machine))


def cores_allowed() -> int:
    """Cores of the affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(allowed: int, quota: float | None) -> int:
    """Threads that can run at the same time all along: a quota of 2.5 cores carries two."""
    return max(1, min(allowed, int(quota) if quota is not None else allowed))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time the cgroup grants (v2 cpu.max or v1 cfs quota), None when there is no limit."""
    smallest: float | None = None
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = None, 100_000
        words = (text_of(folder / "cpu.max") or "").split()
        if words:
            quota = None if words[0] == "max" else integer(words[0])
            period = (integer(words[1]) if len(words) > 1 else None) or period
        else:
            quota = integer(text_of(folder / "cpu.cfs_quota_us"))
            period = integer(text_of(folder / "cpu.cfs_period_us")) or period
        if quota is not None and quota > 0:
            smallest = min(smallest or float("inf"), quota / period)
    return smallest


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes the cgroup allows (v2 memory.max or v1 limit_in_bytes), None when there is no limit."""
    files = (f / name for f in _cgroup_folders(root, "memory") for name in ("memory.max", "memory.limit_in_bytes"))
    limits = (integer(text_of(file)) for file in files)
    return min((n for n in limits if n is not None and n < 1 << 60), default=None)  # v1: "no limit" is about 2^63


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Our own cgroup and every one above it (a parent's limit binds too); v2 first, then v1's controller folder."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in (text_of(root / "proc/self/cgroup") or "0::/").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers and controller not in controllers.split(","):
            continue
        mount = base if not controllers else base / controller
        inside = [part for part in path.split("/") if part and part != ".."]
        folders += [mount.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)]
    return folders


def _cgroup_number(root: Path, v2: str, v1: str) -> int | None:
    files = [*(folder / v2 for folder in _cgroup_folders(root, "memory")), root / "sys/fs/cgroup" / v1]
    return next((value for file in files if (value := integer(text_of(file))) is not None), None)


def _warnings(machine: Machine) -> tuple[str, ...]:
    """What slows this machine down, each with the command that corrects it."""
    warnings = []
    if machine.numa_balancing and machine.numa_nodes > 1:
        warnings.append(
            "NUMA balancing is on: the kernel unmaps pages to watch who uses them, which stalls compute threads and "
            "GPUs that have them mapped. Mend: sudo sysctl kernel.numa_balancing=0"
        )
    if machine.huge_pages == "never":
        warnings.append(
            "Transparent huge pages are off: weights are read through 4 KiB pages. "
            "Mend: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if machine.cpu_quota is not None and machine.cpu_quota < 1:
        warnings.append(
            f"The cgroup grants {machine.cpu_quota:.2f} of a core: every step is stopped in its middle. "
            "Mend: grant at least one whole core"
        )
    return tuple(warnings)


@cache
def _caches(root: Path) -> tuple[CpuCache, ...]:
    caches = []
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*")):
        level, kind, size = integer(text_of(folder / "level")), text_of(folder / "type"), text_of(folder / "size") or ""
        scale = {"K": 1024, "M": 1 << 20}.get(size[-1:], 1)
        number = integer(size.rstrip("KM"))
        if level is None or number is None or kind == "Instruction":
            continue
        caches.append(
            CpuCache(level, number * scale, len(list(cpu_numbers(text_of(folder / "shared_cpu_list") or "0"))))
        )
    return tuple(caches)


def cpu_numbers(text: str) -> Iterator[int]:
    """The numbers in the kernel's form of a list, "0-3,8"."""
    for match in re.finditer(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(match[1]), int(match[2] or match[1]) + 1)


@cache  # the kernel asks every core for its clock when this is read, which takes milliseconds
def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's fields."""
    fields: dict[str, str] = {}
    try:
        with (root / "proc/cpuinfo").open() as file:
            for line in file:
                name, colon, value = line.partition(":")
                if not colon and fields:
                    break
                fields.setdefault(name.strip(), value.strip())
    except (OSError, UnicodeDecodeError):
        pass
    return fields


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name."""
    sizes = {}
    for line in (text_of(root / "proc/meminfo") or "").splitlines():
        name, _, value_text = line.partition(":")
        words = value_text.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return sizes


def bracketed(text: str | None) -> str | None:
    """'always [madvise] never' -> 'madvise'."""
    return text[text.index("[") + 1 : text.index("]")] if text and "[" in text and "]" in text else None
