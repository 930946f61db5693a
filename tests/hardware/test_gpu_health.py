"""What doctor finds wrong with GPUs: wheels for another vendor, closed device nodes, drivers that are not there."""

import os
from pathlib import Path

import pytest

from roofline.hardware.gpus import health as gpu_health
from roofline.hardware.gpus import inventory as gpus
from roofline.hardware.gpus import torch_wheel as wheel
from roofline.hardware.gpus.health import HealthFinding
from roofline.hardware.gpus.torch_wheel import Wheel
from tests.hardware.trees import GIB, amd, card, chimera, nvidia, write

ROCM, CUDA, CPU = Wheel("2.11.0+rocm7.1", "rocm"), Wheel("2.11.0+cu128", "cuda"), Wheel("2.11.0+cpu", "cpu")


def nodes(root: Path, group: str = "render:x:{}:someone") -> Path:
    """The nodes of an AMD host with its driver; the group's entry names this process's group."""
    for path in ("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129", "sys/module/amdgpu/version"):
        write(root, path, "")
    write(root, "etc/group", f"broken\n{group.format(os.stat(root / 'dev/kfd').st_gid)}\n")
    return root


def found(root: Path, torch: Wheel | None, opened: bool = True) -> list[HealthFinding]:
    return gpu_health.findings(gpus.detect(root), torch, root, lambda _: opened)


def test_nothing_to_mend(tmp_path: Path) -> None:
    assert found(tmp_path, CPU) == []
    assert found(nodes(chimera(tmp_path)), ROCM) == []  # the TITAN X is for the screen: no kernel is compiled for it


@pytest.mark.parametrize("torch", [CUDA, CPU, None, Wheel("2.9.0", "")])
def test_a_wheel_that_is_not_for_amd(tmp_path: Path, torch: Wheel | None) -> None:
    (finding,) = found(nodes(chimera(tmp_path)), torch)
    assert "amd:0 MI100, which needs a wheel for ROCm" in finding.cause
    assert "TITAN" not in finding.cause
    assert finding.remedy.endswith('torch --index-url "$TORCH_INDEX/rocm7.1"')
    if torch is None:
        assert "not installed" in finding.cause
        assert "--force-reinstall" not in finding.remedy
    else:
        spoken = {"cuda": "for CUDA", "cpu": "for CPUs only", "": "of unknown make"}[torch.platform]
        assert f"torch {torch.version} is a wheel {spoken}" in finding.cause
        assert "--force-reinstall" in finding.remedy


@pytest.mark.parametrize("torch", [ROCM, CPU])
def test_a_wheel_that_is_not_for_nvidia(tmp_path: Path, torch: Wheel) -> None:
    nvidia(tmp_path, 0x17, "NVIDIA H200")
    nvidia(tmp_path, 0x18, "NVIDIA GeForce RTX 4070")
    for path in ("proc/driver/nvidia/version", "dev/nvidiactl"):
        write(tmp_path, path, "")
    (finding,) = found(tmp_path, torch)
    assert "nvidia:0 NVIDIA H200, nvidia:1 NVIDIA GeForce RTX 4070, which needs a wheel for CUDA" in finding.cause
    assert finding.remedy == 'pip install --force-reinstall torch --index-url "$TORCH_INDEX/cu128"'


def test_one_environment_serves_one_vendor(tmp_path: Path) -> None:
    nodes(tmp_path)
    amd(tmp_path, 1, 0x65, 90402, 0x74A1, 304, 192 * GIB)
    nvidia(tmp_path, 0x17, "NVIDIA L40S")
    for path in ("proc/driver/nvidia/version", "dev/nvidiactl"):
        write(tmp_path, path, "")
    (finding,) = found(tmp_path, CUDA)
    assert "amd:0 MI300X" in finding.cause
    assert "use another for these devices" in finding.cause
    assert len(found(tmp_path, CPU)) == 2


