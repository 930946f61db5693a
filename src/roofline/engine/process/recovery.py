"""The open requests of an engine process, and how a fresh process goes on with them after it died.

The noise of sampling depends on seed, answer, position and id alone, and what is computed of a sequence not on what
else is in its steps. So a process that is sent a prompt, its parameters, the seed and the ids so far gives the ids that
the dead one would have given next. (Where the engine is not exact, as `Ready.exact` says, it still gives an answer that
goes on from the ids that were sent, though perhaps not the one that the dead process would have given.)

A request may be what kills processes, and must not do so for ever. Each death counts against all requests that the
process had been sent, until one process has given CLEARING_IDS ids of theirs. Those with MAX_DEATHS are suspects: fresh
processes get half of them, with nothing else, and half of these after each death, until what kills is alone. A group of
suspects that is cleared is followed by as many others, and the last one by everybody else. A request that was alone in
MAX_DEATHS deaths ends with an error. Processes that others kill meanwhile cost time and no answer.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from roofline.engine.events import Event, FinishReason, Usage
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import Submit
from roofline.engine.process.stream import EventStream

MAX_DEATHS = 3  # of processes in a row that did not clear a request: a suspect; as many where it was alone: the culprit
# A request may kill each process only with its second step there, or its third: one id is not enough to clear it.
CLEARING_IDS = 4


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended, with all that a process needs to compute it from where it is.

    params: with a seed and `max_tokens`; answers: the ids so far of each answer that has not ended; scored: how many of
    its prompt's log-probabilities have come; aborted: answers of which the process was told so.
    """

    prompt: "array[int]"
    params: SamplingParams
    eos_ids: list[int]
    salt: str
    stream: EventStream
    adapter: str = ""
    priority: int = 0
    answers: "dict[int, array[int]]" = field(init=False)
    scored: int = 0
    aborted: set[int] = field(default_factory=set)
    sent: bool = False  # to the present process
    fresh_ids: int = 0  # that the present process has given
    deaths: int = 0  # of processes that it was sent to, since it was cleared
    alone: int = 0  # those among them that had no other request

    def __post_init__(self) -> None:
        self.answers = {index: array("i") for index in range(self.params.n)}

    @property
    def message(self) -> Submit:
        """What a process is sent."""
        answers = {index: ids.tolist() for index, ids in self.answers.items()}
        prompt = self.prompt.tolist()
        request_id, params, eos_ids, salt = self.stream.request_id, self.params, self.eos_ids, self.salt
        return Submit(
            request_id=request_id,
            ids=prompt,
            params=params,
            eos_ids=eos_ids,
            salt=salt,
            answers=answers,
            scored=self.scored,
            adapter=self.adapter,
            priority=self.priority,
        )

    def take(self, event: Event) -> None:
        """An event of one of its answers."""
        self.answers[event.index].extend(event.ids)
        self.fresh_ids += len(event.ids)
        if self.fresh_ids >= CLEARING_IDS:
            self.deaths = self.alone = 0
        self.scored += len(event.prompt_logprobs or ())
        if event.finish_reason is not None:
            del self.answers[event.index]
        self.stream.deliver(event)

    def end(self, indexes: Iterable[int], reason: FinishReason, error: str | None = None) -> None:
        """End answers that no process computes."""
        for index in sorted(set(indexes) & self.answers.keys()):
            usage = Usage(len(self.prompt), len(self.answers[index]), 0, self.params.seed or 0)
            self.take(
                Event(
                    request_id=self.stream.request_id,
                    index=index,
                    ids=[],
                    logprobs=None,
                    finish_reason=reason,
                    stop_id=None,
                    error=error,
                    usage=usage,
                )
            )

    def outlive(self, alone: bool) -> None:
        """Its process died; alone: without another request. What was aborted there has ended with it."""
        self.end(self.aborted, "abort")
        self.sent = False
        self.fresh_ids = 0
        self.deaths += 1
        self.alone += alone
        self.stream.uncomputed = len(self.prompt) + sum(len(ids) for ids in self.answers.values())


class Recovery:
    """The open requests of one engine, in order of arrival, over the lives of its processes."""

    def __init__(self) -> None:
        self.requests: dict[str, OpenRequest] = {}
        self._held: dict[str, OpenRequest] = {}  # those that the present process was not sent
        self._most = 0  # suspects that are sent next; 0: there are none

    def add(self, request: OpenRequest) -> None:
        """A new request; `due` says when to send it."""
        self.requests[request.stream.request_id] = self._held[request.stream.request_id] = request

    def due(self) -> list[Submit]:
        """What the process is to be sent now, which is taken as done."""
        if not self._held:
            return []
        due = list(self._held.values())
        if self._most:
            suspects = [request for request in self.requests.values() if request.deaths >= MAX_DEATHS]
            if any(request.sent for request in suspects):  # they have not been cleared
                return []
            if suspects:
                due = suspects[: self._most]
            else:
                self._most = 0
        for request in due:
            request.sent = True
            del self._held[request.stream.request_id]
        return [request.message for request in due]

    def take(self, event: Event) -> None:
        """An event from the process. What belongs to no open answer is left aside."""
        request = self.requests.get(event.request_id)
        if request is not None and event.index in request.answers:
            request.take(event)
            self._drop_ended([request])

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one of its answers; True: the process must be told, and will answer."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        chosen = request.answers.keys() if index is None else {index}
        if request.sent:
            request.aborted |= chosen
            return True
        request.end(chosen, "abort")
        self._drop_ended([request])
        return False

    def outlive(self, reason: str) -> None:
        """The process died, for this reason: its requests are held again, but for one that is to blame."""
        lost = [request for request in self.requests.values() if request.sent]
        for request in lost:
            request.outlive(len(lost) == 1)
        suspects = sum(request.deaths >= MAX_DEATHS for request in lost)
        if suspects:
            self._most = max(1, suspects // 2)
        for request in lost:
            if request.alone >= MAX_DEATHS:
                why = f"{reason}; this request has ended {request.alone} in a row that computed nothing else"
                request.end(range(request.params.n), "error", why)
                self._most = len(self.requests)  # the others are tried together
        self._held = dict(self.requests)
        self._drop_ended(lost)

    def leave(self) -> list[OpenRequest]:
        """Give all requests, which are held, to somebody else."""
        requests, self.requests, self._held = self.requests, {}, {}
        return list(requests.values())

    def fail(self, error: str) -> None:
        """End all requests: there is no process any more."""
        for request in self.leave():
            request.end(range(request.params.n), "error", error)

    def _drop_ended(self, requests: Iterable[OpenRequest]) -> None:
        for request in requests:
            if not request.answers:
                self.requests.pop(request.stream.request_id, None)
                self._held.pop(request.stream.request_id, None)
