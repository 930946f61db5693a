"""Events of requests as tests write them down: moments in milliseconds."""

from roofline.bench.load.events import Events, EventsHead, RequestEvents

MS = 1_000_000


def request(at, first, gap=10.0, tokens=4, *, parts=None, scheduled=None, number=0, **fields):
    """A completed request: sent at `at`, its first part `first` later, then one every `gap`; it ends at the last."""
    parts = tokens if parts is None else parts
    chunks = [round((at + first + gap * part) * MS) for part in range(parts)]
    values = {
        "request": number,
        "scheduled": round((at if scheduled is None else scheduled) * MS),
        "dispatched": round(at * MS),
        "first_byte": chunks[0],
        "first_text": chunks[0],
        "chunks": chunks,
        "characters": [1] * parts,
        "end": chunks[-1],
        "prompt_tokens": 7,
        "completion_tokens": tokens,
        "status": 200,
    }
    return RequestEvents(**{**values, **fields})


def run(requests, begin=0.0, end=None, **fields):
    """A run of these requests whose window is `begin` to `end`, or to the last end."""
    last = max(each.end or 0 for each in requests) if end is None else round(end * MS)
    values = {"traffic": "t", "traffic_sha256": "0", "arrivals": "closed", "target": "x", "started": "now"}
    return Events(EventsHead(**{**values, "begin": round(begin * MS), "end": last, **fields}), list(requests))