def test_a_missing_group(tmp_path: Path) -> None:
    nodes(chimera(tmp_path))
    (finding,) = found(tmp_path, ROCM, opened=False)
    assert "/dev/kfd, /dev/dri/renderD128, /dev/dri/renderD129 cannot be opened" in finding.cause
    assert "not in the group render" in finding.cause
    assert finding.remedy == "sudo usermod -aG render $USER, then log in again"


def test_two_groups_are_two_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(chimera(tmp_path))
    monkeypatch.setattr(gpu_health, "_group", lambda _, node: "render" if "dri" in str(node) else "video")
    remedies = [finding.remedy for finding in found(tmp_path, ROCM, opened=False)]
    assert remedies == [f"sudo usermod -aG {group} $USER, then log in again" for group in ("video", "render")]


def test_a_group_without_a_name_is_a_containers(tmp_path: Path) -> None:
    nodes(chimera(tmp_path), group="other:x:{}9:")
    (finding,) = found(tmp_path, ROCM, opened=False)
    assert finding.remedy == f"start the container with --group-add {os.stat(tmp_path / 'dev/kfd').st_gid}"


def test_nodes_that_only_root_may_open(tmp_path: Path) -> None:
    nodes(chimera(tmp_path), group="root:x:{}:")
    (finding,) = found(tmp_path, ROCM, opened=False)
    assert "only root" in finding.cause
    assert finding.remedy.startswith("sudo chgrp render /dev/kfd /dev/dri/renderD128")


def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    chimera(tmp_path)
    assert [finding.remedy for finding in found(tmp_path, ROCM)] == ["sudo modprobe amdgpu"] * 2
    write(tmp_path, "sys/module/amdgpu/version", "")
    findings = found(tmp_path, ROCM)
    assert [finding.cause.split()[0] for finding in findings] == ["/dev/kfd", "/dev/dri/renderD128"]
    assert all("--device=/dev/kfd --device=/dev/dri" in finding.remedy for finding in findings)


def test_nvidias_driver(tmp_path: Path) -> None:
    card(tmp_path, 0, 0x10DE, 0x17, 0x2684)
    assert found(tmp_path, CUDA)[0].remedy == "sudo modprobe nvidia, or install the driver"
    write(tmp_path, "proc/driver/nvidia/version", "")
    (finding,) = found(tmp_path, CUDA)
    assert finding.remedy == "start the container with --gpus all"
    write(tmp_path, "dev/nvidiactl", "")
    assert found(tmp_path, CUDA) == []


def test_opening_is_tried(tmp_path: Path) -> None:
    """By the real test of access, which a superuser passes."""
    nodes(chimera(tmp_path))
    assert gpu_health.findings(gpus.detect(tmp_path), ROCM, tmp_path) == []


VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.9.0'
debug = False
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("version", "text", "platform"),
    [
        ("2.9.0+rocm6.4", None, "rocm"),
        ("2.9.0+cu128", None, "cuda"),
        ("2.9.0+cpu", None, "cpu"),
        ("2.9.0+cpu.cxx11.abi", None, "cpu"),
        ("2.9.0+xpu", None, "xpu"),
        ("2.9.0", VERSION.format(cuda="'12.8'", hip="None"), "cuda"),
        ("2.9.0", VERSION.format(cuda="None", hip="'7.1.52802'"), "rocm"),
        ("2.9.0+gitabc", VERSION.format(cuda="None", hip="None"), "cpu"),
        ("2.9.0+custom", "cuda = '13.0'\nhip = None\n", "cuda"),
        ("2.9.0", None, ""),
        ("2.9.0", "this is no python", ""),
        ("2.9.0", "import os\nx = y = os.name\n", ""),
    ],
)
def test_the_platform_of_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, text: str | None, platform: str
) -> None:
    write(tmp_path, "torchlike-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torchlike\nVersion: {version}\n")
    if text is not None:
        write(tmp_path, "torchlike/version.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    assert wheel.installed("torchlike") == Wheel(version, platform)


def test_no_torch() -> None:
    assert wheel.installed("no-such-package-as-this") is None
