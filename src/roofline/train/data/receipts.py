"""Order receipts: a hash chain over the samples of every step, which proves that two runs read the same samples.

Steps are counted from 1, as in the run's log: the first global batch is that of step 1. Files of older
versions count from 0, and are read as well.

A step's link binds the numbers of its samples and the digest of what their rows held. The numbers follow from the
order, the digests stand in the receipts and in the checkpoints. Runs of before 2026-11-23 have no digests: their links
bind the numbers alone, so that they read the same data set cannot be told.
"""

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
from roofline.train.data.row_digest import BYTES
from roofline.train.run_folder import LOG, read_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

START = hashlib.sha256(b"roofline order receipts 1").hexdigest()
CONFIG, RECEIPTS = "order.json", "receipts.jsonl"


def advance(receipt: str, ids: "NDArray[np.int64]", digest: bytes = b"") -> str:
    """The receipt after a step: the SHA-256 of the previous receipt, the global batch's sample numbers and its rows.

    ids: in order. digest: of the rows (`row_digest`), empty where it is not known.
    """
    return hashlib.sha256(bytes.fromhex(receipt) + ids.astype("<i8").tobytes() + digest).hexdigest()


class ReceiptLog:
    """Writes the receipts of a run into its folder: the order's configuration, and a line for each step.

    step, receipt, digests: where the run continues, from its checkpoint; lines of later steps are dropped. digests: of
    the rows of the last steps before it, BYTES each.

    Raises ConfigError if the folder holds receipts of another order, or if they do not lead to the checkpoint's.
    """

    def __init__(
        self, folder: Path, order: Order, step: int = 0, receipt: str = START, digests: bytes | bytearray = b""
    ) -> None:
        self.step, self.receipt = step, receipt
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _read(folder) if (folder / CONFIG).exists() else Run(order, [], [])
        if difference := earlier.order.difference(order):
            raise ConfigError(
                f"{folder} holds the receipts of another order of samples ({difference}): choose another folder"
            )
        run = _completed(earlier, order, step, bytes(digests))
        if step and run.receipts[-1] != receipt:
            raise ConfigError(
                f"{folder}: the receipts of its order do not lead to that of the checkpoint at step {step}: one of "
                "them is of another run, or damaged"
            )
        write_atomically(folder / CONFIG, json.dumps(order.record(), indent=1) + "\n")
        lines = enumerate(zip(run.receipts, run.digests, strict=True), 1)
        write_atomically(folder / RECEIPTS, "".join(_line(number, *line) for number, line in lines))
        self._file: IO[str] = (folder / RECEIPTS).open("a")

    def add(self, ids: "NDArray[np.int64]", digest: bytes = b"") -> str:
        """Record the global batch of the next step and the digest of its rows; returns the receipt after it."""
        self.receipt = advance(self.receipt, ids, digest)
        self.step += 1
        self._file.write(_line(self.step, self.receipt, digest))
        self._file.flush()
        return self.receipt

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Run:
    """The order of a run, its receipt after each step, and the digest of each step's rows (empty if not recorded)."""

    order: Order
    receipts: list[str]
    digests: list[bytes]


@dataclass(frozen=True)
class Comparison:
    """How far the samples of two runs agree.

    Attributes:
        steps: steps that both runs took. step: the first that differs, if any, counted from 1.
        sample: the index in that step's batch of the first sample that differs, and both samples.
        content: the sample numbers of that step agree, but not what their rows held. If neither this nor `sample` is
            set, only the receipts differ, so one of these is not what its run computed.
        unproven: steps of which a run has not recorded what the rows held.
    """

    steps: int
    step: int | None = None
    sample: tuple[int, int, int] | None = None
    content: bool = False
    unproven: int = 0


def read(folder: Path) -> Run:
    """What a ReceiptLog wrote, without a last line that a crash cut.

    Raises ConfigError if something is missing, damaged, empty, or ends before the log of the run does.
    """
    run = _read(folder)
    log = folder / LOG
    steps = max((line["step"] for line in read_lines(log) if "loss" in line), default=0) if log.exists() else 0
    if not run.receipts:
        raise ConfigError(f"{folder / RECEIPTS} holds no receipt: the run took no step, or the file was emptied")
    if len(run.receipts) < steps:
        raise ConfigError(
            f"{folder / RECEIPTS} is cut: it ends at step {len(run.receipts)}, {LOG} at step {steps}; a run that goes "
            "on from a checkpoint (autoresume=true) completes it"
        )
    return run


def _read(folder: Path) -> Run:
    try:
        order = Order.from_record(json.loads((folder / CONFIG).read_text()))
        lines = (folder / RECEIPTS).read_text().split("\n")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} holds no order receipts: {Path(error.filename).name} is missing") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / CONFIG} is damaged: {error}") from error
    receipts = list(_receipts(folder, lines[:-1]))
    return Run(order, [receipt for receipt, _ in receipts], [digest for _, digest in receipts])


def _completed(earlier: Run, order: Order, steps: int, digests: bytes) -> Run:
    """The receipts up to `steps`: what a run that changed its folder left behind follows from order and digests."""
    receipts, every = [START, *earlier.receipts[:steps]], earlier.digests[:steps]
    first = steps - len(digests) // BYTES
    for step in range(len(every), steps):
        every.append(digests[(step - first) * BYTES :][:BYTES] if step >= first else b"")
        receipts.append(advance(receipts[-1], order.batch(step), every[-1]))
    return Run(order, receipts[1:], every)


def _line(step: int, receipt: str, digest: bytes) -> str:
    return json.dumps({"step": step, "receipt": receipt} | ({"rows": digest.hex()} if digest else {})) + "\n"


def _receipts(folder: Path, lines: list[str]) -> Iterator[tuple[str, bytes]]:
    first = 1
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            digest = bytes.fromhex(entry.get("rows", ""))
            if not number and entry["step"] == 0:
                first = 0  # of an older version
            is_valid = entry["step"] == number + first and len(bytes.fromhex(entry["receipt"])) == 32
        except (ValueError, KeyError, TypeError, AttributeError):
            is_valid = False
        if not is_valid or len(digest) not in (0, BYTES):
            raise ConfigError(f"{folder / RECEIPTS}: line {number + 1} is not the receipt of step {number + 1}")
        yield entry["receipt"], digest


def compare(a: Run, b: Run) -> Comparison:
    """Compares the receipts of two runs, and finds the first sample that differs."""
    steps = min(len(a.receipts), len(b.receipts))
    unproven = sum(not (x and y) for x, y in zip(a.digests, b.digests, strict=False))
    first = next((i for i in range(steps) if a.receipts[i] != b.receipts[i]), steps)
    for step in range(first, steps):  # links differ from here on, perhaps only because one binds no rows
        if a.order != b.order:
            batches = a.order.batch(step).tolist(), b.order.batch(step).tolist()
            for place, (x, y) in enumerate(itertools.zip_longest(*batches, fillvalue=-1)):
                if x != y:
                    return Comparison(steps, step + 1, (place, x, y))
        if a.digests[step] and b.digests[step] and a.digests[step] != b.digests[step]:
            return Comparison(steps, step + 1, content=True)
    if first < steps and a.digests[: first + 1] == b.digests[: first + 1]:
        return Comparison(steps, first + 1)
    return Comparison(steps, unproven=unproven)


def verify(run: Run) -> int | None:
    """The first step, counted from 1, whose receipt does not follow from the order; None if all do."""
    receipt = START
    for step, recorded in enumerate(run.receipts):
        receipt = advance(receipt, run.order.batch(step), run.digests[step])
        if receipt != recorded:
            return step + 1
    return None
