"""The body of an upload, multipart/form-data, in pieces as it arrives: the file goes to disk, its purpose is kept."""

from roofline.common.errors import RequestError
from roofline.server.batches.files import Receiving, StoredFile

FIELDS = ("file", "purpose")
PURPOSE = "batch"
FIELD_BYTES = 1024  # of a part that is no file


class Upload:
    """Reads the two parts of an upload, in any order.

    content_type: of the request. Raises RequestError, here and in its methods, for what is no upload.
    """

    def __init__(self, content_type: str, receiving: Receiving) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind.lower() != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
            raise RequestError(415, "unsupported_media_type", "The content type must be multipart/form-data.")
        self._receiving = receiving
        self._filename: str | None = None
        self._values: dict[str, bytearray] = {}
        self._seen: set[str] = set()
        self._part = ""
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, begin, end: self._header[0].extend(data[begin:end]),
                "on_header_value": lambda data, begin, end: self._header[1].extend(data[begin:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """The next bytes of the body. Raises OSError too."""
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestError(400, "invalid_upload", "The body is not multipart/form-data.") from error

    def keep(self) -> StoredFile:
        """The file, once the body has ended. Raises OSError too."""
        if not self._complete:
            raise RequestError(400, "invalid_upload", "The body ends before its last boundary.")
        for name in FIELDS:
            if name not in self._seen:
                raise RequestError(400, "missing_parameter", f"{name} is missing.", param=name)
        purpose = self._values["purpose"].decode("utf-8", "replace")
        if purpose != PURPOSE:
            message = f"purpose: {purpose[:50]!r} is not supported; files are for batches: give {PURPOSE!r}."
            raise RequestError(400, "invalid_value", message, param="purpose")
        return self._receiving.keep(self._filename or "upload", PURPOSE)

    def _begin(self) -> None:
        self._part, self._disposition = "", b""

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._header = (bytearray(), bytearray())
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")[:100]
        if name not in FIELDS:
            raise RequestError(400, "unknown_parameter", f"Unknown field: {name}.", param=name)
        if name in self._seen:
            raise RequestError(400, "invalid_value", f"{name}: is there twice.", param=name)
        self._seen.add(name)
        self._part = name
        if name == "file":
            self._filename = options.get(b"filename", b"").decode("utf-8", "replace")
        else:
            self._values[name] = bytearray()

    def _add(self, data: bytes, begin: int, end: int) -> None:
        if self._part == "file":
            self._receiving.write(data[begin:end])
            return
        value = self._values[self._part]
        value += data[begin:end]
        if len(value) > FIELD_BYTES:
            raise RequestError(400, "invalid_value", f"{self._part}: is longer than {FIELD_BYTES} bytes.")

    def _end(self) -> None:
        self._complete = True
