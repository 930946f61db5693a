"""A request of ours that shows whether an engine computes, an idle one or one whose last process gave no token: one
token, greedy, of a prompt of one token, or the vector of that prompt."""

import os

from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling
from roofline.engine.process.messages import Ready, Submit

SALT = "canary"  # shares no prefix with anybody


class Canary:
    """Of one engine process: makes the request, and remembers what came of the latest one."""

    def __init__(self) -> None:
        self.problem: str | None = None  # why the latest one failed, until any token is computed
        self._id: str | None = None  # of the one that runs

    @property
    def runs(self) -> bool:
        """Whether one waits for its token."""
        return self._id is not None

    def request(self, description: Ready | None) -> Submit:
        """A fresh one, of an engine with this description."""
        self._id = os.urandom(16).hex()
        pooling = Pooling() if description is not None and description.encoder else None
        params = SamplingParams(temperature=0, max_tokens=1, pooling=pooling)
        return Submit(request_id=self._id, ids=[0], params=params, eos_ids=[], salt=SALT, answers={0: []})

    def told(self, event: Event) -> None:
        """An event of any request."""
        if event.ids or event.vector is not None:
            self.problem = None
        if event.request_id == self._id and event.finish_reason is not None:
            self._id = None
            if event.finish_reason == "error":
                self.problem = f"the engine could not compute a token: {event.error}"
