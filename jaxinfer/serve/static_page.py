"""The page at `/`: static files of the package, which call the server's API from the browser."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import Response

SCRIPTS = (
    *("answers.js", "api.js", "conversation.js", "dom.js", "history.js", "live.js", "markdown.js", "page.js"),
    *("pane.js", "receiver.js", "settings.js", "store.js", "tokens.js"),
)
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(SCRIPTS, "text/javascript; charset=utf-8"),
}
PATHS = {"/": "index.html"} | {f"/page/{name}": name for name in MEDIA_TYPES if name != "index.html"}
HEADERS = {
    "Cache-Control": "no-cache",  # the browser asks each time whether its copy is that of this version
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI) -> None:
    """Adds the routes of the page's files, which are not part of the API's document."""
    folder = resources.files("jaxinfer.serve") / "page"
    for path, name in PATHS.items():
        body = (folder / name).read_bytes()
        tag = f'"{sha256(body).hexdigest()[:32]}"'
        answer = partial(_answer, body, MEDIA_TYPES[name], tag)
        app.add_route(path, answer, methods=["GET"], include_in_schema=False)


async def _answer(body: bytes, media_type: str, tag: str, request: Request) -> Response:
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
