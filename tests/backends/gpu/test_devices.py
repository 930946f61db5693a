"""Which device each of several ranks takes."""

import pytest

from roofline.backends.gpu import devices
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.hardware.gpus.device import Device

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """Four MI250 dies and an MI300X; the first die is not in torch."""
    found = [
        Device("amd", number, "AMD Instinct MI250", "gfx90a", memory=64 << 30, torch=number - 1 if number else None)
        for number in range(4)
    ] + [Device("amd", 4, "AMD Instinct MI300X", "gfx942", memory=192 << 30, torch=3)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (number << 30, 64 << 30))
    monkeypatch.setattr(devices.gpus, "detect", lambda **_: found)


def test_ranks_take_the_named_devices_in_order():
    assert [devices.find("amd:3,1", rank, 2).torch_name for rank in range(2)] == ["cuda:2", "cuda:0"]
    assert [devices.find("auto", rank, 3).device.id for rank in range(3)] == ["amd:1", "amd:2", "amd:3"]
    assert devices.find("gfx942").torch_name == "cuda:3"


def test_fewer_devices_than_ranks_and_mixed_chips_are_refused():
    with pytest.raises(CapacityError, match=r"8 ranks needs 8 devices, 4 are available.* to 4 in all, or name more"):
        devices.find("auto", 0, 8)
    with pytest.raises(CapacityError, match=r"2 ranks needs 2 devices, 1 are"):
        devices.find("amd:1", 1, 2)
    with pytest.raises(UnsupportedError, match=r"ranks on different chips.*amd:3 is gfx90a, amd:4 is gfx942"):
        devices.find("amd:3,4", 0, 2)
    with pytest.raises(UnsupportedError, match=r"amd:0 AMD Instinct MI250 is not supported"):
        devices.find("amd:0,1", 0, 2)
    with pytest.raises(ConfigError, match="no GPU of this host is 'nvidia:0'"):
        devices.find("nvidia:0", 0, 2)


def test_replicas_take_groups_of_the_named_devices_in_order():
    assert [devices.group("auto", number, 4) for number in range(4)] == ["amd:1", "amd:2", "amd:3", "amd:4"]
    assert [devices.group("auto", number, 2, 2) for number in range(2)] == ["amd:1,amd:2", "amd:3,amd:4"]
    assert devices.group("amd:3,1", 1, 2) == "amd:1"
    first = devices.group("auto", 0, 2, 2)
    assert [devices.find(first, rank, 2).device.id for rank in range(2)] == ["amd:1", "amd:2"]


def test_fewer_devices_than_replicas_need_are_refused():
    with pytest.raises(CapacityError, match=r"data_parallel=5 needs 5 devices, 4 are available. Lower it to 4, or"):
        devices.group("auto", 0, 5)
    with pytest.raises(CapacityError, match=r"data_parallel=2 of 3 ranks needs 6 devices, 4 are .* Lower it to 1, or"):
        devices.group("auto", 0, 2, 3)
    with pytest.raises(CapacityError, match=r"needs 10 devices, 4 are available. Name more devices"):
        devices.group("auto", 0, 2, 5)
