"""Uploads: bodies of multipart/form-data, whose file goes to the disk as it comes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from jaxshare.serving.http.batches.file_store import INPUT, StoredFile, Upload
from jaxshare.serving.http.errors import ApiError, bad_request

_MOST_PARTS = 16
_MOST_FIELD = 1024
_SLOWEST = 16 * 1024
"""The fewest bytes a second of an upload, once it has had `seconds`."""


class _UploadForm:
    """A form while it is read: its fields, and its file, which goes to an upload."""

    def __init__(self, begin: Callable[[], Upload]):
        self._begin, self.upload = begin, None
        self.fields: dict[str, bytes] = {}
        self.filename = "upload"
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._field: str | None = None
        self._is_file, self._parts = False, 0

    def callbacks(self) -> Any:
        """Returns what the parser calls."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, a, b: self._add("_header", data[a:b]),
            "on_header_value": lambda data, a, b: self._add("_value", data[a:b]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open_part,
            "on_part_data": lambda data, a, b: self._write(data[a:b]),
        }

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise bad_request(f"the form has more than {_MOST_PARTS} parts")
        self._headers = {}

    def _add(self, name: str, data: bytes) -> None:
        setattr(self, name, getattr(self, name) + data)

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _open_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file, self._field = name == "file", name
        if not self._is_file:
            return
        if self.upload is not None:
            raise bad_request("file is given more than once", "file")
        self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")
        self.upload = self._begin()

    def _write(self, data: bytes) -> None:
        if self._is_file:
            assert self.upload is not None
            return self.upload.write(data)
        assert self._field is not None
        value = self.fields.get(self._field, b"") + data
        if len(value) > _MOST_FIELD:
            raise bad_request(f"{self._field[:64]} is longer than {_MOST_FIELD} bytes")
        self.fields[self._field] = value


async def read_upload(
    parts: AsyncIterator[bytes],
    content_type: str,
    begin: Callable[[], Upload],
    *,
    owner: str,
    max_bytes: int,
    seconds: float,
) -> StoredFile:
    """Reads a form with a file, and keeps the file.

    Args:
      parts: of the body.
      content_type: of the request.
      begin: begins the file.
      owner: the hash of the key of the request.
      max_bytes: of the body.
      seconds: that the body may take, and beyond them as many as it needs at 16 KiB a second.

    Raises:
      ApiError: it is no such form, too large, or too slow; nothing of it is kept.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise bad_request("the body is no multipart/form-data with a file")
    form = _UploadForm(begin)
    try:
        parser, size, started = MultipartParser(boundary, form.callbacks()), 0, time.monotonic()
        async for part in parts:
            size += len(part)
            if size > max_bytes:
                raise ApiError(
                    413,
                    f"the upload has more than {max_bytes} bytes; split it, or start the server "
                    "with a larger --max-upload",
                    code="body_too_large",
                    headers={"Connection": "close"},
                )
            if time.monotonic() - started > seconds + size / _SLOWEST:
                raise ApiError(408, "the upload is too slow", code="timeout")
            await asyncio.to_thread(parser.write, part)  # the disk may be slow
        parser.finalize()
        if form.upload is None:
            raise bad_request("file is missing", "file")
        purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != INPUT:
            raise bad_request(
                f"purpose is {purpose[:64]!r}; the server keeps files for {INPUT!r}", "purpose"
            )
        return await asyncio.to_thread(form.upload.complete, form.filename, purpose, owner)
    except FormParserError as error:
        raise bad_request("the body is no multipart/form-data that can be read") from error
    finally:
        if form.upload is not None:
            form.upload.abandon()
