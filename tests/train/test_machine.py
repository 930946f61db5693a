"""What a run runs on: the products of its roof, drivers, memory as the system tells it; no figure of this machine."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common import processes  # noqa: E402
from roofline.train.memory import meter  # noqa: E402
from roofline.train.report import machine  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("per_product", "sides", "best"),
    [
        ({}, [128, 256, 512, 1024, 2048], 2048),  # each takes as long, so the largest is the fastest
        ({128: 0.0125}, [128], 128),
        ({128: 0.0124, 256: 0.02}, [128, 256], 256),
        ({1024: 0.0125}, [128, 256, 512, 1024], 512),  # a slow one is not the best
        ({2048: 1.0}, [128, 256, 512, 1024, 2048], 1024),
    ],
)
def test_products_grow_while_the_next_one_is_short(
    monkeypatch: pytest.MonkeyPatch, per_product: dict[int, float], sides: list[int], best: int
) -> None:
    """An eightfold product has to take less than a tenth of a second."""
    seen: list[int] = []

    def seconds(kind: torch.device, dtype: torch.dtype, side: int) -> float:
        seen.append(side)
        return per_product.get(side, 0.001)

    monkeypatch.setattr(machine, "_product_seconds", seconds)
    roof = machine.measured_roof.__wrapped__(CPU, torch.bfloat16)
    assert seen == sides
    assert roof == {
        "flops": 2 * best**3 / per_product.get(best, 0.001),
        "measured": f"the fastest matmul of {best}^3 in bfloat16",
    }


@pytest.mark.parametrize(
    ("each", "count", "fastest"),
    [([0.03, 0.01, 0.02], 3, 0.01), ([0.005] * 4, 4, 0.005), ([0.001] * 25, 20, 0.001), ([0.004] * 9, 5, 0.004)],
)
def test_a_product_is_repeated_three_times_and_for_a_while(
    monkeypatch: pytest.MonkeyPatch, each: list[float], count: int, fastest: float
) -> None:
    """At least three times, and until 0.02 s were spent; the fastest counts."""
    times = list(itertools.chain.from_iterable((0.0, seconds + 1e-9) for seconds in each))
    finished: list[torch.device] = []
    monkeypatch.setattr(machine.time, "perf_counter", lambda: times.pop(0))
    monkeypatch.setattr(machine, "_finish", finished.append)
    assert machine._product_seconds(CPU, torch.float32, 4) == pytest.approx(fastest, rel=1e-3)
    assert len(finished) == count + 1, "the first product is not timed"


def test_the_higher_of_two_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_product_seconds", lambda kind, dtype, side: 1.0)
    flops = 2.0 * 128**3
    assert machine.higher_roof({"flops": flops + 1}, CPU, None) == {"flops": flops + 1}
    assert machine.higher_roof({"flops": flops - 1}, CPU, None)["flops"] == flops
    machine.measured_roof.cache_clear()


@pytest.mark.parametrize(("kind", "waits"), [(CPU, False), (GPU, True)])
def test_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch, kind: torch.device, waits: bool) -> None:
    waited: list[None] = []
    monkeypatch.setattr(machine.torch.accelerator, "synchronize", lambda: waited.append(None))
    machine._finish(kind)
    assert bool(waited) == waits


def test_versions_name_the_driver_of_either_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers: dict[str, str | None] = {"nvidia": None, "amd": "6.12"}
    monkeypatch.setattr(machine, "gpu_driver", lambda vendor: drivers[vendor])
    assert machine.versions()["driver"] == "6.12"
    drivers["nvidia"] = "550"
    assert machine.versions()["driver"] == "550"


# Memory


@pytest.mark.parametrize("has_mallopt", [True, False])
def test_freed_memory_is_kept_or_given_back_by_the_c_library(
    monkeypatch: pytest.MonkeyPatch, has_mallopt: bool
) -> None:
    calls: list[tuple[int, ...]] = []
    library: Any = SimpleNamespace()
    if has_mallopt:
        library.mallopt = lambda *words: calls.append(words)
        library.malloc_trim = lambda pad: calls.append((pad,))
    monkeypatch.setattr(meter.ctypes, "CDLL", lambda name: library)
    meter.keep_freed_memory()
    processes.return_freed_memory()
    assert calls == ([(-4, 0), (-1, (1 << 31) - 1), (0,)] if has_mallopt else [])
    calls.clear()
    meter.give_back_freed_memory()
    assert calls == ([(-4, 65536), (-3, 65536), (-1, 131072)] if has_mallopt else [])


@pytest.mark.parametrize(("kind", "settings"), [(CPU, []), (GPU, ["expandable_segments:True"])])
def test_segments_grow_on_gpus(monkeypatch: pytest.MonkeyPatch, kind: torch.device, settings: list[str]) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", seen.append)
    meter.grow_segments(kind)
    assert seen == settings


KB = 1024


def status(**sizes: int) -> str:
    return "Name:\tpython\n" + "".join(f"{name}:\t{size} kB\n" for name, size in sizes.items())


@pytest.mark.parametrize(
    ("begun", "now", "peak"),
    [
        ({"VmHWM": 900, "VmRSS": 900, "RssAnon": 500}, {"VmHWM": 2000, "RssFile": 300}, (2000 - 300 - 500) * KB),
        ({}, {"VmHWM": 2000, "RssFile": 300}, 1700 * KB),
        ({"VmHWM": 900, "VmRSS": 900}, {"RssFile": 300}, None),
        ({"VmHWM": 900, "VmRSS": 900}, {"VmHWM": 2000}, None),
        # The kernel did not forget the peak: 4 MiB above what there is now.
        ({"VmHWM": 9000, "VmRSS": 4903}, {"VmHWM": 9000, "RssFile": 300}, None),
        ({"VmHWM": 9000, "VmRSS": 4903}, {"VmHWM": 9001, "RssFile": 300}, 8701 * KB),
        ({"VmHWM": 9000, "VmRSS": 4904}, {"VmHWM": 9000, "RssFile": 300}, 8700 * KB),
    ],
)
def test_a_peak_on_a_cpu_is_that_of_its_own_pages(
    monkeypatch: pytest.MonkeyPatch, begun: dict[str, int], now: dict[str, int], peak: int | None
) -> None:
    told = [status(RssAnon=1 << 20, VmHWM=1 << 20)]  # of what an earlier run has freed
    monkeypatch.setattr(meter, "text_of", lambda path: told[-1])
    monkeypatch.setattr(meter, "return_freed_memory", lambda: told.append(status(**begun)))
    monkeypatch.setattr(Path, "write_text", lambda self, text: 1)
    measured = meter.MemoryMeter(CPU)
    told.append(status(**now))
    assert measured.peak() == peak
    assert meter.data_bytes() == 0
    told.append(status(VmData=7))
    assert meter.data_bytes() == 7 * KB


def test_a_peak_of_an_accelerator_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[None] = []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: forgotten.append(None))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 12.0)
    assert meter.MemoryMeter(GPU).peak() == 12
    assert forgotten == [None]
