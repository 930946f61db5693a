"""/v1/batches: files of requests, answered in idle time, as OpenAI has them."""

import re

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.files import cause_of
from roofline.common.json_types import JsonObject
from roofline.server.batches.files import page_of
from roofline.server.batches.upload import PURPOSE
from roofline.server.body import Body, count_within, fields_of, invalid, refuse_unsupported, typed
from roofline.server.context import Context
from roofline.server.limits import Limits
from roofline.server.respond import on_thread_if_large
from roofline.server.response import json_response
from roofline.server.routes.openai.files import batches_of, list_of, query_of, size_of
from roofline.server.scopes import USE, needs

router = APIRouter()
PAGE, MAX_PAGE = 20, 100
HOURS = re.compile(r"([1-9][0-9]{0,4})h")
NEUTRAL: dict[str, tuple[object, ...]] = {"output_expires_after": (None,)}
INSTEAD = {"output_expires_after": "Files stay until they are deleted"}


class BatchBody(Body):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


@router.post("/v1/batches")
@needs(USE, BatchBody)
async def create_batch(request: Request) -> Response:
    """Have the requests of a file answered."""
    body, hours = await on_thread_if_large(request, await request.body(), _read)
    batches, owner = batches_of(request)
    offered = request.app.state.batch_endpoints
    if body.endpoint not in offered:
        raise invalid("endpoint", f"{body.endpoint[:100]!r} is not one of {', '.join(offered)}")
    file = batches.files.get(owner, body.input_file_id, "input_file_id")
    if file.purpose != PURPOSE:
        raise invalid("input_file_id", f"the file has the purpose {file.purpose!r}, not {PURPOSE!r}")
    try:
        batch = batches.records.create(owner, body.endpoint, file.id, hours, body.metadata)
    except OSError as error:
        raise RequestError(507, "storage_failed", f"The batch could not be stored: {cause_of(error)}.") from error
    batches.wake(owner)
    return json_response(batch.listed())


@router.get("/v1/batches")
@needs(USE)
async def list_batches(request: Request) -> Response:
    """The batches of the key, the latest first; a page of them."""
    batches, owner = batches_of(request)
    query = query_of(request, "limit", "after")
    latest = batches.records.of(owner)[::-1]
    page, more = page_of(latest, lambda batch: batch.id, query.get("after"), size_of(query, PAGE, MAX_PAGE))
    return json_response(list_of([batch.listed() for batch in page], more))


@router.get("/v1/batches/{batch_id}")
@needs(USE)
async def get_batch(batch_id: str, request: Request) -> Response:
    """How far a batch is."""
    batches, owner = batches_of(request)
    return json_response(batches.records.get(owner, batch_id).listed())


@router.post("/v1/batches/{batch_id}/cancel")
@needs(USE)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """End a batch. What was answered of it becomes its files."""
    await request.body()  # within its bounds, though nothing is asked for in it
    batches, owner = batches_of(request)
    batch = batches.records.get(owner, batch_id)
    try:
        batches.cancel(batch)
    except OSError as error:
        message = f"That the batch is cancelled could not be stored, so it goes on: {cause_of(error)}. Try again."
        raise RequestError(507, "storage_failed", message) from error
    return json_response(batch.listed())


def _read(raw: bytes, context: Context) -> tuple[BatchBody, int]:
    """The body, and the hours of its window."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    body = typed(BatchBody, fields)
    hours, most = HOURS.fullmatch(body.completion_window), context.limits.batch_hours
    if hours is None or int(hours[1]) > most:
        raise invalid("completion_window", f"is not a number of hours from 1h to {most}h, such as 24h")
    _check_metadata(body.metadata or {}, context.limits)
    return body, int(hours[1])


def _check_metadata(metadata: JsonObject, limits: Limits) -> None:
    count_within("metadata", len(metadata), 0, limits.metadata_pairs)
    for name, value in metadata.items():
        if len(name) > limits.metadata_name_characters or len(value) > limits.metadata_value_characters:
            sizes = f"{limits.metadata_name_characters} characters, and values {limits.metadata_value_characters}"
            raise invalid("metadata", f"names may have at most {sizes}")
