"""The application: routes, one error form, the gate around everything."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from roofline.common.errors import RequestError, RooflineError
from roofline.server.answers import Queue
from roofline.server.context import Context
from roofline.server.errors import from_exception
from roofline.server.gate import Gate
from roofline.server.routes import chat, completions, status

CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(context: Context) -> FastAPI:
    """The ASGI application over `context`."""
    app = FastAPI(title="Roofline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.context, app.state.queue = context, Queue()
    context.metrics.bind(context.name)
    for room in (chat, completions, status):
        app.include_router(room.router)
    app.add_exception_handler(RooflineError, _refuse)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Gate, context=context)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    return from_exception(error)


async def _bad_request(_: Request, error: Exception) -> Response:
    return from_exception(RequestError(400, "invalid_request", "The request could not be read."))


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    route = f"{request.method[:16]} {request.url.path[:200]}"
    message = {404: f"There is no route {route}.", 405: f"{route} is not a method of this route."}.get(
        status, "The request could not be answered."
    )
    response = from_exception(RequestError(status, CODES.get(status, "http_error"), message))
    if status == 405 and isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
