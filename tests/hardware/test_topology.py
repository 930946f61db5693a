"""Links of made-up hosts, and the host of four MI250 that the blog post on inference with AMD's GPUs shows."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.hardware.gpus import inventory as gpus
from roofline.hardware.gpus.device import Device
from roofline.hardware.links import allreduce, topology
from roofline.hardware.links import detect as links_detect
from tests.hardware.trees import GIB, KFD, amd, cpu_node, lines, nvidia, write

TABLE = Path(__file__).with_name("mi250_host.txt").read_text()
DECODE, PREFILL = 16 << 10, 32 << 20  # one row and 2048 rows of 8192 numbers of 16 bits


@pytest.fixture
def mi250() -> topology.Links:
    return topology.parse(TABLE, dies=2)


def test_the_table_of_the_blog_post(mi250: topology.Links) -> None:
    assert mi250.names == tuple(f"GPU{number}" for number in range(8))
    assert mi250.packages == (0, 0, 2, 2, 4, 4, 6, 6)
    linked = {(a, b): mi250.rates[a][b] / 1e9 for b in range(8) for a in range(b) if mi250.rates[a][b]}
    inside = {(0, 1): 200, (2, 3): 200, (4, 5): 200, (6, 7): 200}
    between = {(0, 4): 100, (2, 6): 100, (0, 6): 50, (1, 3): 50, (1, 7): 50, (2, 4): 50, (3, 5): 50, (5, 7): 50}
    assert linked == inside | between
    assert mi250.by_package((0, 1, 4, 6)) == [["GPU0", "GPU1"], ["GPU4"], ["GPU6"]]
    assert mi250.total_rate((0, 1, 4, 6)) == 350e9


def test_tensor_parallel_over_four_dies_is_best_where_the_blog_post_says(mi250: topology.Links) -> None:
    first, second, *_ = allreduce.ranked_sets(mi250, 4, DECODE)
    assert first.members == (0, 1, 4, 6)
    assert (first.way, first.used) == ("tree", ((0, 1), (0, 4), (0, 6)))  # all of them one link from die 0
    assert first.slowest == 50e9
    # The same shape around die 4: the model cannot tell them apart.
    assert (second.members, second.seconds) == ((0, 2, 4, 5), first.seconds)


def test_long_messages_want_wide_links_more_than_few_steps(mi250: topology.Links) -> None:
    first = allreduce.ranked_sets(mi250, 4, PREFILL)[0]
    assert (first.members, first.slowest) == ((0, 1, 4, 5), 100e9)
    assert allreduce.estimate(mi250, (0, 1, 4, 6), PREFILL).seconds > 1.4 * first.seconds


def test_a_pair_is_a_package(mi250: topology.Links) -> None:
    assert allreduce.ranked_sets(mi250, 2, DECODE)[0].members == (0, 1)
    assert {plan.members for plan in allreduce.ranked_sets(mi250, 2, DECODE)[:4]} == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_all_eight_go_round_a_ring_of_direct_links(mi250: topology.Links) -> None:
    (plan,) = allreduce.ranked_sets(mi250, 8, PREFILL)
    assert (plan.way, plan.slowest) == ("ring", 50e9)
    assert plan.seconds == pytest.approx(14 * (allreduce.STEP + PREFILL / 8 / 50e9))


def test_no_set_is_left_out_with_eight_devices(mi250: topology.Links) -> None:
    for count in (3, 4, 5):
        every = [allreduce.estimate(mi250, chosen, DECODE) for chosen in itertools.combinations(range(8), count)]
        found = allreduce.ranked_sets(mi250, count, DECODE)
        assert {plan.members for plan in found} == {plan.members for plan in every}
        assert found[0].seconds == min(plan.seconds for plan in every)


def naive(links: topology.Links, members: tuple[int, ...], nbytes: int) -> float:
    """The shortest ring of all orders, and the shortest flat tree, written out."""

    def rate(a: int, b: int) -> float:
        return links.rates[a][b] or allreduce.HOST

    count, times = len(members), []
    for order in itertools.permutations(members[1:]):
        ring = [*zip((members[0], *order), (*order, members[0]), strict=True)]
        hops = max(1 if links.rates[a][b] else 2 for a, b in ring)
        slowest = min(rate(a, b) for a, b in ring)
        times.append((slowest, 2 * (count - 1) * (hops * allreduce.STEP + nbytes / count / slowest)))
    widest = max(slowest for slowest, _ in times)
    ring_seconds = min(seconds for slowest, seconds in times if slowest == widest)
    flat = []
    for root in members:
        others = [member for member in members if member != root]
        hops = max(1 if links.rates[root][other] else 2 for other in others)
        through_host = [other for other in others if not links.rates[root][other]]
        narrow = [rate(root, other) for other in others if links.rates[root][other]]
        narrow += [allreduce.HOST / len(through_host)] if through_host else []
        flat.append(2 * (hops * allreduce.STEP + nbytes / min(narrow)))
    return min(ring_seconds, *flat)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_links_against_the_model_written_out(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 5))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    rates = data.draw(st.lists(st.sampled_from([0, 50e9, 100e9, 200e9]), min_size=len(pairs), max_size=len(pairs)))
    links = topology.links_from_pairs(
        "abcde"[:count], [(a, b, rate, "xgmi") for (a, b), rate in zip(pairs, rates, strict=True)]
    )
    nbytes = data.draw(st.sampled_from([0, DECODE, PREFILL]))
    plan = allreduce.estimate(links, tuple(range(count)), nbytes)
    want = naive(links, tuple(range(count)), nbytes)
    assert plan.seconds <= want * (1 + 1e-9)  # deeper trees can be shorter still
    if plan.way == "ring":
        assert plan.seconds == pytest.approx(want)
    again = topology.parse(json.dumps(links.as_dict()))
    assert again == links


def test_devices_behind_a_switch_share_their_port() -> None:
    names = [f"nvidia:{number}" for number in range(8)]
    links = topology.links_from_pairs(names, [(a, b, 450e9, "switch") for b in range(8) for a in range(b)])
    plan = allreduce.ranked_sets(links, 8, PREFILL)[0]
    assert (plan.way, plan.slowest) == ("ring", 450e9)
    assert allreduce.estimate(links, (0, 1, 2, 3), 0).way == "tree"
    assert allreduce.ranked_sets(links, 4, DECODE)[0].members == (0, 1, 2, 3)


@pytest.mark.slow
def test_sixteen_devices_are_searched_without_all_their_sets() -> None:
    pairs = [(a + 8 * host, b + 8 * host, rate * 1e9, "xgmi") for host in (0, 1) for a, b, rate in LINKS]
    links = topology.links_from_pairs([str(number) for number in range(16)], pairs, dies=[2] * 16)
    assert allreduce.ranked_sets(links, 4, DECODE)[0].members == (0, 1, 4, 6)
    assert len(allreduce.ranked_sets(links, 8, DECODE)[0].members) == 8


@pytest.mark.parametrize("count", [0, 9, -1])
def test_more_devices_than_there_are(mi250: topology.Links, count: int) -> None:
    with pytest.raises(ConfigError, match="there are 8"):
        allreduce.ranked_sets(mi250, count, DECODE)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither JSON nor the table"),
        ("GPU0 GPU1\nGPU0 N/A 1-2\n", "neither JSON nor the table"),
        ("GPU0 GPU1\nGPU0 N/A 1-2\nGPU1 1-2\n", "neither JSON nor the table"),
        ("GPU0 GPU1\nGPU0 N/A NV4\nGPU1 NV4 N/A\n", "'NV4' is no rate"),
        ("GPU0 GPU1\nGPU0 N/A 1-2\nGPU1 1-3 N/A\n", "differs by direction"),
        ("{", "JSON"),
        ("{}", "KeyError"),
        ('{"devices": ["a"], "links": [{"between": [0, 1], "gb_s": 5}]}', "no link between two of 1"),
        ('{"devices": ["a", "b"], "links": [{"between": [0, 1], "gb_s": -5}]}', "no link between"),
        ('{"devices": ["a", "b"], "links": [{"between": [0], "gb_s": 5}]}', "ValueError"),
        ('{"devices": ["a", "b"], "links": [], "packages": [0]}', "packages of 1"),
        ('{"devices": 3, "links": []}', "TypeError"),
    ],
)
def test_text_that_is_no_matrix(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        topology.parse(text)


LINKS = [(0, 1, 200), (2, 3, 200), (4, 5, 200), (6, 7, 200), (0, 4, 100), (2, 6, 100)]
LINKS += [(0, 6, 50), (1, 3, 50), (1, 7, 50), (2, 4, 50), (3, 5, 50), (5, 7, 50)]


def mi250_tree(root: Path) -> tuple[Device, ...]:
    """The same host as amdkfd shows it: KFD's node 0 is the CPU."""
    cpu_node(root)
    for number in range(8):
        amd(root, number + 1, 0x20 + number, 90010, 0x740C, 104, 64 * GIB)
        write(root, f"{KFD}/{number + 1}/io_links/0/properties", lines(type=2, node_from=number + 1, node_to=0))
    for at, (a, b, rate) in enumerate(LINKS):
        for one, other in ((a, b), (b, a)):
            facts = lines(type=11, node_from=one + 1, node_to=other + 1, min_bandwidth=50000, max_bandwidth=rate * 1000)
            write(root, f"{KFD}/{one + 1}/io_links/{at + 1}/properties", facts)
    no_link = lines(type=11, node_from=1, node_to=3, min_bandwidth=0, max_bandwidth=0)
    write(root, f"{KFD}/1/p2p_links/0/properties", no_link)
    return gpus.detect(root)


