"""Routes of the page: the files of this folder as they are, which may load nothing but each other.

Nothing here is an answer about the engine: the scripts ask the routes that every client has.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_KINDS = {  # by the ending of a name; other files of the folder are not served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'"),
    *("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    *("require-trusted-types-for 'script'", "trusted-types 'none'"),  # no text becomes HTML
)
_HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",  # frame-ancestors, for browsers that do not know it
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked each time, sent when it is another one
}


def page_routes() -> list[Route]:
    """Return `/`, and `/page/NAME` of each other file; the files are read now and never again."""
    paths = sorted(Path(__file__).parent.iterdir())
    return [_route(path) for path in paths if path.suffix in _KINDS]


def _route(path: Path) -> Route:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "content-type": _KINDS[path.suffix], "etag": etag}

    async def send(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return Route("/" if path.name == "index.html" else f"/page/{path.name}", send)
