"""All-reduces timed on sets of CPU processes, and which devices torch can use."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from roofline.backends.gpu import devices  # noqa: E402
from roofline.backends.gpu.measure import collectives as collectives_bench  # noqa: E402
from roofline.backends.gpu.measure.collectives import AllReduceTiming, measure  # noqa: E402
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError  # noqa: E402
from roofline.hardware.gpus import inventory as gpus  # noqa: E402
from roofline.hardware.gpus import torch_wheel as wheel  # noqa: E402
from roofline.hardware.gpus.device import Device  # noqa: E402


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """python(lines): what each process runs instead; $3 is the folder, $4 the rank."""

    def replace(lines: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return replace


def test_the_slowest_member_counts(python: Callable[[str], None]) -> None:
    """Each rank tells its times of its sets: rank r took r + 1 and 5 - r seconds."""
    python("""echo '{"0.0": ['$(($4 + 1))', '$((5 - $4))'], "1.0": [7, 8]}' > $3/rank$4.json""")
    first, second = measure([(0, 2), (1, 2)], [4096], 3)
    assert (first.members, first.nbytes, first.seconds) == ((0, 2), 4096, (3, 5))
    assert (second.members, second.seconds) == ((1, 2), (7, 8))


def test_a_process_that_fails_is_told_with_its_last_words(python: Callable[[str], None]) -> None:
    python("[ $4 = 1 ] || exec sleep 60\necho one >&2\necho the last words >&2\nexit 3")
    started = time.monotonic()
    with pytest.raises(RooflineError, match="rank 1 failed: the last words"):
        measure([(0, 1)], [4096], 2)
    assert time.monotonic() - started < 30, "the other process was ended"


def test_time_runs_out(python: Callable[[str], None]) -> None:
    python("exec sleep 60")
    with pytest.raises(RooflineError, match="took longer than 1 s"):
        measure([(0, 1)], [4096], 2, timeout=1)


def test_a_wrong_sum_is_no_measurement() -> None:
    """A group of one process, whose all-reduce leaves its own number, where two were to be added."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="is wrong"):
            collectives_bench._times(None, [0, 1], 0, 64, 1, torch.device("cpu"))
        (seconds,) = collectives_bench._times(None, [0], 0, 64, 1, torch.device("cpu"))
        assert seconds > 0
    finally:
        dist.destroy_process_group()


def test_bus_rate_is_what_a_link_of_a_ring_carries() -> None:
    timing = AllReduceTiming((0, 1, 2, 3), 1000, (2.0, 1.0, 4.0))
    assert timing.median == 2.0
    assert timing.bus_rate == 750.0


MI210 = Device("amd", 0, name="AMD Instinct MI210", arch="gfx90a", torch=0)
HIDDEN = Device("amd", 1, name="AMD Instinct MI210", arch="gfx90a")
TITAN = Device("nvidia", 0, name="NVIDIA TITAN X (Pascal)", arch="sm_61", torch=1)


@pytest.fixture
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", lambda **_: (MI210, HIDDEN, TITAN))
    monkeypatch.setattr(wheel, "installed", lambda: wheel.Wheel("2.11.0+rocm7.1", "rocm"))


@pytest.mark.usefixtures("_host")
def test_devices_that_torch_sees_and_kernels_serve() -> None:
    assert devices.choose() == (MI210,)
    assert devices.choose("amd:0") == (MI210,)
    with pytest.raises(UnsupportedError, match=r"amd:1 .*HIP_VISIBLE_DEVICES"):
        devices.choose("MI210")
    with pytest.raises(UnsupportedError, match=r"TITAN X .*no tensor cores"):
        devices.choose("nvidia:0")
    with pytest.raises(ConfigError, match="no GPU of this host is 'intel'"):
        devices.choose("intel")


@pytest.mark.usefixtures("_host")
def test_a_wheel_for_others_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "installed", lambda: wheel.Wheel("2.11.0+cu128", "cuda"))
    with pytest.raises(UnsupportedError, match=r"wheel for cuda, not for rocm; `roofline doctor`"):
        devices.choose("amd:1")


def test_this_machine() -> None:
    """Whatever it has, torch numbers what is given back."""
    assert [device.torch for device in devices.choose()] == list(range(len(devices.choose())))
