"""Runs batches in idle time: of each key one at a time, in the order in which they were created, over the lives of the
server."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from roofline.common import log
from roofline.common.errors import ConfigError, RequestError
from roofline.common.files import cause_of
from roofline.server.batches.endpoints import RouteReply
from roofline.server.batches.files import Files, new_id
from roofline.server.batches.lines import AnswerFiles, Failure, Line, Problem, RequestFile, Rules
from roofline.server.batches.records import BatchRecord, Records
from roofline.server.batches.run import LineCaller, Record, Stopped, answer_lines, salt_of
from roofline.server.context import Context
from roofline.server.keys import LOCAL, Principal

LOG = log.get("server")
MODEL_SECONDS = 0.1  # between two looks whether the model is loaded
STORAGE_SECONDS = 5.0  # until a batch that could not be written is tried again
EXPIRED = Failure("batch_expired", "The completion window ended before this request was computed.")
CANCELLED = Failure("batch_cancelled", "The batch was cancelled before this request was computed.")


class BatchFailed(Exception):
    """A batch cannot go on: the code, and why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def owner_of(principal: Principal) -> str:
    """Whose files and batches a request may see: those of its key, by name; without keys all have the same."""
    return principal.name if principal.salt else ""


class Batches:
    """The files and batches of a server, and what runs them.

    folder: where they are kept. at_once: lines of a key that are computed at a time. Raises ConfigError for a folder
    that cannot be used.
    """

    def __init__(self, app: FastAPI, context: Context, folder: Path, at_once: int) -> None:
        self._app, self._context, self._at_once = app, context, at_once
        self.files = Files(folder, context.limits)
        try:
            self.records = Records(folder, context.limits)
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: cannot be used for batches: {cause_of(error)}") from error
        self._owners: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  # by batch
        self._written: dict[str, int] = {}  # bytes of the answers of each that runs

    def resume(self) -> None:
        """Go on with what a server before this one did not end. Call it in the event loop."""
        for batch in self.records.unfinished():
            self.wake(batch.owner)

    def wake(self, owner: str) -> None:
        """A batch of this owner is to be run."""
        if owner not in self._owners:
            self._owners[owner] = asyncio.create_task(self._run_all(owner))

    def cancel(self, batch: BatchRecord) -> None:
        """End a batch; what was answered of it stays. Raises RequestError 409 where it has ended, and OSError where
        that cannot be written: it goes on then."""
        if batch.ended or batch.outcome:
            raise RequestError(409, "batch_ended", f"The batch is {batch.status}; only one that runs can be cancelled.")
        if batch.status == "cancelling":
            return  # its task was told, or the one that follows sees it
        self.records.to(batch, "cancelling")
        task = self._running.get(batch.id)
        if task is not None:
            task.cancel()
            return
        self.wake(batch.owner)
        if not self.records.output(batch).exists():  # it has not begun
            with suppress(OSError):  # its task does it, when its turn comes
                self.records.to(batch, "cancelled")

    async def close(self) -> None:
        """Stop; a fresh server goes on."""
        tasks = list(self._owners.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.files.close()

    async def _run_all(self, owner: str) -> None:
        try:
            while batch := next((batch for batch in self.records.of(owner) if not batch.ended), None):
                task = self._running[batch.id] = asyncio.create_task(self._run(batch))
                try:
                    await asyncio.shield(task)
                except asyncio.CancelledError:
                    if task.cancelled():  # this batch alone was
                        continue
                    task.cancel()  # the server ends
                    await asyncio.gather(task, return_exceptions=True)
                    raise
                finally:
                    del self._running[batch.id]
        except Stopped as error:
            LOG.info("batches wait for the next start: %s", error)
        except Exception:
            LOG.exception("batches of this server are not run any more until its next start")
        finally:
            del self._owners[owner]

    async def _run(self, batch: BatchRecord) -> None:
        """A batch from where it is to its end; while its folder cannot be written it waits. Raises Stopped, and
        CancelledError where it is cancelled meanwhile."""
        while True:
            try:
                return await self._run_on(batch)
            except OSError as error:
                cause = f"{error.filename or self.records.folder}: {cause_of(error)}"
                LOG.error("%s waits, and is tried again in %g seconds: %s", batch.id, STORAGE_SECONDS, cause)
            await asyncio.sleep(STORAGE_SECONDS)

    async def _run_on(self, batch: BatchRecord) -> None:
        """As `_run`. Raises OSError too."""
        if batch.outcome:  # an attempt before this one, perhaps of another server, came so far
            return await self._end(batch, batch.outcome)
        try:
            await self._answer(batch)
        except BatchFailed as error:
            await self._fail(batch, error.code, str(error))
        except (ConfigError, RequestError) as error:
            LOG.error("%s cannot go on: %s", batch.id, error)
            problem = "Its input is gone, or its answers are of another model or setting; the server's log has more."
            await self._fail(batch, "cannot_go_on", problem)
        except OSError as error:
            if time.time() < batch.expires_at:
                raise
            await self._fail(batch, "storage_failed", f"The server could not store its answers: {cause_of(error)}.")

    async def _answer(self, batch: BatchRecord) -> None:
        rules = Rules((batch.endpoint,), self._context.limits, self._context.limits.batch_lines)
        path = self.files.path(self.files.get(batch.owner, batch.input_file_id))
        if not path.exists() and path.parent.exists():
            raise ConfigError(f"{path}: is gone, though it was not deleted by a request")
        requests = await asyncio.to_thread(RequestFile.scan, path, rules)
        if requests.problems:
            return await self._end(batch, "failed", requests.problems)
        salt = await self._salt(batch)
        batch.total = requests.count
        if batch.status == "validating":
            self.records.to(batch, "in_progress")
        output, errors = self.records.output(batch), self.records.errors(batch)
        answers = await asyncio.to_thread(AnswerFiles, requests, output, errors, salt)
        self._written[batch.id] = 0
        try:
            self._count(batch, answers, output.stat().st_size + errors.stat().st_size)
            outcome = await self._answer_rest(batch, requests, answers, rules)
            await asyncio.to_thread(answers.sync)
        finally:
            answers.close()
            self.files.count(batch.owner, -self._written.pop(batch.id))
        await self._end(batch, outcome)

    async def _answer_rest(self, batch: BatchRecord, requests: RequestFile, answers: AnswerFiles, rules: Rules) -> str:
        """Answer the lines that have no answer, or say of each why it has none; how the batch ends."""
        caller = LineCaller(self._app, partial(self._principal, batch))
        record = partial(self._record, batch, answers)
        rest = requests.lines(rules, answers.answered)
        try:
            if batch.status != "cancelling":
                async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                    await answer_lines(rest, caller.answer, record, self._at_once)
                return "completed"
        except TimeoutError:
            await self._fill(requests.lines(rules, answers.answered), record, EXPIRED)
            return "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":  # the server ends
                raise
        await self._fill(requests.lines(rules, answers.answered), record, CANCELLED)
        return "cancelled"

    async def _fill(self, rest: Iterable[tuple[int, Line]], record: Record, failure: Failure) -> None:
        """Write the same error for all these lines."""
        for number, line in rest:
            record(number, line, failure)
            if number % 64 == 0:
                await asyncio.sleep(0)  # other requests are to go on meanwhile

    def _record(
        self, batch: BatchRecord, answers: AnswerFiles, number: int, line: Line, reply: RouteReply | Failure
    ) -> None:
        if self.files.full(batch.owner):
            raise BatchFailed("storage_full", "The files of this key take all the room that it has. Delete some.")
        self._count(batch, answers, answers.write(number, line, reply))

    def _count(self, batch: BatchRecord, answers: AnswerFiles, more: int) -> None:
        """So many bytes more are written of its answers."""
        batch.completed, batch.failed = answers.completed, answers.failed
        self._written[batch.id] += more
        self.files.count(batch.owner, more)

    async def _fail(self, batch: BatchRecord, code: str, message: str) -> None:
        await self._end(batch, "failed", [Problem(None, code, message)])

    async def _end(self, batch: BatchRecord, status: str, problems: Sequence[Problem] = ()) -> None:
        """Make its answers files of its owner's, and come to the last status; where this is interrupted, or the disk
        refuses, the next attempt does the rest. Raises OSError."""
        if batch.outcome is None:
            self.records.to(
                batch,
                batch.status if batch.status in ("validating", "cancelling") else "finalizing",
                outcome=status,
                problems=[*batch.problems, *problems],
                output_file_id=new_id(),
                error_file_id=new_id(),
            )
        output, errors = self.records.output(batch), self.records.errors(batch)
        output_id = await self._keep(batch, output, f"{batch.id}_output.jsonl", batch.output_file_id)
        error_id = await self._keep(batch, errors, f"{batch.id}_error.jsonl", batch.error_file_id)
        self.records.to(batch, status, output_file_id=output_id, error_file_id=error_id)
        LOG.info("%s %s: %d answers, %d errors", batch.id, status, batch.completed, batch.failed)

    async def _keep(self, batch: BatchRecord, path: Path, name: str, file_id: str | None) -> str | None:
        """The id of the file that the answers at `path` have become; None where there are none. Raises OSError."""
        path.parent.stat()  # a folder that is away for a while may have answers
        if path.exists():
            if path.stat().st_size:
                await asyncio.to_thread(self.files.keep, path, batch.owner, name, "batch_output", file_id)
            else:
                path.unlink()
        return file_id if file_id is not None and self.files.has(file_id) else None

    def _principal(self, batch: BatchRecord) -> Principal:
        """Whose requests they are, with the rights that the key has now. Raises BatchFailed where it has none."""
        keys = self._context.keys
        principal = keys.named(batch.owner) if batch.owner else None if keys.required else LOCAL
        if principal is None:
            raise BatchFailed("key_gone", "The key that created the batch is not among the server's any more.")
        if lacking := self._app.state.scopes.lacking(batch.endpoint, principal.scopes):
            scopes = " or ".join(map(repr, lacking))
            message = f"The key that created the batch has no longer the scope {scopes} of {batch.endpoint}."
            raise BatchFailed("insufficient_scope", message)
        return replace(principal, background=True)

    async def _salt(self, batch: BatchRecord) -> bytes:
        """Of the ids of its answers, once the model is loaded."""
        while (loaded := self._context.engine.description) is None:
            await asyncio.sleep(MODEL_SECONDS)
        return salt_of(self._context, loaded.fingerprint, (batch.endpoint,))
