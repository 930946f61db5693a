"""roofline bench links: the host of four MI250 by the model, CPU processes measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from roofline.bench.links import bench_links
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.hardware.gpus.device import Device
from roofline.hardware.links import topology
from tests.command_line import call_roofline

TABLE = Path(__file__).parents[1] / "hardware" / "mi250_host.txt"


def run(*words: str) -> Any:
    return call_roofline(["bench", "links", *words], env={"COLUMNS": "160"})


def test_the_host_of_four_mi250() -> None:
    shown = run("--topology", str(TABLE), "--dies", "2", "-n", "4", "--candidates", "2")
    assert shown.exit_code == 0
    for part in ("GPU0+GPU1 GPU4 GPU6", "GPU0-GPU1 GPU0-GPU4 GPU0-GPU6", "200", "xgmi"):
        assert part in shown.output
    assert "best by the model alone: GPU0, GPU1, GPU4, GPU6" in shown.output
    record = json.loads(run("--topology", str(TABLE), "--dies", "2", "-n", "4", "--sizes", "16KiB", "--json").output)
    assert record["best"] == {"16384": ["GPU0", "GPU1", "GPU4", "GPU6"]}
    assert record["sets"][0]["packages"] == [["GPU0", "GPU1"], ["GPU4"], ["GPU6"]]
    assert len(record["sets"]) == 8
    assert (record["measured"], record["library"]) == (None, None)
    assert not any("measured_s" in size for row in record["sets"] for size in row["sizes"])


def test_a_record_is_a_topology_for_later(tmp_path: Path) -> None:
    record = json.loads(run("--topology", str(TABLE), "--dies", "2", "-n", "2", "--json").output)
    file = tmp_path / "links.json"
    file.write_text(json.dumps(record["topology"]))
    again = json.loads(run("--topology", str(file), "-n", "2", "--json").output)
    assert again["sets"] == record["sets"]


@pytest.mark.slow
@pytest.mark.e2e
def test_cpu_processes_are_measured_without_a_model() -> None:
    """Three processes, every pair of them, through gloo: sums are checked on the way."""
    done = run("--cpu-processes", "3", "-n", "2", "--sizes", "4KiB,64KiB", "--repeats", "2", "--json")
    record = json.loads(done.output)
    assert record["library"] == "gloo"
    pairs = [["cpu:0", "cpu:1"], ["cpu:0", "cpu:2"], ["cpu:1", "cpu:2"]]
    assert [row["members"] for row in record["sets"]] == pairs
    for row in record["sets"]:
        assert [size["bytes"] for size in row["sizes"]] == [4096, 65536]
        for size in row["sizes"]:
            assert "modelled_s" not in size
            assert len(size["repeats_s"]) == 2
            assert 0 < min(size["repeats_s"]) <= size["measured_s"] <= max(size["repeats_s"]) < 10
    for at, (size, members) in enumerate(record["best"].items()):
        times = {tuple(row["members"]): row["sizes"][at]["measured_s"] for row in record["sets"]}
        assert int(size) in (4096, 65536)
        assert times[tuple(members)] == min(times.values())


def test_the_measured_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs what is measured decides, and each set is measured at each size on the devices' own numbers."""
    from roofline.backends.gpu.measure import collectives as collectives_bench

    asked: dict[str, Any] = {}

    def measure(sets: Any, sizes: Any, processes: int, devices: Any, repeats: int) -> Any:
        asked.update(sets=sets, sizes=sizes, processes=processes, devices=devices, repeats=repeats)
        slow = {members: float(len(sets) - at) for at, members in enumerate(sets)}
        return [
            collectives_bench.AllReduceTiming(members, size, (slow[members],)) for members in sets for size in sizes
        ]

    monkeypatch.setattr(collectives_bench, "measure", measure)
    links = topology.parse(TABLE.read_text(), dies=2)
    record = bench_links(links, 4, candidates=3, devices=[3, 1, 0, 2, 4, 5, 6, 7], repeats=2)
    assert record["library"] == "nccl"
    assert asked["sets"][0] == (0, 1, 4, 6)
    assert (asked["processes"], asked["devices"][0], asked["repeats"]) == (8, 3, 2)
    last = [links.names[member] for member in asked["sets"][-1]]
    assert record["best"] == {"16384": last, str(32 << 20): last}


@pytest.mark.parametrize(
    "words",
    [
        ("--topology", "no-such-file"),
        ("--topology", str(Path(__file__))),
        ("--topology", str(TABLE), "-n", "9"),
        ("--topology", str(TABLE), "--sizes", "2"),
        ("--topology", str(TABLE), "--sizes", "16KiB,16KiB"),
        ("--topology", str(TABLE), "--sizes", "much"),
        ("--cpu-processes", "2", "-n", "3"),
    ],
)
def test_what_makes_no_sense(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.exit_code == 1
    assert "roofline: " in done.output


def test_sets_need_two_devices_of_one_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.backends.gpu import devices
    from roofline.cli.measure.bench_links import _here

    amd, nvidia = Device("amd", torch=0, arch="gfx908"), Device("nvidia", torch=0, arch="sm_90")
    monkeypatch.setattr(devices, "choose", lambda _: (amd, nvidia))
    with pytest.raises(UnsupportedError, match="several vendors"):
        _here(None)
    monkeypatch.setattr(devices, "choose", lambda _: (amd,))
    with pytest.raises(UnsupportedError, match="torch can use 1 of these"):
        _here(None)
    monkeypatch.setattr(devices, "choose", lambda _: (amd, Device("amd", 1, torch=3, arch="gfx908")))
    links, numbers = _here("amd")
    assert (links.names, numbers) == (("amd:0", "amd:1"), [0, 3])


def test_no_candidates_are_no_measurement() -> None:
    with pytest.raises(ConfigError):
        bench_links(topology.parse(TABLE.read_text()), 1)