def test_links_as_the_kernel_tells_them(tmp_path: Path, mi250: topology.Links) -> None:
    devices = mi250_tree(tmp_path)
    links = links_detect.detect(devices, tmp_path)
    assert (links.rates, links.packages) == (mi250.rates, mi250.packages)
    assert links.names == tuple(f"amd:{number}" for number in range(8))
    some = links_detect.detect(gpus.select(devices, "amd:6,0,4"), tmp_path)
    assert some.names == ("amd:6", "amd:0", "amd:4")
    assert some.rates == ((0, 50e9, 0), (50e9, 0, 100e9), (0, 100e9, 0))


class Failure(Exception):
    pass


def fail(*_: Any) -> Any:
    raise Failure


def test_links_as_amdsmi_tells_them(tmp_path: Path, mi250: topology.Links) -> None:
    def bandwidth(a: int, b: int) -> dict[str, int]:
        rate = {frozenset((a, b)): rate for a, b, rate in LINKS}.get(frozenset((a, b)))
        return {"min_bandwidth": 50000, "max_bandwidth": rate * 1000} if rate else fail()

    amdsmi = SimpleNamespace(
        AmdSmiException=Failure,
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: list(range(7, -1, -1)),  # an order of its own
        amdsmi_get_gpu_device_bdf=lambda number: f"0000:{0x20 + number:02X}:00.0",
        amdsmi_get_minmax_bandwidth_between_processors=bandwidth,
    )
    devices = tuple(Device("amd", number, pci=f"0000:{0x20 + number:02x}:00.0") for number in range(8))
    links = links_detect.detect(devices, tmp_path, amdsmi=amdsmi)
    assert links.rates == mi250.rates
    assert links.packages == tuple(range(8))  # the names of the devices do not say that they are dies
    for broken in ("amdsmi_init", "amdsmi_get_processor_handles"):
        facts = {**vars(amdsmi), broken: fail}
        assert links_detect.from_amdsmi(SimpleNamespace(**facts), devices) == []


