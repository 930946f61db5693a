"""Responses by their ids: those that are stored, and those that are computed in the background."""

import asyncio
import contextlib
from contextlib import aclosing

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.server.answers import Answers
from roofline.server.errors import as_request_error
from roofline.server.routes.responses.form import ResponseForm
from roofline.server.routes.responses.store import ResponseStore

EXPIRE_SECONDS = 600.0  # how late what is too old may be removed


class BackgroundRun:
    """A response that is computed whether or not a client waits."""

    def __init__(self, answers: Answers, form: ResponseForm) -> None:
        self.form = form
        self.cancelled = False
        self._answers = answers
        self._status = "queued"
        self.task = asyncio.create_task(self._compute())

    def response(self) -> JsonObject:
        """What is known of it now."""
        return self.form.response(self._status)

    async def _compute(self) -> None:
        """Computes the answer and keeps it, however it ends."""
        try:
            async with aclosing(self._answers.pieces()) as pieces:
                async for _, piece in pieces:
                    self._status = "in_progress"
                    if isinstance(piece, AnswerPiece):
                        self.form.take(piece)
            await self.form.keep()
        except asyncio.CancelledError:
            if self.cancelled:
                self.form.keep_failed(None)
            raise
        except Exception as error:
            self.form.keep_failed(as_request_error(error))
            raise


class KeptResponses:
    """What the routes ask. Owners are told of their own responses alone."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._runs: dict[tuple[str, str], BackgroundRun] = {}  # by owner and id

    async def start(self, owner: str, answers: Answers, form: ResponseForm) -> JsonObject:
        """Begin to compute a response in the background. Raises RequestError where it is refused at once."""
        if not await self.store.keep(form.record(form.response("queued"))):
            raise RequestError(400, "invalid_value", "background: the response cannot be stored.", param="background")
        run, place = BackgroundRun(answers, form), (owner, form.id)
        self._runs[place] = run
        run.task.add_done_callback(lambda task: self._ended(place, task))
        await asyncio.sleep(0)  # its first step enters the queue, or is refused there
        if run.task.done() and (error := run.task.exception()) is not None:
            await self.store.remove(owner, form.id)
            raise error
        return run.response()

    async def find(self, owner: str, name: str) -> JsonObject:
        """A response as it is now. Raises RequestError 404."""
        run = self._runs.get((owner, name))
        return await self.store.find(owner, name) if run is None else run.response()

    async def cancel(self, owner: str, name: str) -> JsonObject:
        """Ends what is computed in the background; one that has ended stays as it is. Raises RequestError."""
        run = self._runs.get((owner, name))
        if run is not None:
            run.cancelled = True
            run.task.cancel()
            await asyncio.wait([run.task])
        response = await self.store.find(owner, name)
        if not response["background"]:
            message = "Only a response with background: true can be cancelled; end others by leaving."
            raise RequestError(400, "invalid_value", message, param="response_id")
        return response

    async def remove(self, owner: str, name: str) -> None:
        """Removes a response, and ends its computation. Raises RequestError 404."""
        run = self._runs.get((owner, name))
        if run is not None:
            run.cancelled = True
            run.task.cancel()
            await asyncio.wait([run.task])
        await self.store.remove(owner, name)

    async def expire(self) -> None:
        """Removes what is too old, as long as the server runs."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            with contextlib.suppress(RequestError):  # which the log has
                await self.store.expire()

    def close(self) -> None:
        """No response is asked for or computed after this."""
        self.store.close()

    def _ended(self, place: tuple[str, str], task: "asyncio.Task[None]") -> None:
        del self._runs[place]
        if not task.cancelled():
            task.exception()  # it was kept, and logged where it is a bug of ours
