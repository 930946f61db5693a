"""Running the steps of a recording again, alone: the same ids in the same pages, and the digests compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.backends.base import Adapts, Executable
from roofline.backends.options import MAX_ADAPTERS
from roofline.common.errors import ConfigError, RooflineError
from roofline.engine.digests import digests_of
from roofline.engine.recording.entries import (
    AdapterPlaced,
    AnswerPart,
    Arrival,
    Head,
    Landed,
    Lead,
    Named,
    Step,
    read_entries,
)
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS, Segment, StateMove

if TYPE_CHECKING:
    from roofline.weights.adapters import Adapter


@dataclass(frozen=True)
class StepOutcome:
    """What came of a step. recorded, replayed: digests of its logit rows, None where it failed or never ended; errors:
    why; answers: (request id, index) of the rows, in their order."""

    number: int
    tokens: int
    recorded: list[bytes] | None
    replayed: list[bytes] | None
    recorded_error: str | None
    replayed_error: str | None
    answers: list[tuple[str, int]]

    @property
    def first_row(self) -> int | None:
        """The first row with another digest, None where both have the same."""
        if self.recorded is None or self.replayed is None or self.recorded == self.replayed:
            return None
        pairs = enumerate(zip(self.recorded, self.replayed, strict=False))
        return next((row for row, (one, other) in pairs if one != other), min(len(self.recorded), len(self.replayed)))


def check_room(path: Path, head: Head, executable: Executable) -> None:
    """Raises ConfigError where an executable is too small for a recording's steps, or has another vocabulary."""
    limits = executable.limits
    needs = (
        ("max_batch_tokens", head.tokens, limits.tokens),
        ("max_running", head.segments, limits.segments),
        ("logit rows (max_running, draft_tokens)", head.rows, limits.rows),
        ("cache_tokens", head.num_pages * PAGE_TOKENS, executable.num_pages * PAGE_TOKENS),
        ("slots of recurrent state", head.state_slots, limits.state_slots),
        ("max_adapter_rank", head.adapter_rank, executable.adapters.rank if isinstance(executable, Adapts) else 0),
    )
    for name, needed, available in needs:
        if needed > available:
            raise ConfigError(f"{path}: its engine had {name} {needed}, and this one has {available}")
    if head.vocab_size != executable.vocab_size:
        raise ConfigError(f"{path} is of a vocabulary of {head.vocab_size} ids, the model has {executable.vocab_size}")


def replay(path: Path, executable: Executable, adapters: Sequence[str] = ()) -> Iterator[StepOutcome]:
    """Run the steps of one file, in order. Where it has no ids, made-up ones stand for them: the steps have the same
    shapes, and other logits.

    adapters: folders of adapters that are not where the recorded engine has read them. Raises ConfigError for a file
    that is none or does not fit, and where an adapter is missing or has changed.
    """
    head, entries = read_entries(path)
    check_room(path, head, executable)
    runner = _Runner(path, executable, RecordedAdapters(path, head, executable, adapters))
    step: Step | None = None
    for entry in entries:
        if step is not None and not isinstance(entry, Arrival):
            yield runner.run(step, entry if isinstance(entry, Landed) and entry.number == step.number else None)
            step = None
        match entry:
            case AdapterPlaced():
                runner.adapters.place(entry)
            case Lead():
                runner.compute_lead(entry)
            case Named():
                runner.names[entry.answer] = entry.request_id, entry.index
                runner.tables[entry.answer] = list(entry.lead_pages)
                runner.slots[entry.answer] = runner.adapters.check_slot(entry.slot)
            case Step():
                step = entry
    if step is not None:
        yield runner.run(step, None)


class RecordedAdapters:
    """The adapters of one recording, put into the same slots of this executable.

    folders: where to look for an adapter before the place that the recording names.
    """

    def __init__(self, path: Path, head: Head, executable: Executable, folders: Sequence[str]) -> None:
        self._path, self._most, self._executable, self._folders = path, head.max_adapters, executable, folders
        self._slots: set[int] = set()

    def place(self, entry: AdapterPlaced) -> None:
        """Read an adapter and put it into its slot. Raises ConfigError where none with its digest is found."""
        executable, slot = self._executable, entry.slot
        if not (isinstance(executable, Adapts) and 0 < slot <= min(self._most, MAX_ADAPTERS)):
            raise ConfigError(f"{self._path} is no recording that can be replayed: it has no place for adapter {slot}")
        adapter = self._read(entry)
        if slot in executable.adapters.placed:
            executable.adapters.free(slot)
        executable.adapters.set(slot, adapter.matrices)
        self._slots.add(slot)

    def check_slot(self, slot: int) -> int:
        """The slot. Raises ConfigError for one in which no adapter has been put."""
        if slot and slot not in self._slots:
            raise ConfigError(
                f"{self._path} is no recording that can be replayed: it does not say what adapter {slot} is"
            )
        return slot

    def _read(self, entry: AdapterPlaced) -> "Adapter":
        from roofline.weights.adapters import read_adapter

        problem = "its files have changed"
        for folder in (*self._folders, entry.path):
            try:
                adapter = read_adapter(folder)
            except ConfigError as error:
                if folder in self._folders:
                    raise
                problem = str(error)
            else:
                if adapter.digest == entry.digest:
                    return adapter
        what = f"an answer was computed with the adapter {entry.path}, of digest {entry.digest[:16]}"
        raise ConfigError(f"{self._path}: {what}: {problem}. Name its folder: --adapter FOLDER")


