"""GET /: the page, whose files are in the package and load nothing from elsewhere."""

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from jaxshare.serving.http.errors import ApiError

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter()


def _read_files() -> dict[str, tuple[bytes, str]]:
    """The content of each file of the page, and its kind."""
    folder = resources.files("jaxshare.serving.http") / "page"
    return {
        file.name: (file.read_bytes(), _KINDS[file.name.rpartition(".")[2]])
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _KINDS
    }


# All of them are read at the start, so that no path of a request touches the disk.
_FILES = _read_files()


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """Gives the page."""
    return _answer("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    """Gives a file of the page."""
    if name not in _FILES:
        raise ApiError(404, "the page has no such file")
    return _answer(name)


def _answer(name: str) -> Response:
    content, kind = _FILES[name]
    return Response(content, headers={**_HEADERS, "Content-Type": kind})
