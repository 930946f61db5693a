"""What a replica tells of itself: requests and tokens, from its /stats."""

import http.client
import json
import time
from dataclasses import asdict, dataclass

from roofline.common.json_types import JsonObject

ASK_SECONDS = 2.0
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ReplicaFigures:
    """A reading.

    waiting: requests without their first token; oldest_seconds: that the one which came first of these has waited,
    0 where none waits; held: those that the engine computes nothing of yet; served: requests that have ended; tokens:
    that were generated; tokens_per_second: since the reading before; moment: of this machine's monotonic clock.
    """

    running: int
    waiting: int
    served: int
    tokens: int
    tokens_per_second: float
    moment: float
    oldest_seconds: float = 0.0
    held: int = 0

    def to_json(self) -> JsonObject:
        """Return the figures as JSON has them."""
        return {name: value for name, value in asdict(self).items() if name != "moment"}


def read_figures(host: str, port: int, key: str | None, before: ReplicaFigures | None) -> ReplicaFigures | None:
    """Ask a replica; None where it does not answer in time, or not as servers of ours do."""
    connection = http.client.HTTPConnection(host, port, timeout=ASK_SECONDS)
    headers = {"Host": "localhost"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        connection.request("GET", "/stats", headers=headers)
        answer = connection.getresponse()
        content = json.loads(answer.read(MAX_ANSWER_BYTES)) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return _figures(content, before) if isinstance(content, dict) else None


def _figures(content: JsonObject, before: ReplicaFigures | None) -> ReplicaFigures | None:
    engine, queued = content.get("engine"), content.get("queued")
    if not isinstance(engine, dict) or not isinstance(queued, int):
        return None
    running, tokens, finished = (engine.get(name) for name in ("running", "generated_tokens", "finished"))
    if not isinstance(running, int) or not isinstance(tokens, int) or not isinstance(finished, dict):
        return None
    oldest, held, behind = content.get("oldest_waiting_seconds", 0.0), content.get("held", 0), engine.get("waiting", 0)
    if not isinstance(oldest, int | float) or not isinstance(held, int) or not isinstance(behind, int):
        return None
    now, rate = time.monotonic(), 0.0
    if before is not None and now > before.moment and tokens >= before.tokens:  # fewer: it was started again
        rate = (tokens - before.tokens) / (now - before.moment)
    return ReplicaFigures(
        running=running,
        waiting=queued,
        served=sum(count for count in finished.values() if isinstance(count, int)),
        tokens=tokens,
        tokens_per_second=round(rate, 1),
        moment=now,
        oldest_seconds=float(oldest),
        held=held + behind,
    )
