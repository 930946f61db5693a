"""One line of the log for each request: who asked for what, how much it was, and how long it took."""

import json
import logging

from roofline.common import log
from roofline.server.record import RequestRecord

LOG = log.get("access")
PROBES = frozenset({"/health", "/ready", "/metrics", "/stats"})  # asked for every few seconds, so only shown by DEBUG


def show() -> None:
    """Have the lines shown whatever the level of other lines is."""
    LOG.setLevel(min(logging.INFO, logging.getLogger("roofline").level or logging.INFO))


def write(record: RequestRecord) -> None:
    """Write the line of a request that has ended: `name=value` pairs, in which no text of a client can add a line."""
    LOG.log(logging.DEBUG if is_probe(record) else logging.INFO, "%s", line(record))


def is_probe(record: RequestRecord) -> bool:
    """Whether it is one of many that say the same."""
    return record.path in PROBES and record.method == "GET" and record.status == 200


def line(record: RequestRecord) -> str:
    """'id=7f method=POST path="/v1/completions" status=200 ...'; seconds to the microsecond."""
    parts = {
        "id": record.id,
        "method": record.method if record.method.isalpha() else json.dumps(record.method[:16]),
        "path": json.dumps(record.path[:200]),
        "status": record.status,
        "seconds": f"{record.seconds:.6f}",
    }
    if not record.complete:
        parts["complete"] = "false"
    if record.principal is not None:
        parts["key"] = record.principal
    if record.answers is not None:
        usage, first = record.answers.usage(), record.answers.first_token_seconds
        parts["answer"] = record.answers.id
        parts |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        if first is not None:
            parts["first_token"] = f"{first:.6f}"
    return " ".join(f"{name}={value}" for name, value in parts.items())
