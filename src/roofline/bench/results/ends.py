"""How the requests of a run ended that are in no latency, as a sentence."""

from collections import Counter

from roofline.bench.load.events import Events
from roofline.bench.results.window import measured

CANCELLED = "cancelled"  # the error of a request that its client gave up
LONGEST = 120  # characters of an error


def ends_in_words(events: Events) -> str:
    """Of the requests that did not complete: how many failed, and with what most of them, were cancelled, were under
    way when the run ended, or had an answer without text; "" where all completed."""
    requests = measured(events)
    errors = Counter(each.error for each in requests if each.error is not None)
    cancelled = errors.pop(CANCELLED, 0)
    empty = sum(each.empty for each in requests)
    failed = errors.total()
    completed = sum(each.completed for each in requests)
    parts = []
    if failed:
        error, count = errors.most_common(1)[0]
        shown = str(error) if len(str(error)) <= LONGEST else f"{str(error)[:LONGEST]} ..."
        parts.append(f"{failed} failed ({count} with: {shown})")
    if cancelled:
        parts.append(f"{cancelled} cancelled")
    if empty:
        parts.append(f"{empty} without text in the answer")
    if unfinished := len(requests) - completed - failed - cancelled - empty:
        parts.append(f"{unfinished} under way when the run ended")
    return f"Of {len(requests)} requests {completed} completed: {', '.join(parts)}." if parts else ""
