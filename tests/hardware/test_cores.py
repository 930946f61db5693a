"""Cores split among processes: neighbours stay together."""

import os

import pytest

from roofline.hardware import cores
from tests.hardware.trees import write


@pytest.fixture
def allow(monkeypatch):
    def allowed(numbers):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers), raising=False)

    return allowed


def host(root, nodes, threads):
    """A made-up host: cores of each node as the kernel lists them, and (package, core) of each thread."""
    for number, listed in enumerate(nodes):
        write(root, f"sys/devices/system/node/node{number}/cpulist", f"{listed}\n")
    for cpu, (package, core) in enumerate(threads):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(root, f"{folder}/physical_package_id", f"{package}\n")
        write(root, f"{folder}/core_id", f"{core}\n")


def test_threads_of_a_core_and_cores_of_a_node_stay_together(tmp_path, allow):
    # Two packages of two cores with two threads each, numbered as x86 does: first threads first.
    host(tmp_path, ["0-1,4-5", "2-3,6-7"], [(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    allow(range(8))
    assert cores.split_cores(2, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert cores.split_cores(4, tmp_path) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cores.split_cores(3, tmp_path) == [[0, 4], [1, 5], [2, 6]], "two are left over"


def test_only_allowed_cores_are_given_and_more_parts_than_cores_get_none(tmp_path, allow):
    host(tmp_path, ["0-1", "2-3"], [(0, 0), (0, 1), (1, 0), (1, 1)])
    allow([1, 2, 3])
    assert cores.split_cores(1, tmp_path) == [[1, 2, 3]]
    assert cores.split_cores(4, tmp_path) == [[], [], [], []]


def test_a_kernel_that_tells_nothing_has_cores_in_their_order(tmp_path, allow):
    allow([5, 2, 9, 7])
    assert cores.split_cores(2, tmp_path) == [[2, 5], [7, 9]]


def test_under_a_quota_no_core_is_anybodys(tmp_path, allow):
    allow(range(8))
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/cpu.max", "400000 100000\n")
    assert cores.split_cores(2, tmp_path) == [[], []]
    write(tmp_path, "sys/fs/cgroup/job/cpu.max", "800000 100000\n")
    assert cores.split_cores(2, tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_kept_to_ends_with_its_block():
    before = os.sched_getaffinity(0)
    one = sorted(before)[0]
    with cores.pinned_to([one]):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    with cores.pinned_to([]):
        assert os.sched_getaffinity(0) == before
