"""Calls of tools in a history, each of which has one result."""

from roofline.server.body import invalid


class UnansweredCalls:
    """The calls of a history so far, and which of them have no result yet.

    Ids may come again in later turns, as some servers count them anew: a result is that of the oldest call of its id
    that has none.

    Args:
        result: what the API calls a result and its id, for errors.
    """

    def __init__(self, result: str) -> None:
        self._result = result
        self._waiting: dict[str, list[str]] = {}  # the fields of calls without a result, by id
        self._cut = set[str]()  # fields of calls that need none

    def call(self, call_id: str, field: str, *, cut: bool = False) -> None:
        """A call comes. cut: it was cut off or is broken, so nobody can have executed it."""
        self._waiting.setdefault(call_id, []).append(field)
        self._cut |= {field} if cut else set()

    def answer(self, call_id: str, field: str) -> None:
        """A result comes. Raises RequestError where no call waits for it."""
        if call_id not in self._waiting:
            raise invalid(field, f"{call_id!r} names no call of an earlier message")
        if not self._waiting[call_id]:
            raise invalid(field, f"the call {call_id!r} has a result already; give one for each call")
        self._waiting[call_id].pop(0)

    def check(self) -> None:
        """Raises RequestError for a call without a result."""
        for call_id, fields in self._waiting.items():
            for field in (each for each in fields if each not in self._cut):
                raise invalid(field, f"the call {call_id!r} has no result; {self._result} must follow it")
