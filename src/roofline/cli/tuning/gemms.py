"""roofline tune gemms: the fastest kernel for each of a model's 16-bit products on this GPU."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import Weights
from roofline.cli.parser import Argument
from roofline.cli.tuning.files import Batches, Prompt, choice, import_, line, products_of
from roofline.common.errors import ConfigError
from roofline.common.options import Option
from roofline.common.units import human_seconds

if TYPE_CHECKING:
    from roofline.hardware.chips.chips import Chip
    from roofline.program.gemms import Gemm


def gemms(
    model: Annotated[str, Argument("A name, preset:NAME, or a path.")],
    out: Annotated[
        Path | None, Option("TunableOp's results file, on AMD's GPUs; it may be there.", flags=("--out", "-o"))
    ] = None,
    budget: Annotated[float | None, Option("Seconds it may take at most.", minimum=1)] = None,
    batch: Batches = "1,8,16",
    prompt: Prompt = 2048,
    weights: Weights = None,
) -> None:
    """Find the fastest kernel for each of a model's 16-bit products on this GPU, and store it: of the libraries by
    TunableOp (AMD's), then between torch's and ours. A run goes on where the last one was stopped."""
    from roofline.backends.gpu.runtime.libraries import follow
    from roofline.backends.gpu.tuning.gemm import device_here
    from roofline.common import env

    products, ours = products_of(model, weights, batch, prompt)
    chip, device = device_here()
    until = None if budget is None else time.monotonic() + budget
    if chip.vendor == "amd":
        follow(_tune_libraries(products.tunable, out or env.home() / "tunings" / "tunableop.csv", until))
    elif out is not None:
        raise ConfigError("--out is TunableOp's file, and TunableOp has one candidate on NVIDIA's GPUs: leave it out")
    _tune_kernels(ours, chip, device, until)


def _seconds_left(until: float | None) -> float | None:
    return None if until is None else until - time.monotonic()


def _tune_libraries(products: "Sequence[Gemm]", path: Path, until: float | None) -> Path:
    """TunableOp's part; the results file."""
    from roofline.backends.gpu.tuning.gemm import GemmTuner

    tuner = GemmTuner(path, products)
    reused = f"; {tuner.measured} are known already" if tuner.measured else ""
    least = human_seconds(tuner.least_seconds)
    print(
        f"{len(tuner.products)} products to tune{reused}: at least {least}, more for every further kernel torch tries"
    )
    remaining = len(tuner.products)
    for tuned in tuner.run(_seconds_left(until)):
        remaining = tuned.remaining
        print(f"{line(tuned.row)}; {remaining} left, about {human_seconds(tuned.seconds)}", flush=True)
    if remaining:
        print(f"{remaining} are left: run the same command again to go on")
    import_([tuner.journal.path])
    return tuner.journal.path


def _tune_kernels(products: "Sequence[Gemm]", chip: "Chip", device: str, until: float | None) -> None:
    """The part between torch's product and ours, for few rows."""
    from roofline.backends.gpu.tuning import linear as linear_tuning
    from roofline.backends.gpu.tuning import measured_tiles as tuned_tiles
    from roofline.hardware.tuning import gemms as tuned_gemms
    from roofline.hardware.tuning import store as tunings

    stored, setting = tuned_gemms.load(chip.name), tuned_tiles.setting(device)
    contests = [gemm for gemm in products if linear_tuning.worth(gemm)]
    new = [gemm for gemm in contests if linear_tuning.chosen(stored, gemm, setting) is None]
    reused = f"; {len(contests) - len(new)} are known already" if len(new) < len(contests) else ""
    print(f"{len(new)} contests between torch's product and ours{reused}; the first says how long they take")
    start = time.monotonic()
    for done, gemm in enumerate(new, 1):
        seconds = _seconds_left(until)
        if seconds is not None and seconds < (time.monotonic() - start) / max(1, done - 1):
            print(f"{len(new) - done + 1} are left: run the same command again to go on")
            return
        record = linear_tuning.tune(linear_tuning.Trial(gemm, chip), setting)
        tunings.save_where_possible(tunings.Tunings(stored.backend, stored.chip, device, {record.key: record}))
        time_left = human_seconds((time.monotonic() - start) / done * (len(new) - done))
        print(f"{choice(record)}; {len(new) - done} left, about {time_left}", flush=True)
