"""/v1/files: the files of batches, as OpenAI has them."""

import asyncio

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from roofline.common.errors import RequestError
from roofline.common.files import cause_of
from roofline.common.json_types import JsonObject
from roofline.server import context
from roofline.server.batches.files import StoredFile, page_of
from roofline.server.batches.upload import Upload
from roofline.server.batches.worker import Batches, owner_of
from roofline.server.body import invalid
from roofline.server.response import json_response
from roofline.server.scopes import USE, needs

router = APIRouter()
UPLOADS = frozenset({"/v1/files"})
MAX_PAGE = 10_000
ORDERS = ("asc", "desc")


def batches_of(request: Request) -> tuple[Batches, str]:
    """The server's batches, and whose of them the request may see. Raises RequestError where there are none."""
    batches: Batches | None = request.app.state.batches
    if batches is None:
        message = "This server keeps no files and no batches. Start it with --batch-folder FOLDER to have them."
        raise RequestError(501, "batches_off", message)
    return batches, owner_of(context.principal_of(request))


def query_of(request: Request, *names: str) -> dict[str, str]:
    """The parameters of the request's address. Raises RequestError for any that is not among `names`."""
    for name in request.query_params:
        if name not in names:
            raise RequestError(400, "unknown_parameter", f"Unknown parameter: {name[:100]}.", param=name[:100])
    return dict(request.query_params)


def size_of(query: dict[str, str], default: int, most: int) -> int:
    """The parameter `limit`. Raises RequestError."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise invalid("limit", f"is not a number from 1 to {most}")
    return int(text)


@router.post("/v1/files")
@needs(USE)
async def upload(request: Request) -> Response:
    """Store a file. The body, multipart/form-data with `file` and `purpose`, goes to disk as it arrives."""
    batches, owner = batches_of(request)
    try:
        with batches.files.receive(owner) as receiving:
            incoming = Upload(request.headers.get("content-type", ""), receiving)
            async for chunk in request.stream():
                await asyncio.to_thread(incoming.feed, chunk)
            file = await asyncio.to_thread(incoming.keep)
    except OSError as error:
        raise RequestError(507, "storage_failed", f"The file could not be stored: {cause_of(error)}.") from error
    return json_response(listed(file))


@router.get("/v1/files")
@needs(USE)
async def list_files(request: Request) -> Response:
    """The files of the key, the latest first; a page of them."""
    batches, owner = batches_of(request)
    query = query_of(request, "limit", "after", "order", "purpose")
    order, purpose = query.get("order", "desc"), query.get("purpose")
    if order not in ORDERS:
        raise invalid("order", "is neither asc nor desc")
    files = [file for file in batches.files.of(owner) if purpose in (None, file.purpose)]
    if order == "desc":
        files.reverse()
    page, more = page_of(files, lambda file: file.id, query.get("after"), size_of(query, MAX_PAGE, MAX_PAGE))
    return json_response(list_of([listed(file) for file in page], more))


@router.get("/v1/files/{file_id}")
@needs(USE)
async def get_file(file_id: str, request: Request) -> Response:
    """What is known of a file."""
    batches, owner = batches_of(request)
    return json_response(listed(batches.files.get(owner, file_id)))


@router.get("/v1/files/{file_id}/content")
@needs(USE)
async def get_content(file_id: str, request: Request) -> Response:
    """The bytes of a file."""
    batches, owner = batches_of(request)
    path = batches.files.path(batches.files.get(owner, file_id))
    return FileResponse(path, media_type="application/octet-stream", headers={"x-content-type-options": "nosniff"})


@router.delete("/v1/files/{file_id}")
@needs(USE)
async def delete_file(file_id: str, request: Request) -> Response:
    """Remove a file, unless a batch that has not ended reads it."""
    batches, owner = batches_of(request)
    file = batches.files.get(owner, file_id)
    readers = [batch.id for batch in batches.records.of(owner) if batch.input_file_id == file_id and not batch.ended]
    if readers:
        raise RequestError(409, "file_in_use", f"{readers[0]} reads the file. Cancel it, or wait for its end.")
    try:
        batches.files.delete(file)
    except OSError as error:
        raise RequestError(507, "storage_failed", f"The file could not be removed: {cause_of(error)}.") from error
    return json_response({"id": file_id, "object": "file", "deleted": True})


def listed(file: StoredFile) -> JsonObject:
    """OpenAI's object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def list_of(items: list[JsonObject], more: bool) -> JsonObject:
    """A page of a list, as OpenAI writes it."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": more}
