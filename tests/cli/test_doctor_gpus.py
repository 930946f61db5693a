"""doctor's section on GPUs, of made-up hosts."""

import json
import re
from pathlib import Path

import pytest

from roofline.backends.cpu import roofs
from roofline.cli.measure.doctor import examine_gpus, gpu_rows
from roofline.hardware.gpus import inventory as gpus
from roofline.hardware.gpus import torch_wheel as wheel
from roofline.hardware.roofs import Roofs
from tests.command_line import call_roofline
from tests.hardware.trees import GIB, amd, chimera, nvidia, write


@pytest.fixture(autouse=True)
def _no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "import_or_none", lambda _: None)
    monkeypatch.setattr(wheel, "installed", lambda: wheel.Wheel("2.11.0+cu128", "cuda"))


def test_the_workstation_of_2023(tmp_path: Path) -> None:
    report = examine_gpus(chimera(tmp_path))
    mi100, titan = report["devices"]
    assert (mi100["id"], mi100["product"], mi100["chip"], mi100["usable"]) == ("amd:0", "MI100", "gfx908", 32 * GIB)
    assert mi100["status"] in ("compiled", "interpreted", "run")
    assert (titan["chip"], titan["status"]) == (None, "refused")
    assert "no tensor cores" in titan["reason"]
    assert any("rocm" in finding["remedy"] for finding in report["findings"])
    assert json.loads(json.dumps(report))["devices"][1]["id"] == "nvidia:0"
    rows = dict(gpu_rows(report))
    assert rows["amd:0"] == f"MI100; gfx908, kernels {mi100['status']}; 32.0 GiB"
    assert rows["nvidia:0"].startswith("NVIDIA TITAN X (Pascal); sm_61: refused, it has no tensor cores")
    assert rows["torch"] == "2.11.0+cu128 (cuda)"


def test_no_gpu_and_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "installed", lambda: None)
    report = examine_gpus(tmp_path)
    assert report == {"devices": [], "torch": None, "findings": []}
    assert gpu_rows(report) == [("GPUs", "none"), ("torch", "not installed")]


def test_shared_memory_and_relatives(tmp_path: Path) -> None:
    amd(tmp_path, 0, 0x03, 110003, 0x15BF, 12, 1 * GIB, 14 * GIB)
    nvidia(tmp_path, 0x17, "NVIDIA GeForce RTX 4070")
    rows = dict(gpu_rows(examine_gpus(tmp_path)))
    assert re.fullmatch(
        r"device 15bf; gfx1103 as gfx1100, kernels \w+; 1.0 GiB, 15.0 GiB with the host's", rows["amd:0"]
    )
    assert rows["nvidia:0"].startswith("NVIDIA GeForce RTX 4070; architecture not known: refused, torch or NVML")


def test_findings_are_shown_with_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(chimera(tmp_path), "sys/module/amdgpu/version", "")
    report = examine_gpus(tmp_path)
    measured = Roofs(2e12, 9e11, 5e11, ((1 << 20, 4e11),))
    monkeypatch.setattr(roofs, "ensure_roofs", lambda **_: measured)
    monkeypatch.setattr("roofline.cli.measure.doctor.examine_gpus", lambda: report)
    shown = call_roofline(["doctor"], env={"COLUMNS": "400"}).output
    for part in ("amd:0", "MI100; gfx908", "Mend: start the container with --device=/dev/kfd", "$TORCH_INDEX/rocm7.1"):
        assert part in shown
    listed = json.loads(call_roofline(["doctor", "--json"]).output)
    assert listed["gpus"]["devices"][0]["product"] == "MI100"


def test_torch_is_not_imported(run_python) -> None:  # type: ignore[no-untyped-def]
    """And it is quick: of a second's order without torch's import, which takes two."""
    out = run_python(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from roofline.cli.measure.doctor import examine_gpus\n"
        "report = examine_gpus()\n"
        "print(report['torch'] is not None)\n"
    )
    assert out.strip() in ("True", "False")
