"""Describes what a run runs on: the device and its peak, or else a measured roof, and the versions of software."""

import functools
import math
import platform
import subprocess
import time
from pathlib import Path

import torch

import roofline
from roofline.common.json_types import JsonObject
from roofline.hardware.chips.products import Peak, peak
from roofline.hardware.detect import detect
from roofline.hardware.host_settings import gpu_driver

PRECISIONS = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16"}
ROOF_SIDE = 2048
ROOF_SECONDS = 0.1  # the longest product of the measured roof, so that runs start quickly
# Products of one size are repeated this often, and for this long: beside other programs a short one may take a hundred
# times as long as alone, because its threads wait for each other.
_REPEATS, _REPEAT_SECONDS = 3, 0.02


def device(kind: torch.device) -> JsonObject:
    """Name and kind of a process's device, and the number of threads on a CPU."""
    if kind.type == "cpu":
        return {"name": detect().chip, "kind": "cpu", "threads": torch.get_num_threads()}
    return {"name": torch.get_device_module(kind).get_device_name(kind), "kind": kind.type}


def peak_of(kind: torch.device, precision: str, configured: float | None) -> tuple[Peak | None, str | None]:
    """The peak of a device in the run's precision, or why it is not known.

    configured: FLOP/s from the configuration (speed_monitor.gpu_flops_available).
    """
    if configured is not None:
        return Peak(configured, "speed_monitor.gpu_flops_available"), None
    if kind.type == "cpu":
        return None, "a CPU's peak is not guessed"
    module = torch.get_device_module(kind)
    name, units = module.get_device_name(kind), module.get_device_properties(kind).multi_processor_count
    device_peak = peak(name, units, PRECISIONS[precision])
    if device_peak is None:
        return None, f"no peak is known of {name!r} with {units} multiprocessors in {PRECISIONS[precision]}"
    return device_peak, None


@functools.cache
def measured_roof(kind: torch.device, dtype: torch.dtype | None) -> JsonObject:
    """The best FLOP/s of a square matrix product on one device, in `dtype` or float32, and how it was measured.

    The greatest side is ROOF_SIDE, or a smaller power of two if the product would take longer than ROOF_SECONDS.
    """
    dtype, side = dtype or torch.float32, 128
    seconds = _product_seconds(kind, dtype, side)
    best = (2 * side**3 / seconds, side)
    while side < ROOF_SIDE and seconds * 8 < ROOF_SECONDS:
        side *= 2
        seconds = _product_seconds(kind, dtype, side)
        best = max(best, (2 * side**3 / seconds, side))
    flops, side = best
    return {"flops": flops, "measured": f"the fastest matmul of {side}^3 in {str(dtype).removeprefix('torch.')}"}


def higher_roof(roof: JsonObject, kind: torch.device, dtype: torch.dtype | None) -> JsonObject:
    """The higher one of a measured roof and of a new measurement."""
    measured_roof.cache_clear()
    return max(roof, measured_roof(kind, dtype), key=lambda roof_of: float(roof_of["flops"]))


def _product_seconds(kind: torch.device, dtype: torch.dtype, side: int) -> float:
    """The time of the fastest of several products."""
    # Chips are faster on zeros, and random numbers would change the state of the run's generator.
    a = torch.linspace(-1, 1, side * side, device=kind).view(side, side).to(dtype)
    out = a @ a
    _finish(kind)
    fastest, spent, repeats = math.inf, 0.0, 0
    while repeats < _REPEATS or spent < _REPEAT_SECONDS:
        started = time.perf_counter()
        torch.mm(a, a, out=out)
        _finish(kind)
        seconds = time.perf_counter() - started
        fastest, spent, repeats = min(fastest, seconds), spent + seconds, repeats + 1
    return fastest


def _finish(kind: torch.device) -> None:
    if kind.type != "cpu":
        torch.accelerator.synchronize()


def versions() -> dict[str, str | None]:
    """The versions of Roofline (with the commit of a checkout), Python, torch and the GPU software below it."""
    return {
        "roofline": roofline.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": gpu_driver("nvidia") or gpu_driver("amd"),
    }


@functools.cache
def _commit() -> str | None:
    """The checkout's commit, with "+" if files differ from it. A package installed inside another checkout has none."""
    folder = Path(__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
