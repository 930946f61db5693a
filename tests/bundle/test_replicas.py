"""What each of several copies of a model takes of the machine."""

import os

import pytest

from roofline.backends.capacity import host_capacity
from roofline.backends.cpu.select import check_threads_of_ranks, threads_of_rank
from roofline.backends.gpu import devices
from roofline.backends.options import LoadOptions
from roofline.bundle import load, replicas
from roofline.common.errors import CapacityError
from roofline.hardware import cores, detect
from roofline.hardware.gpus.device import Device

SETTINGS = {"layers": 2, "kv_heads": 2, "head_dim": 32, "max_position": 4096}
EMPTY = dict.fromkeys(detect.Machine.__dataclass_fields__)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.delenv("ROOFLINE_THREADS", raising=False)
    monkeypatch.setattr(detect, "cores_allowed", lambda: 9)
    monkeypatch.setattr(detect, "cpu_quota", lambda root=None: None)
    monkeypatch.setattr(cores, "cpu_quota", lambda root: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setattr(cores, "_place", lambda root, cpu: (0, cpu))


def test_cores_and_threads_are_divided_in_equal_parts():
    places = replicas.divided(LoadOptions(), 2)
    assert [place.cores for place in places] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [place.options for place in places] == [{"replica": (i, 2), "threads": 4} for i in range(2)]


def test_asked_threads_are_those_of_all_and_ranks_share_theirs(monkeypatch):
    assert [place.options["threads"] for place in replicas.divided(LoadOptions(threads=6), 3)] == [2, 2, 2]
    ranks = replicas.divided(LoadOptions(backend="reference", tensor_parallel=2), 2)
    assert [place.options["threads"] for place in ranks] == [4, 4]
    assert [place.draft_options["threads"] for place in ranks] == [2, 2]
    assert threads_of_rank(4, 2) == 2
    monkeypatch.setenv("ROOFLINE_THREADS", "2")
    assert [place.options["threads"] for place in replicas.divided(LoadOptions(), 2)] == [1, 1]
    with pytest.raises(
        CapacityError, match=r"data_parallel=3 needs 3 threads, 2 are available. Lower it to 2, as each "
    ):
        replicas.divided(LoadOptions(), 3)
    with pytest.raises(
        CapacityError, match=r"data_parallel=2 of 2 ranks needs 4 threads, 2 are .* Lower it to 1, as each"
    ):
        replicas.divided(LoadOptions(tensor_parallel=2), 2)
    with pytest.raises(
        CapacityError, match=r"a model on 3 ranks needs 3 threads, 2 are available. Lower tensor_parallel"
    ):
        threads_of_rank(None, 3)


def test_ranks_share_a_core_with_a_warning_where_no_threads_are_asked_for(monkeypatch, caplog):
    check_threads_of_ranks(None, 9)
    assert not caplog.text
    monkeypatch.setattr(detect, "cores_allowed", lambda: 1)
    assert threads_of_rank(None, 2) == threads_of_rank(None, 4) == 1
    check_threads_of_ranks(None, 2)
    assert "2 ranks share 1 core, so each waits for the others" in caplog.text
    with pytest.raises(CapacityError, match=r"5 ranks needs 5 threads, 1 are available. Lower .* to 4 ranks in all"):
        check_threads_of_ranks(None, 5)
    with pytest.raises(CapacityError, match=r"2 ranks needs 2 threads, 1 are available. .* or raise threads"):
        check_threads_of_ranks(1, 2)


def test_devices_need_no_threads():
    places = replicas.divided(LoadOptions(backend="gpu", tensor_parallel=2), 20)
    assert places[19] == replicas.ReplicaPlace({"replica": (19, 20)}, {"replica": (38, 40)}, [])


def test_caches_share_what_the_memory_allows(monkeypatch):
    token_bytes = 2 * 2 * 2 * 32 * 2
    free = 4 * 1600 * token_bytes
    monkeypatch.setattr(detect, "detect", lambda: detect.Machine(**{**EMPTY, "memory_available": free}))

    def sizes(replicas, **options):
        capacity = host_capacity(LoadOptions(**options), SETTINGS, "bf16", replicas)
        return capacity.num_pages, capacity.max_context

    assert sizes(1) == (100, 1600)
    assert sizes(4) == (25, 400)
    assert sizes(4, cache_tokens=4096) == (256, 4096), "what is asked is of each"


def test_loading_takes_the_replica_s_group_of_devices(monkeypatch):
    """Before the model is looked for: what cannot be placed should cost nothing."""
    monkeypatch.setattr(devices, "_usable", lambda _: tuple(Device("amd", n, arch="gfx90a", torch=n) for n in range(3)))
    with pytest.raises(CapacityError, match=r"data_parallel=2 of 2 ranks needs 4 devices, 3 are available. Lower it"):
        load("no such model", backend="gpu", replica=(0, 2), tensor_parallel=2)
