"""The application: routes, one error form, the gate around everything."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from roofline.common.errors import RequestError, RooflineError
from roofline.server import access_log
from roofline.server.admission import Queue
from roofline.server.batches.endpoints import endpoints_of
from roofline.server.batches.worker import Batches
from roofline.server.context import Context
from roofline.server.errors import error_form, from_exception
from roofline.server.gate import Gate
from roofline.server.model_choice import ModelChoice
from roofline.server.models import Models
from roofline.server.reading import BodyReading
from roofline.server.record import Recorder, RequestRecord
from roofline.server.routes import adapters, apis, document, page, status
from roofline.server.routes.apis import ERROR_FORMS
from roofline.server.routes.openai import batches, chat, completions, embeddings, files
from roofline.server.routes.responses.kept import KeptResponses
from roofline.server.routes.responses.store import ResponseStore
from roofline.server.scopes import PROBES, ScopeTable, unknown_route

# Of two that have a path and method, the first answers: the page before what else asks for `HEAD /`.
OPENAI = (chat.router, completions.router, embeddings.router, files.router, batches.router)
ROUTERS = (*OPENAI, page.router, *apis.ROUTERS, status.router, adapters.router, document.router)


def create_app(
    context: Context, spans: Callable[[RequestRecord], None] | None = None, models: Models | None = None
) -> FastAPI:
    """The ASGI application over `context`. spans: told of each request that has ended; models: further ones.

    Raises ConfigError for a file of kept responses, and for a folder of batches, that cannot be used."""
    kept = KeptResponses(ResponseStore(context.response_store, context.limits))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Batches that a server before this one did not end go on, and stop when this one ends."""
        expiring = asyncio.create_task(kept.expire())
        running: Batches | None = app.state.batches
        if running is not None:
            running.resume()
        yield
        expiring.cancel()
        if running is not None:
            await running.close()
        kept.close()

    app = FastAPI(
        title="Roofline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.responses = kept
    app.state.context, app.state.models = context, models or Models(context, (), 0)
    app.state.queue = Queue(context.limits, app.state.models.window)
    app.state.reading = BodyReading(context.limits.waiting_bytes)
    context.metrics.bind(context.name)
    routers = app.state.routers = [router for router in ROUTERS if context.page or router is not page.router]
    for router in routers:  # complete as they are, so every app has the same; to include a router makes each anew
        app.router.routes.extend(router.routes)
    app.state.batch_endpoints = endpoints_of(routers)
    app.state.scopes = ScopeTable(routers, PROBES if context.open_probes else ())
    folder, at_once = context.batch_folder, context.batch_at_once
    app.state.batches = None if folder is None else Batches(app, context, folder, at_once)
    app.add_exception_handler(RooflineError, _refuse)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    if models is not None:
        app.add_middleware(ModelChoice, models=models, error_forms=ERROR_FORMS, uploads=files.UPLOADS)
    app.add_middleware(Gate, context=context, error_forms=ERROR_FORMS, scopes=app.state.scopes, uploads=files.UPLOADS)

    def count(record: RequestRecord) -> None:
        if record.path not in access_log.PROBES:  # asked for while a server loads, and then answered with 503
            context.metrics.responded(record.status)

    listeners = (count, access_log.write if context.access_log else None, spans)
    sinks = [sink for sink in listeners if sink is not None]
    app.state.record_sinks = sinks
    app.add_middleware(Recorder, sinks=sinks)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    return from_exception(error, error_form(request.scope["path"], ERROR_FORMS))


async def _bad_request(request: Request, error: Exception) -> Response:
    return await _refuse(request, RequestError(400, "invalid_request", "The request could not be read."))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it handles no other"
    status = error.status_code
    method, path = request.method, request.scope["path"]
    problem = RequestError(status, "http_error", "The request could not be answered.")
    if status == 404:
        problem = unknown_route(method, path)
    elif status == 405:
        route = f"{method[:16]} {path[:200]}"
        problem = RequestError(405, "method_not_allowed", f"{route} is not a method of this route.")
    response = await _refuse(request, problem)
    if status == 405 and error.headers:
        response.headers.update(error.headers)
    return response