class _Runner:
    """The state of a replay: of each answer its name, its page table so far and the slot of its adapter."""

    def __init__(self, path: Path, executable: Executable, adapters: "RecordedAdapters") -> None:
        self._path, self._executable, self.adapters = path, executable, adapters
        self.slots: dict[int, int] = {}
        self.names: dict[int, tuple[str, int]] = {}
        self.tables: dict[int, list[int]] = {}

    def compute_lead(self, lead: Lead) -> None:
        """Put into the cache what lay there, in steps of whatever size."""
        executable, max_tokens = self._executable, self._executable.limits.tokens
        slot = self.adapters.check_slot(lead.slot)
        for first in range(0, lead.count, max_tokens):
            count = min(max_tokens, lead.count - first)
            ids = lead.ids[first : first + count] if lead.ids is not None else self._made_up(first, count)
            state = (lead.state_slot if first else NO_SLOT, lead.state_slot, 0, NO_SLOT)
            self._fill([self._segment(ids, first, count, lead.pages, slot, state)], [])
            try:
                executable.forward()
            except Exception as error:
                problem = f"what lay in its cache cannot be computed here: {type(error).__name__}: {error}"
                raise RooflineError(f"{self._path}: {problem}") from error

    def run(self, step: Step, landed: Landed | None) -> StepOutcome:
        """Run one step and compare it with what was recorded of it."""
        executable = self._executable
        if len(step.parts) > self._executable.limits.segments:
            self._refuse(f"step {step.number} has {len(step.parts)} parts")
        segments = [self._part(part) for part in step.parts]
        of = [self.names[part.answer] for part in step.parts for _ in range(part.count)]  # whose each token is
        rows, end = step.rows, len(of)
        if not all(0 <= row < end for row in rows) or sorted(set(rows)) != rows:
            self._refuse(f"step {step.number} has logits of tokens that it has not")
        answers = [of[row] for row in rows]
        self._fill(segments, rows)
        digests, error = None, None
        try:
            executable.forward()
            digests = digests_of(executable.logits()) if rows else []
        except Exception as problem:  # whatever a backend raises is what a replay is to find
            error = f"{type(problem).__name__}: {problem}"
        recorded = landed.digests if landed is not None and landed.error is None else None
        cause = landed.error if landed is not None else "it never ended"
        return StepOutcome(
            number=step.number,
            tokens=end,
            recorded=recorded,
            replayed=digests,
            recorded_error=cause,
            replayed_error=error,
            answers=answers,
        )

    def _part(self, part: AnswerPart) -> Segment:
        table = self.tables.get(part.answer)
        if table is None:
            self._refuse(f"answer {part.answer} has no name")
        else:
            table[part.first // PAGE_TOKENS :] = part.pages
        ids = part.ids if part.ids is not None else self._made_up(part.first, part.count)
        return self._segment(ids, part.first, part.count, table or [], self.slots[part.answer], part.state)

    def _segment(
        self, ids: list[int], first: int, count: int, pages: list[int], slot: int, state: tuple[int, ...]
    ) -> Segment:
        """A segment whose every number an executable may use. Raises ConfigError for others."""
        executable = self._executable
        if not (count > 0 and len(ids) == count and 0 <= first <= executable.max_context - count):
            self._refuse(f"{len(ids)} ids at position {first} do not fit a context of {executable.max_context}")
        if not all(0 <= token < executable.vocab_size for token in ids):
            self._refuse("it has ids outside the vocabulary")
        if len(pages) * PAGE_TOKENS < first + count or not all(0 <= page < executable.num_pages for page in pages):
            self._refuse("it has a page table that does not fit the cache")
        return Segment(ids, first, pages, slot, self._move(state, first, first + count))

    def _move(self, state: tuple[int, ...], first: int, end: int) -> StateMove | None:
        """The slots of a segment from `first` to `end`; None: the model has none."""
        count = self._executable.limits.state_slots
        if not count:
            return None
        if len(state) != len(fields(StateMove)):
            self._refuse("it says nothing of recurrent state, which the model has")
        move = StateMove(*state)
        slots, saves = (move.source, move.target, move.save_to), move.save_to != NO_SLOT
        if not all(NO_SLOT <= slot < count for slot in slots) or (saves and not first < move.save_at <= end):
            self._refuse("it has slots of recurrent state that there are not")
        if (move.source == NO_SLOT) != (first == 0):
            self._refuse("it has a part that begins with no state, or with one that nobody reads")
        return move

    def _fill(self, segments: list[Segment], rows: list[int]) -> None:
        limits = self._executable.limits
        sizes = (
            (sum(len(s.ids) for s in segments), limits.tokens),
            (len(segments), limits.segments),
            (len(rows), limits.rows),
            (sum(len(s.pages) for s in segments), limits.pages),
        )
        if not segments or any(size > most for size, most in sizes):
            self._refuse("it has a step that is empty, or larger than its engine's")
        self._executable.batch.fill(segments, rows)

    def _made_up(self, first: int, count: int) -> list[int]:
        if count > self._executable.max_context:
            self._refuse(f"it has a part of {count} tokens")
        return [(31 * position + 7) % self._executable.vocab_size for position in range(first, first + count)]

    def _refuse(self, problem: str) -> None:
        raise ConfigError(f"{self._path} is no recording that can be replayed: {problem}")