def nvml(remotes: dict[int, list[str]], speed: int = 25000, status: int = 0) -> Any:
    """NVML of devices at buses 0x10, 0x11, ...: for each the addresses at the other ends of its links, "" a switch."""

    def pci(address: str) -> Any:
        return SimpleNamespace(busId=f"0000{address}".upper().encode())

    def state(device: int, link: int) -> int:
        return 1 if link < len(remotes[device]) else fail()

    value = SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=speed))
    return SimpleNamespace(
        NVMLError=Failure,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_FEATURE_ENABLED=1,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON=90,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(remotes),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetPciInfo=lambda number: pci(f"0000:{0x10 + number:02x}:00.0"),
        nvmlDeviceGetFieldValues=lambda *_: [value],
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda device, link: 0 if remotes[device][link] else 2,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda device, link: pci(remotes[device][link]),
    )


def nvidia_host(root: Path, count: int) -> tuple[Device, ...]:
    for number in range(count):
        nvidia(root, 0x10 + number, "NVIDIA H100 80GB HBM3")
    return gpus.detect(root)


def test_nvlinks_between_pairs(tmp_path: Path) -> None:
    """Two bridged pairs, and one that is linked to something else."""
    other, here = "0000:11:00.0", "0000:10:00.0"
    module = nvml({0: [other] * 4, 1: [here] * 4, 2: [], 3: ["0000:99:00.0"]})
    links = links_detect.detect(nvidia_host(tmp_path, 4), tmp_path, pynvml=module)
    assert links.as_dict()["links"] == [{"between": [0, 1], "gb_s": 100.0, "kind": "nvlink"}]


def test_nvlinks_to_switches(tmp_path: Path) -> None:
    module = nvml({number: [""] * (18 if number else 12) for number in range(4)})
    links = links_detect.detect(nvidia_host(tmp_path, 4), tmp_path, pynvml=module)
    assert links.rates[0][1:] == (300e9, 300e9, 300e9)
    assert links.rates[1][2:] == (450e9, 450e9)
    assert links.kinds[1][2] == "switch"
    assert links.packages == (0, 1, 2, 3)


def test_nvml_that_does_not_say(tmp_path: Path) -> None:
    devices = nvidia_host(tmp_path, 2)
    for module in (nvml({0: [""], 1: [""]}, status=3), nvml({0: [], 1: []})):
        assert links_detect.from_nvml(module, devices) == []
    module = nvml({0: [""], 1: [""]})
    for broken in ("nvmlInit", "nvmlDeviceGetCount"):
        assert links_detect.from_nvml(SimpleNamespace(**{**vars(module), broken: fail}), devices) == []


def test_packages_without_links_are_neighbours() -> None:
    assert topology.package_of_each([[0] * 5] * 5, [2, 2, 1, 2, 2]) == (0, 0, 2, 3, 3)
    assert topology.package_of_each([[0] * 3] * 3, [2, 2, 2]) == (0, 0, 2)  # a die that is hidden
