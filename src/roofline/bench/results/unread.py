"""Clients of a load that did not read their answers: how many there were, and how their connections ended."""

from collections import Counter

from roofline.bench.load.events import EventsHead
from roofline.bench.results.point import Point, UnreadCounts


def unread_counts(head: EventsHead) -> UnreadCounts | None:
    """Those of a run, None of one that was planned without."""
    if not head.unread_share:
        return None
    ends = Counter("failed" if client.error is not None else client.closed_by for client in head.unread)
    return UnreadCounts(
        share=head.unread_share,
        clients=len(head.unread),
        closed_by_server=ends["server"],
        closed_by_client=ends["client"],
        answered=ends["answer"],
        failed=ends["failed"],
    )


def unread_in_words(counts: UnreadCounts) -> str:
    """ "12 clients beside them did not read: 10 closed by the server, 2 by the client"."""
    ends = {
        "closed by the server": counts.closed_by_server,
        "closed by the client": counts.closed_by_client,
        "answered at once": counts.answered,
        "failed": counts.failed,
    }
    how = ", ".join(f"{count} {name}" for name, count in ends.items() if count)
    clients = f"{counts.clients} client{'s' * (counts.clients != 1)}"
    return f"{clients} beside them did not read" + (f": {how}" if how else "")


def unread_share(point: Point) -> float:
    """The share of a point's requests that such a client came with."""
    return 0.0 if point.unread is None else point.unread.share
