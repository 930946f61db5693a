"""Where a chunked body and its trailers end, so that trailers are read without what their names would mean."""

import re

from roofline.common.errors import RequestError

_SIZE = re.compile(rb"[0-9A-Fa-f]+")
_LAST = b"\r\n"
_MEANS_NOTHING = b"x-"  # before a name: the field is checked as any other, and says nothing about the message


class ChunkedFraming:
    """Follows a chunked body (RFC 9112, 7.1) beside the parser, which judges its form.

    A parser of messages also obeys fields in trailers, such as Content-Length and Connection, which there mean nothing
    (RFC 9110, 6.5.1): it is given each of them under another name.

    most_bytes: of the line before a chunk, and of all trailers; limit_bytes: what errors call that.
    """

    def __init__(self, most_bytes: int, limit_bytes: int) -> None:
        self._most_bytes, self._limit_bytes = most_bytes, limit_bytes
        self._line = b""  # that has begun
        self._chunk_bytes = 0  # until the next line: those of the chunk that has begun, and its line end
        self._trailing = False
        self._trailer_bytes = 0

    def part(self, data: bytes, at: int) -> tuple[int, bytes]:
        """Where the part of `data` that begins at `at` ends, and what the parser is given in its place. Raises
        RequestError for what is too large."""
        if self._trailing:
            return self._trailer(data, at)
        begin = at
        while at < len(data) and not self._trailing:
            if self._chunk_bytes:
                size = min(self._chunk_bytes, len(data) - at)
                self._chunk_bytes -= size
                at += size
            else:
                at = self._chunk_line(data, at)
        return at, data[begin:at]

    def _chunk_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at) + 1 or len(data)
        self._line += data[at:end]
        if len(self._line) > self._most_bytes:
            raise _too_large("extensions of a chunk", self._limit_bytes)
        if self._line.endswith(b"\n"):
            size = _SIZE.match(self._line)
            self._line = b""
            if size is not None and int(size[0], 16):
                self._chunk_bytes = int(size[0], 16) + len(_LAST)
            else:  # the last chunk, or a line that the parser refuses
                self._trailing = True
        return end

    def _trailer(self, data: bytes, at: int) -> tuple[int, bytes]:
        end = data.find(b"\n", at) + 1 or len(data)
        self._line += data[at:end]
        self._trailer_bytes += end - at
        if self._trailer_bytes > self._most_bytes:
            raise _too_large("trailers", self._limit_bytes)
        if not self._line.endswith(b"\n"):
            return end, b""
        line, self._line = self._line, b""
        if line == _LAST:
            return end, line
        if line.startswith(b":"):
            raise RequestError(400, "invalid_http", "A trailer has no name.")
        return end, _MEANS_NOTHING + line


def _too_large(what: str, limit_bytes: int) -> RequestError:
    return RequestError(431, "headers_too_large", f"The {what} are larger than {limit_bytes} bytes.")
