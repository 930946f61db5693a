"""Order receipts: a hash chain over the samples of every step, to prove that runs saw the same."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.data.order import Order

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

START = hashlib.sha256(b"roofline order receipts 1").hexdigest()
CONFIG, RECEIPTS = "order.json", "receipts.jsonl"


def advance(receipt: str, ids: "NDArray[np.int64]") -> str:
    """The receipt after a step whose global batch was `ids`, in order: SHA-256 over the one before and them."""
    return hashlib.sha256(bytes.fromhex(receipt) + ids.astype("<i8").tobytes()).hexdigest()


class ReceiptLog:
    """Writes the receipts of a run: a folder with the order's configuration and one line a step.

    step, receipt: where the run goes on, from its checkpoint; lines of later steps are dropped, those are taken again.

    Raises ConfigError when the folder holds receipts of another order, or does not reach the step resumed from.
    """

    def __init__(self, folder: Path, order: Order, step: int = 0, receipt: str = START) -> None:
        self.step, self.receipt = step, receipt
        folder.mkdir(parents=True, exist_ok=True)
        kept = read(folder) if (folder / CONFIG).exists() else None
        if kept is not None and kept.order != order:
            raise ConfigError(f"{folder} holds the receipts of another order of samples: choose another folder")
        lines = _continued(kept.receipts[:step] if kept is not None else [], order, step)
        if step and lines[-1] != receipt:
            raise ConfigError(
                f"{folder}: the receipts of its order do not lead to that of the checkpoint at step {step}: one of "
                "them is of another run, or damaged"
            )
        write_atomically(folder / CONFIG, json.dumps(order.record(), indent=1) + "\n")
        write_atomically(folder / RECEIPTS, "".join(_line(number, line) for number, line in enumerate(lines)))
        self._file: IO[str] = (folder / RECEIPTS).open("a")

    def add(self, ids: "NDArray[np.int64]") -> str:
        """Record the next step's global batch; the receipt after it."""
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
    """A run's order and its receipts, one after each step."""

    order: Order
    receipts: list[str]


@dataclass(frozen=True)
class Comparison:
    """Steps that both runs took, and the first that differs, if one does.

    Attributes:
        sample: where in that step's batch the first other sample stands, and the two; None where the orders give the
            same batch and only the receipts differ: one of them is not what its run computed.
    """

    steps: int
    step: int | None = None
    sample: tuple[int, int, int] | None = None


def read(folder: Path) -> Run:
    """What a ReceiptLog wrote. Raises ConfigError. A last line that was cut by a crash is left out."""
    try:
        order = Order.from_record(json.loads((folder / CONFIG).read_text()))
        lines = (folder / RECEIPTS).read_text().split("\n")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} holds no order receipts: {Path(error.filename).name} is missing") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / CONFIG} is damaged: {error}") from error
    return Run(order, list(_receipts(folder, lines[:-1])))


def _continued(receipts: list[str], order: Order, steps: int) -> list[str]:
    """With those up to `steps`: a run that moved left some behind, and its order gives them again."""
    receipts = [START, *receipts]
    for step in range(len(receipts) - 1, steps):
        receipts.append(advance(receipts[-1], order.batch(step)))
    return receipts[1:]


def _line(step: int, receipt: str) -> str:
    return json.dumps({"step": step, "receipt": receipt}) + "\n"


def _receipts(folder: Path, lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        try:
            entry: JsonObject = json.loads(line)
            fine = entry["step"] == number and len(bytes.fromhex(entry["receipt"])) == 32
        except (ValueError, KeyError, TypeError):
            fine = False
        if not fine:
            raise ConfigError(f"{folder / RECEIPTS}: line {number + 1} is not the receipt of step {number}")
        yield entry["receipt"]


def compare(a: Run, b: Run) -> Comparison:
    """Sets the receipts of two runs side by side, and finds the sample that differs first."""
    both = list(zip(a.receipts, b.receipts, strict=False))
    step = next((i for i, (x, y) in enumerate(both) if x != y), None)
    if step is None:
        return Comparison(len(both))
    batches = a.order.batch(step), b.order.batch(step)
    for place, (x, y) in enumerate(itertools.zip_longest(*(batch.tolist() for batch in batches), fillvalue=-1)):
        if x != y:
            return Comparison(len(both), step, (place, x, y))
    return Comparison(len(both), step)


def verify(run: Run) -> int | None:
    """The first step whose receipt is not that of its order; None: all are."""
    receipt = START
    for step, found in enumerate(run.receipts):
        receipt = advance(receipt, run.order.batch(step))
        if receipt != found:
            return step
    return None
