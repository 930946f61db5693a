"""StepRecorder: writes down what each step computes, before it runs, and the digests of its logits after it.

What is written has no texts, and token ids only where that is wanted. A recording that cannot be written any more ends
with a line in the log, and the engine goes on.
"""

import os
import time
from dataclasses import astuple
from pathlib import Path
from typing import BinaryIO

import numpy as np

from roofline.backends.base import Adapts, Executable
from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of
from roofline.engine.adapters import Adapters
from roofline.engine.digests import digests_of
from roofline.engine.recording.entries import (
    MAGIC,
    SUFFIX,
    AdapterPlaced,
    AnswerPart,
    Arrival,
    End,
    Entry,
    Head,
    Landed,
    Lead,
    Named,
    Step,
    frame,
)
from roofline.engine.schedule.fill import logit_rows, step_ids
from roofline.engine.schedule.plan import StepPlan
from roofline.engine.schedule.sequence import Request, Sequence
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS

PARTS = 8  # files, at least, that the bound on a folder is divided into: the oldest goes when there is no room
MAX_PART = 256 << 20  # bytes of a file: a replay reads one at a time
MIN_PLACES = 64  # with fewer answers than these nobody looks for those that have ended


class _Place:
    """An answer in the present file: its number, its page table (the list that the sequence has), and how many of its
    positions the file has computed."""

    __slots__ = ("computed", "number", "pages")

    def __init__(self, number: int, pages: list[int]) -> None:
        self.number, self.pages, self.computed = number, pages, 0


class StepRecorder:
    """Writes the steps of one engine into files of a folder.

    Args:
        folder: made if it is missing, readable by its owner alone.
        adapters: those that the engine has loaded.
        megabytes: that all recordings in the folder may have together.
        with_ids: write token ids.

    Raises ConfigError where the folder cannot be written.
    """

    def __init__(
        self, folder: Path, executable: Executable, adapters: Adapters, megabytes: int, with_ids: bool
    ) -> None:
        self._folder, self._executable, self._adapters, self._with_ids = folder, executable, adapters, with_ids
        self._most = megabytes << 20
        self._placed: dict[int, str] = {}  # by slot the digest that the present file has for it
        self._forget_at = MIN_PLACES
        self._places: dict[Sequence, _Place] = {}
        self._stream: BinaryIO | None = None
        self._size = self._files = self._steps = self._answers = self._entries = 0
        self._began = 0.0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room()
            self._begin()
        except OSError as error:
            raise ConfigError(f"record={str(folder)!r}: the folder cannot be written: {cause_of(error)}") from error

    def arrived(self, request: Request) -> None:
        """A request was taken."""
        sizes = len(request.prompt), request.max_tokens, len(request.sequences)
        self._write([Arrival(request.id, time.monotonic() - self._began, *sizes)])

    def step(self, plan: StepPlan) -> None:
        """A step is about to run; the plan's sequences are as they were when it was filled in."""
        if self._stream is not None and self._size > self._part_bytes:
            self._rotate()
        self._steps += 1
        entries: list[Entry] = []
        moves = [astuple(planned.move) for planned in plan.moves] or [()] * len(plan.sequences)
        parts = [self._part(*part, entries) for part in zip(plan.sequences, plan.counts, moves, strict=True)]
        self._write([*entries, Step(self._steps, time.monotonic() - self._began, parts, logit_rows(plan))])

    def forget(self, plan: StepPlan) -> None:
        """What a plan's sequences have was computed again: the next step says anew what lies there."""
        for sequence in plan.sequences:
            self._places.pop(sequence, None)

    def landed(self, logits: np.ndarray | None, error: Exception | None = None) -> None:
        """The last step's logits, float32 [rows, vocab], or why there are none."""
        digests = digests_of(logits) if logits is not None else []
        self._write([Landed(self._steps, digests, None if error is None else f"{type(error).__name__}: {error}"[:400])])

    def close(self) -> None:
        """Write nothing more but the end of the present file."""
        self._write([End(self._entries)])
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _part(self, sequence: Sequence, count: int, move: tuple[int, ...], entries: list[Entry]) -> AnswerPart:
        first, place = sequence.computed, self._places.get(sequence)
        # A pre-empted sequence has other pages when it comes back, in a list of their own.
        if place is None or place.pages is not sequence.pages or first > place.computed:
            place = self._name(sequence, first, move[0] if move else NO_SLOT, entries)
        place.computed = first + count
        ids = step_ids(sequence, count) if self._with_ids else None
        return AnswerPart(
            answer=place.number,
            first=first,
            count=count,
            pages=sequence.pages[first // PAGE_TOKENS :],
            ids=ids,
            state=move,
        )

    def _name(self, sequence: Sequence, first: int, state_slot: int, entries: list[Entry]) -> _Place:
        """Give an answer a number, with its adapter and what lies in its pages, and in a slot, already."""
        if len(self._places) >= self._forget_at:
            self._places = {s: place for s, place in self._places.items() if s.finished is None}
            self._forget_at = max(MIN_PLACES, 2 * len(self._places))
        self._answers += 1
        slot = sequence.request.slot
        if slot:
            info = self._adapters.info(slot)
            if self._placed.get(slot) != info.digest:
                self._placed[slot] = info.digest
                entries.append(AdapterPlaced(slot, info.digest, info.path))
        place = self._places[sequence] = _Place(self._answers, sequence.pages)
        lead = sequence.pages[: -(-first // PAGE_TOKENS)]
        if first:
            entries.append(Lead(first, lead, sequence.ids[:first] if self._with_ids else None, slot, state_slot))
        entries.append(Named(self._answers, sequence.request.id, sequence.index, lead, slot))
        return place

    def _begin(self) -> None:
        """Open the next file."""
        self._files += 1
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{self._files:06}{SUFFIX}"
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._stream = os.fdopen(descriptor, "wb", buffering=0)  # what was written outlives the process
        executable, limits = self._executable, self._executable.limits
        self._began, self._places, self._placed = time.monotonic(), {}, {}
        head = frame(
            Head(
                fingerprint=executable.fingerprint,
                tokens=limits.tokens,
                segments=limits.segments,
                rows=limits.rows,
                pages=limits.pages,
                num_pages=executable.num_pages,
                vocab_size=executable.vocab_size,
                with_ids=self._with_ids,
                began=time.time(),
                max_adapters=self._adapters.most,
                adapter_rank=executable.adapters.rank if isinstance(executable, Adapts) else 0,
                state_slots=limits.state_slots,
            )
        )
        self._stream.write(MAGIC + head)
        self._size, self._entries = len(MAGIC) + len(head), 1

    def _rotate(self) -> None:
        """Begin another file, and remove the oldest until there is room for it."""
        self.close()
        try:
            self._make_room()
            self._begin()
        except OSError as error:
            self._give_up(error)

    @property
    def _part_bytes(self) -> int:
        return min(self._most // PARTS, MAX_PART)

    def _make_room(self) -> None:
        """Remove the oldest recordings, earlier runs' too, until there is room for one file more."""
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total <= self._most - self._part_bytes:
                break
            total -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _write(self, entries: list[Entry]) -> None:
        if self._stream is None:
            return
        data = b"".join(map(frame, entries))
        try:
            written = self._stream.write(data)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
            self._size += len(data)
            self._entries += len(entries)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.get("engine").error("steps are not recorded any more in %s: %s", self._folder, cause_of(error))
        self._close()
