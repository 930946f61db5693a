"""What torch's libraries are told: to add up in float32, and which kernels TunableOp found for products.

These are switches for the whole process. Outside of ROCm TunableOp has nothing to switch: torch has no candidates.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roofline.common import log
from roofline.hardware.chips.chips import Chip
from roofline.hardware.tuning import gemms as tuned_gemms
from roofline.hardware.tuning import tunableop


def sum_in_float32(enabled: bool = True) -> None:
    """From now on, no product adds parts of its sums in 16 bits, which torch allows the libraries otherwise."""
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not enabled
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not enabled


@contextmanager
def summing_in_float32(enabled: bool = True) -> Iterator[None]:
    """Products add up in float32 inside, as ours do, or as torch does if nobody says anything; afterwards as before."""
    import torch

    switches = torch.backends.cuda.matmul
    before = switches.allow_bf16_reduced_precision_reduction, switches.allow_fp16_reduced_precision_reduction
    sum_in_float32(enabled)
    try:
        yield
    finally:
        switches.allow_bf16_reduced_precision_reduction, switches.allow_fp16_reduced_precision_reduction = before


def validators() -> dict[str, str]:
    """Return the versions that results of this process hold for."""
    from torch.cuda import tunable

    return dict(tunable.get_validators())  # type: ignore[arg-type]  # pairs, whatever its annotation says


def follow_store(chip: Chip) -> str:
    """From now on, products follow what the chip's tuning store has of TunableOp for these versions.

    In words, with a digest of the chosen kernels, on which the bits of results depend; empty where there is nothing to
    follow.
    """
    if chip.vendor != "amd":
        return ""
    import tempfile

    current = validators()
    stored = tuned_gemms.results_from(tuned_gemms.load(chip.name))
    same = [results for results in stored if not tunableop.differences(results.validators, current)]
    if not same:
        if stored:
            why = "; ".join(tunableop.differences(stored[0].validators, current))
            log.get("backends").warning(
                "what TunableOp has chosen is not used: %s; roofline tune gemms MODEL measures it again", why
            )
        return ""
    with tempfile.TemporaryDirectory(prefix="roofline-tunableop-") as folder:
        follow(tunableop.write(same[0], Path(folder) / "results.csv"))
    chosen = sorted((*key, row.solution) for key, row in same[0].rows.items())
    digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
    return f"{len(chosen)} products by TunableOp ({digest})"


def follow(path: Path) -> None:
    """From now on, products follow a results file; nothing is tuned."""
    from torch.cuda import tunable

    tunable.enable(True)
    tunable.tuning_enable(False)
    tunable.read_file(str(path))


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Products follow what is known to this process, or torch's defaults; afterwards as before."""
    import torch

    if not torch.version.hip:
        yield
        return
    from torch.cuda import tunable

    before = tunable.is_enabled()
    tunable.enable(on)
    try:
        yield
    finally:
        tunable.enable(before)


@contextmanager
def tuning() -> Iterator[None]:
    """Each product that this process has not met before is tuned when it runs; afterwards nothing is."""
    import tempfile

    from torch.cuda import tunable

    with tempfile.TemporaryDirectory(prefix="roofline-tunableop-") as folder:
        tunable.set_filename(str(Path(folder) / "results.csv"))  # else torch writes into the working directory
        tunable.tuning_enable(True)
        try:
            with switched(True):
                yield
        finally:
            tunable.tuning_enable(False)
