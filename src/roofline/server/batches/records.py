"""What is known of each batch, in a folder: FOLDER/batches/ID.json, written anew at each step of its life.

    validating ──> in_progress ──> finalizing ──> completed | expired | failed: no room for the answers, another model
         │              └── cancelling ──> cancelled
         └── failed: lines that are no requests

Beside it, while it runs, ID.output and ID.errors: its answers, from which a fresh server goes on.
"""

import time
import uuid
from pathlib import Path

import msgspec

from roofline.common import log
from roofline.common.errors import RequestError
from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.server.batches.lines import Problem
from roofline.server.limits import Limits

LOG = log.get("server")
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
FACTS = ".json"


class BatchRecord(msgspec.Struct):
    """A batch. owner: as of a StoredFile. times: when it came to each status, in Unix seconds. completed and failed
    count lines with an answer; they are written down when the batch ends, and counted in its answers until then."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    metadata: dict[str, str] | None
    status: str
    times: dict[str, int]
    created_at: int
    number: int  # in the order of creation
    total: int = 0
    completed: int = 0
    failed: int = 0
    problems: list[Problem] = []
    outcome: str | None = None  # the status that it ends with, once that is decided
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will become of it."""
        return self.status in ENDED

    def listed(self) -> JsonObject:
        """OpenAI's object."""
        problems = [problem._asdict() for problem in self.problems]
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Records:
    """The batches of all keys, in a folder that this process has for itself. Raises OSError."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self._limits = folder / "batches", limits
        self.folder.mkdir(exist_ok=True, mode=0o700)
        self._batches: dict[str, BatchRecord] = {}  # the oldest first
        batches = []
        for path in self.folder.glob(f"*{FACTS}"):
            try:
                batches.append(msgspec.json.decode(path.read_bytes(), type=BatchRecord))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                LOG.warning("%s cannot be read, so its batch is not run", path)
        self._batches = {batch.id: batch for batch in sorted(batches, key=lambda batch: batch.number)}

    def create(
        self, owner: str, endpoint: str, input_file_id: str, hours: int, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """A new batch, on disk. Raises RequestError where its owner has too many that have not ended."""
        own = self.of(owner)
        unfinished = [batch for batch in own if not batch.ended]
        if len(unfinished) >= self._limits.open_batches:
            message = f"This key has {len(unfinished)} batches that have not ended, and may have no more."
            raise RequestError(429, "too_many_batches", message)
        ended = [batch for batch in own if batch.ended]
        for batch in ended[: max(0, len(own) + 1 - self._limits.kept_batches)]:
            self._forget(batch)
        now = int(time.time())
        number = max((batch.number for batch in self._batches.values()), default=0) + 1
        name, window, end = f"batch_{uuid.uuid4().hex}", f"{hours}h", now + 3600 * hours
        batch = BatchRecord(
            id=name,
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            expires_at=end,
            metadata=metadata,
            status="validating",
            times={},
            created_at=now,
            number=number,
        )
        self.save(batch)
        self._batches[batch.id] = batch
        return batch

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch of this owner's. Raises RequestError 404 for others', as where there is none."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise RequestError(404, "batch_not_found", f"There is no batch {batch_id[:100]!r}.")
        return batch

    def of(self, owner: str) -> list[BatchRecord]:
        """All batches of an owner, the oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def unfinished(self) -> list[BatchRecord]:
        """All that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.ended]

    def to(self, batch: BatchRecord, status: str, **fields: object) -> None:
        """A batch comes to a status, with these fields: on disk, and then here. Raises OSError, and the batch is as it
        was then."""
        times = {**batch.times, status: int(time.time())}
        changed = msgspec.structs.replace(batch, status=status, times=times, **fields)
        self.save(changed)
        for name in ("status", "times", *fields):
            setattr(batch, name, getattr(changed, name))

    def save(self, batch: BatchRecord) -> None:
        """Write it to disk. Raises OSError."""
        write_atomically(self.folder / (batch.id + FACTS), msgspec.json.encode(batch))

    def output(self, batch: BatchRecord) -> Path:
        """The file of its answers while it runs."""
        return self.folder / f"{batch.id}.output"

    def errors(self, batch: BatchRecord) -> Path:
        """The file of its errors while it runs."""
        return self.folder / f"{batch.id}.errors"

    def _forget(self, batch: BatchRecord) -> None:
        (self.folder / (batch.id + FACTS)).unlink(missing_ok=True)
        del self._batches[batch.id]
