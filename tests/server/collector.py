"""A collector of OpenTelemetry on this machine, for tests."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer


class Collector:
    """What was sent to it: (path, body) of each message; `address` is where it listens."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.messages: list[tuple[str, bytes]] = []

    def spans(self) -> list:
        """All spans, each with the attributes of its resource."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans = []
        for _, body in self.messages:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {each.key: each.value.string_value for each in group.resource.attributes}
                spans += [(span, resource) for scope in group.scope_spans for span in scope.spans]
        return spans


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            collector.messages.append((self.path, body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
