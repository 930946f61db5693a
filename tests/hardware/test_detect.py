"""Detection on made-up machines, and on this one."""

from pathlib import Path

import pytest

from roofline.hardware import detect

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC Test
flags\t\t: fpu sse2 avx2 fma f16c {more}

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
AVX512 = "avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16"


@pytest.fixture
def tree(tmp_path):
    """write(path, text) into a made-up root."""

    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for read_once in (detect._cpuinfo, detect._caches):
            read_once.cache_clear()
        return tmp_path

    write("proc/cpuinfo", CPUINFO.format(more=""))
    write("proc/meminfo", "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:   7\n")
    write("proc/self/cgroup", "0::/user.slice/job\n")
    return write


def test_chip_and_instruction_sets(tree):
    machine = detect.detect(tree("x", ""))
    assert (machine.chip, machine.vendor) == ("AMD EPYC Test", "AuthenticAMD")
    assert machine.isas == ("avx2", "portable")
    machine = detect.detect(tree("proc/cpuinfo", CPUINFO.format(more=AVX512)))
    assert machine.isas == ("avx512", "avx2", "portable")
    machine = detect.detect(tree("proc/cpuinfo", "processor: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd40\n"))
    assert machine.isas == ("neon", "portable")
    assert machine.chip == "0xd40"
    machine = detect.detect(tree("proc/cpuinfo", "processor: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd08\n"))
    assert machine.isas == ("portable",)  # no dot products of bytes


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("50000 100000", 0.5)])
def test_quota_v2(tree, text, cores):
    root = tree("sys/fs/cgroup/user.slice/job/cpu.max", text)
    assert detect.cpu_quota(root) == cores
    if cores is not None:
        machine = detect.detect(root)
        assert machine.usable_cores == max(1, int(cores))
        assert any("quota" in w or "grants" in w for w in machine.warnings) == (cores < 1)


def test_the_tightest_parent_binds(tree):
    tree("sys/fs/cgroup/user.slice/job/cpu.max", "400000 100000")
    tree("sys/fs/cgroup/user.slice/cpu.max", "200000 100000")
    tree("sys/fs/cgroup/user.slice/job/memory.max", "max")
    root = tree("sys/fs/cgroup/user.slice/memory.max", str(1 << 30))
    assert detect.cpu_quota(root) == 2.0
    assert detect.memory_limit(root) == 1 << 30


def test_quota_and_memory_v1(tree):
    tree("proc/self/cgroup", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/\n")
    tree("sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us", "300000")
    tree("sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us", "100000")
    tree("sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes", str(2 << 30))
    root = tree("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert detect.cpu_quota(root) == 3.0
    assert detect.memory_limit(root) == 2 << 30


def test_no_limit_is_none(tree):
    tree("sys/fs/cgroup/memory.limit_in_bytes", "9223372036854771712")
    root = tree("sys/fs/cgroup/cpu.cfs_quota_us", "-1")
    assert detect.cpu_quota(root) is None
    assert detect.memory_limit(root) is None


def test_memory_available_within_the_limit(tree):
    tree("sys/fs/cgroup/user.slice/job/memory.max", str(1000 << 20))
    root = tree("sys/fs/cgroup/user.slice/job/memory.current", str(400 << 20))
    machine = detect.detect(root)
    assert machine.memory_total == 16000000 * 1024
    assert machine.memory_limit == 1000 << 20
    assert machine.memory_available == 600 << 20


def test_a_limit_above_the_memory_is_none(tree):
    machine = detect.detect(tree("sys/fs/cgroup/user.slice/job/memory.max", str(1 << 50)))
    assert machine.memory_limit is None
    assert machine.memory_available == 8000000 * 1024


def test_warnings_come_with_the_command_that_mends(tree):
    for node in (0, 1):
        tree(f"sys/devices/system/node/node{node}/cpulist", "0")
    tree("proc/sys/kernel/numa_balancing", "1\n")
    machine = detect.detect(tree("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"))
    assert machine.numa_nodes == 2
    assert machine.huge_pages == "never"
    assert any("sysctl kernel.numa_balancing=0" in warning for warning in machine.warnings)
    assert any("transparent_hugepage/enabled" in warning for warning in machine.warnings)
    quiet = detect.detect(tree("proc/sys/kernel/numa_balancing", "0\n"))
    assert not any("numa_balancing" in warning for warning in quiet.warnings)


def test_caches(tree):
    for index, (level, kind, size, shared) in enumerate(
        [("1", "Data", "48K", "0"), ("1", "Instruction", "32K", "0"), ("3", "Unified", "32M", "0-3,8")]
    ):
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            root = tree(f"sys/devices/system/cpu/cpu0/cache/index{index}/{name}", text + "\n")
    assert detect.detect(root).caches == (detect.CpuCache(1, 48 << 10, 1), detect.CpuCache(3, 32 << 20, 5))


def test_an_empty_system_gives_none_not_guesses(tmp_path):
    machine = detect.detect(tmp_path)
    assert machine.isas == ("portable",)
    assert machine.memory_total is machine.cpu_quota is machine.huge_pages is machine.numa_balancing is None
    assert machine.usable_cores >= 1


def test_fingerprint_is_of_the_kind_of_machine(tree):
    root = tree("x", "")
    first = detect.detect(root).fingerprint
    tree("proc/meminfo", "MemTotal:       16000100 kB\nMemAvailable:    1000 kB\n")
    assert detect.detect(root).fingerprint == first
    tree("proc/cpuinfo", CPUINFO.format(more=AVX512))
    assert detect.detect(root).fingerprint != first


def test_this_machine():
    machine = detect.detect()
    assert machine.usable_cores >= 1
    assert "portable" in machine.isas
    assert machine.memory_total is None or machine.memory_total > 1 << 28
