"""What servers of these tests answer, as bytes."""

import json

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def part(text, **more):
    """A chunk of HTTP with an event of a completion."""
    return piece(b"data: " + json.dumps({"choices": [{"index": 0, "text": text, **more}]}).encode() + b"\n\n")


def end(tokens=3):
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    data = json.dumps({"choices": [], "usage": usage}).encode()
    return piece(b"data: " + data + b"\n\ndata: [DONE]\n\n") + piece(b"")


def piece(data):
    return b"%x\r\n%s\r\n" % (len(data), data)
