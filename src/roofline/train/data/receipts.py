"""Order receipts: a hash chain over the samples of every step, which proves that two runs read the same samples."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.train.data.order import Order

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

START = hashlib.sha256(b"roofline order receipts 1").hexdigest()
CONFIG, RECEIPTS = "order.json", "receipts.jsonl"


def advance(receipt: str, ids: "NDArray[np.int64]") -> str:
    """The receipt after a step: the SHA-256 of the previous receipt and the global batch's sample numbers, in order."""
    return hashlib.sha256(bytes.fromhex(receipt) + ids.astype("<i8").tobytes()).hexdigest()


class ReceiptLog:
    """Writes the receipts of a run into its folder: the order's configuration, and a line for each step.

    step, receipt: where the run continues, from its checkpoint; lines of later steps are dropped.

    Raises ConfigError if the folder holds receipts of another order, or if they do not lead to the checkpoint's.
    """

    def __init__(self, folder: Path, order: Order, step: int = 0, receipt: str = START) -> None:
        self.step, self.receipt = step, receipt
        folder.mkdir(parents=True, exist_ok=True)
        earlier = read(folder) if (folder / CONFIG).exists() else None
        if earlier is not None and earlier.order != order:
            raise ConfigError(f"{folder} holds the receipts of another order of samples: choose another folder")
        lines = _receipts_up_to(earlier.receipts[:step] if earlier is not None else [], order, step)
        if step and lines[-1] != receipt:
            raise ConfigError(
                f"{folder}: the receipts of its order do not lead to that of the checkpoint at step {step}: one of "
                "them is of another run, or damaged"
            )
        write_atomically(folder / CONFIG, json.dumps(order.record(), indent=1) + "\n")
        write_atomically(folder / RECEIPTS, "".join(_line(number, line) for number, line in enumerate(lines)))
        self._file: IO[str] = (folder / RECEIPTS).open("a")

    def add(self, ids: "NDArray[np.int64]") -> str:
        """Record the global batch of the next step; returns the receipt after it."""
        self.receipt = advance(self.receipt, ids)
        self._file.write(_line(self.step, self.receipt))
        self._file.flush()
        self.step += 1
        return self.receipt

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Run:
    """The order of a run, and its receipt after each step."""

    order: Order
    receipts: list[str]


@dataclass(frozen=True)
class Comparison:
    """How far the samples of two runs agree.

    Attributes:
        steps: steps that both runs took. step: the first that differs, if any.
        sample: the index in that step's batch of the first sample that differs, and both samples; None if the orders
            give the same batch and only the receipts differ, so one of these is not what its run computed.
    """

    steps: int
    step: int | None = None
    sample: tuple[int, int, int] | None = None


def read(folder: Path) -> Run:
    """What a ReceiptLog wrote, without a last line that a crash cut. Raises ConfigError."""
    try:
        order = Order.from_record(json.loads((folder / CONFIG).read_text()))
        lines = (folder / RECEIPTS).read_text().split("\n")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} holds no order receipts: {Path(error.filename).name} is missing") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / CONFIG} is damaged: {error}") from error
    return Run(order, list(_receipts(folder, lines[:-1])))


def _receipts_up_to(receipts: list[str], order: Order, steps: int) -> list[str]:
    """The receipts completed up to `steps` from the order: a run that changed its folder left some behind."""
    receipts = [START, *receipts]
    for step in range(len(receipts) - 1, steps):
        receipts.append(advance(receipts[-1], order.batch(step)))
    return receipts[1:]


def _line(step: int, receipt: str) -> str:
    return json.dumps({"step": step, "receipt": receipt}) + "\n"


def _receipts(folder: Path, lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            is_valid = entry["step"] == number and len(bytes.fromhex(entry["receipt"])) == 32
        except (ValueError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            raise ConfigError(f"{folder / RECEIPTS}: line {number + 1} is not the receipt of step {number}")
        yield entry["receipt"]


def compare(a: Run, b: Run) -> Comparison:
    """Compares the receipts of two runs, and finds the first sample that differs."""
    steps = min(len(a.receipts), len(b.receipts))
    step = next((i for i in range(steps) if a.receipts[i] != b.receipts[i]), None)
    if step is None:
        return Comparison(steps)
    batches = a.order.batch(step), b.order.batch(step)
    for place, (x, y) in enumerate(itertools.zip_longest(*(batch.tolist() for batch in batches), fillvalue=-1)):
        if x != y:
            return Comparison(steps, step, (place, x, y))
    return Comparison(steps, step)


def verify(run: Run) -> int | None:
    """The first step whose receipt does not follow from the order; None if all do."""
    receipt = START
    for step, recorded in enumerate(run.receipts):
        receipt = advance(receipt, run.order.batch(step))
        if receipt != recorded:
            return step
    return None
