"""roofline tune gemms: the fastest kernel for each of a model's 16-bit products on this GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roofline.cli.options import Weights
from roofline.cli.tuning.files import Batches, Prompt, choice, line, products_of, store
from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    from roofline.hardware.chips.chips import Chip
    from roofline.program.gemms import Gemm

Shaped = Annotated[str, typer.Argument(help="A name, preset:NAME, or a path.")]


def gemms(
    model: Shaped,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="TunableOp's results file, on AMD's GPUs; it may be there.")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", min=1, help="Seconds it may take at most.")] = None,
    batch: Batches = "1,8,16",
    prompt: Prompt = 2048,
    weights: Weights = None,
) -> None:
    """Find the fastest kernel for each of a model's 16-bit products on this GPU, and store it: of the libraries by
    TunableOp (AMD's), then between torch's and ours. A run goes on where the last one was stopped."""
    import time

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


def _left(until: float | None) -> float | None:
    import time

    return None if until is None else until - time.monotonic()


def _tune_libraries(products: "Sequence[Gemm]", path: Path, until: float | None) -> Path:
    """TunableOp's part; the results file."""
    from roofline.backends.gpu.tuning.gemm import GemmTuner
    from roofline.common.units import human_seconds

    tuner = GemmTuner(path, products)
    known = f"; {tuner.known} are known already" if tuner.known else ""
    least = human_seconds(tuner.least_seconds)
    print(f"{len(tuner.products)} products to tune{known}: at least {least}, more for every further kernel torch tries")
    left = len(tuner.products)
    for tuned in tuner.run(_left(until)):
        left = tuned.left
        print(f"{line(tuned.row)}; {left} left, about {human_seconds(tuned.seconds)}", flush=True)
    if left:
        print(f"{left} are left: run the same command again to go on")
    store([tuner.journal.path], None)
    return tuner.journal.path


def _tune_kernels(products: "Sequence[Gemm]", chip: "Chip", device: str, until: float | None) -> None:
    """The part between torch's product and ours, for few rows."""
    import time

    from roofline.backends.gpu.tuning import linear as linear_tuning
    from roofline.backends.gpu.tuning import measured_tiles as tuned_tiles
    from roofline.common.units import human_seconds
    from roofline.hardware.tuning import gemms as tuned_gemms
    from roofline.hardware.tuning import store as tunings

    stored, setting = tuned_gemms.load(chip.name), tuned_tiles.setting(device)
    wanted = [gemm for gemm in products if linear_tuning.worth(gemm)]
    new = [gemm for gemm in wanted if linear_tuning.chosen(stored, gemm, setting) is None]
    known = f"; {len(wanted) - len(new)} are known already" if len(new) < len(wanted) else ""
    print(f"{len(new)} contests between torch's product and ours{known}; the first says how long they take")
    start = time.monotonic()
    for done, gemm in enumerate(new, 1):
        left = _left(until)
        if left is not None and left < (time.monotonic() - start) / max(1, done - 1):
            print(f"{len(new) - done + 1} are left: run the same command again to go on")
            return
        record = linear_tuning.tune(linear_tuning.Trial(gemm, chip), setting)
        tunings.save(tunings.Tunings(stored.backend, stored.chip, device, {record.key: record}))
        rest = human_seconds((time.monotonic() - start) / done * (len(new) - done))
        print(f"{choice(record)}; {len(new) - done} left, about {rest}", flush=True)
