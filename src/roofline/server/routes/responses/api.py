"""POST /v1/responses; GET, DELETE /v1/responses/ID; GET /v1/responses/ID/input_items; POST /v1/responses/ID/cancel"""

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server import context
from roofline.server.answers import Answers
from roofline.server.body import invalid, within
from roofline.server.context import Context
from roofline.server.respond import answers_to, on_thread_if_large, respond_to
from roofline.server.response import json_response
from roofline.server.routes.responses import read
from roofline.server.routes.responses.form import ResponseForm
from roofline.server.routes.responses.kept import KeptResponses
from roofline.server.routes.responses.read import ResponseGeneration
from roofline.server.routes.responses.schema import ResponseBody
from roofline.server.scopes import USE, needs

router = APIRouter()
DEFAULT_ITEMS, MOST_ITEMS = 20, 100  # of a list


@router.post("/v1/responses")
@needs(USE, ResponseBody)
async def create_response(request: Request) -> Response:
    """Answer a conversation, and keep the answer. Body, answer and events are OpenAI's."""
    kept, owner, raw = _kept(request), _owner(request), await request.body()
    body = await on_thread_if_large(request, raw, read.body_of)
    if not kept.store.keeps and (body.store or body.background or body.previous_response_id):
        field = "store" if body.store else "background" if body.background else "previous_response_id"
        message = f"{field}: this server stores no responses (--max-stored-responses 0)."
        raise RequestError(400, "unsupported_parameter", message, param=field)
    previous = body.previous_response_id
    history = [] if previous is None else await kept.store.history(owner, previous)

    def generation_of(_: bytes, served: Context) -> ResponseGeneration:
        return read.generation_of(body, history, served)

    generation = await on_thread_if_large(request, raw, generation_of, sum(map(len, history)))

    def form_of(answers: Answers) -> ResponseForm:
        return ResponseForm(answers, kept.store, owner)

    if not generation.background:
        return respond_to(request, generation, form_of)
    answers = answers_to(request, generation)
    return json_response(await kept.start(owner, answers, form_of(answers)))


@router.get("/v1/responses/{name}")
@needs(USE)
async def get_response(name: str, request: Request) -> Response:
    """A stored response, or one that is computed in the background, as it is now."""
    _refuse(request, "stream", ("false",), "is not supported for a stored response")
    _refuse(request, "starting_after", (), "is not supported for a stored response")
    _refuse(request, "include", (), "is not supported")
    _refuse(request, "include[]", (), "is not supported")
    return json_response(await _kept(request).find(_owner(request), name))


@router.delete("/v1/responses/{name}")
@needs(USE)
async def delete_response(name: str, request: Request) -> Response:
    """Remove a response; what goes on from it cannot be gone on from any more."""
    await _kept(request).remove(_owner(request), name)
    return json_response({"id": name, "object": "response", "deleted": True})


@router.post("/v1/responses/{name}/cancel")
@needs(USE)
async def cancel_response(name: str, request: Request) -> Response:
    """End what is computed in the background."""
    await request.body()  # within its bounds, though nothing is asked for in it
    return json_response(await _kept(request).cancel(_owner(request), name))


@router.get("/v1/responses/{name}/input_items")
@needs(USE)
async def list_input_items(name: str, request: Request) -> Response:
    """The items of the request that a response answers, the latest first; those before it are its predecessors'."""
    _refuse(request, "include", (), "is not supported")
    _refuse(request, "include[]", (), "is not supported")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    text = request.query_params.get("limit", str(DEFAULT_ITEMS))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise invalid("limit", "is not a number")
    within("limit", int(text), 1, MOST_ITEMS)
    items = await _kept(request).store.find_input(_owner(request), name)
    if order == "desc":
        items.reverse()
    return json_response(_page(items, request.query_params.get("after"), int(text)))


def _page(items: list[JsonObject], after: str | None, most: int) -> JsonObject:
    """So many items after one. Raises RequestError where that is none of them."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid("after", "is the id of no item")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + most]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": start + most < len(items)}


def _refuse(request: Request, name: str, neutral: tuple[str, ...], problem: str) -> None:
    """Raises RequestError for a parameter of the address at a value that asks for something."""
    value = request.query_params.get(name)
    if value is not None and value not in neutral:
        raise RequestError(400, "unsupported_parameter", f"{name.rstrip('[]')} {problem}.", param=name.rstrip("[]"))


def _kept(request: Request) -> KeptResponses:
    return request.app.state.responses


def _owner(request: Request) -> str:
    """Whose responses a request may see: its key's, also where the key gets another name."""
    principal = context.principal_of(request)
    return principal.salt or principal.name
