"""GET /: the chat page. GET /page/NAME: its scripts and styles, which are a fixed list of files of the package."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.server import context
from roofline.server.scopes import OPEN, needs

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
SCRIPTS = (
    "answer.js",
    "api.js",
    "app.js",
    "attachments.js",
    "chat.js",
    "composer.js",
    "dom.js",
    "inline.js",
    "key.js",
    "markdown.js",
    "message.js",
    "model.js",
    "render.js",
    "settings.js",
    "sidebar.js",
    "store.js",
    "strip.js",
    "theme.js",
    "thread.js",
    "transfer.js",
    "tree.js",
)
FILES = frozenset({INDEX, "style.css", "icon.svg", *SCRIPTS})
# The page runs its own scripts and talks to its own server; nothing else, whatever a model writes into it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",  # asked for each time, and answered with 304 while the tag is the same
}

router = APIRouter()


@router.api_route("/", methods=["GET", "HEAD"])
@needs(OPEN)
async def page(request: Request) -> Response:
    """The chat page. It holds no secret, so it needs no key; it asks for one when the API does."""
    return _file(request, INDEX)


@router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
@needs(OPEN)
async def part(name: str, request: Request) -> Response:
    """A script or style of the page."""
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    if not context.of(request).page or name not in FILES:
        raise RequestError(404, "not_found", f"There is no route {request.method[:16]} {request.url.path[:200]}.")
    path = FOLDER / name
    content = path.read_bytes()  # a few kilobytes that the system has in memory
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if _matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[path.suffix])


def _matches(condition: str, tag: str) -> bool:
    """Whether an If-None-Match header names the tag; proxies mark tags as weak (`W/`) when they compress."""
    names = [name.strip().removeprefix("W/") for name in condition.split(",")]
    return tag in names or names == ["*"]
