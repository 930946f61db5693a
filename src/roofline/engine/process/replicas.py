"""Replicas: RemoteEngine's interface over several of them, each with the whole model in a process of its own.

submit ──> dispatch.choose ──> one RemoteEngine ──> its Stream
                               the others go on when this one dies; it comes back as any RemoteEngine does
"""

import asyncio
import uuid
from collections.abc import Iterable, Sequence

import msgspec

from roofline.common.errors import RequestError, UnsupportedError
from roofline.engine.checks import check_request, token_ids
from roofline.engine.params import SamplingParams
from roofline.engine.process.dispatch import Candidate, choose, keys_of
from roofline.engine.process.messages import Ready
from roofline.engine.process.remote import CLOSED, RemoteEngine, Stream
from roofline.engine.stats import EngineStats, total


class Replicas:
    """Sends each request to one of several engines that compute the same.

    Use it from one event loop, as RemoteEngine.

    Args:
        engines: not started; the same model with the same settings, each on cores or devices of its own.
    """

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = tuple(engines)
        self._candidates = [Candidate(engine) for engine in self.engines]
        config = self.engines[0].spec.config
        self._prefixes = config.prefix_cache and config.cache == "paged"  # caches find pages by their content
        self._closing = False
        self._started = asyncio.Event()  # set once all are loaded, and for good when closed
        self._turn = 0

    @property
    def description(self) -> Ready | None:
        """What they have in common, None before all are loaded: the first one's, with the shortest context of all."""
        known = [engine.description for engine in self.engines if engine.description is not None]
        if len(known) < len(self.engines):
            return None
        return msgspec.structs.replace(known[0], max_model_len=min(each.max_model_len for each in known))

    @property
    def ready(self) -> bool:
        """Whether any computes requests now."""
        return self._started.is_set() and any(engine.ready for engine in self.engines)

    @property
    def restarts(self) -> int:
        """Of all together."""
        return sum(engine.restarts for engine in self.engines)

    @property
    def pid(self) -> None:
        """None: each has a process of its own."""

    def outstanding(self) -> list[int]:
        """Tokens that each has to compute, as far as is known."""
        return [candidate.outstanding for candidate in self._candidates]

    def launch(self) -> None:
        """Spawn all processes; see RemoteEngine."""
        for engine in self.engines:
            engine.launch()

    async def start(self) -> Ready:
        """Wait until all have their model.

        Raises:
            UnsupportedError: they would compute differently, so that an answer depended on who gives it.
            ConfigError, CapacityError, RooflineError: what loading raised in the first that could not.
        """
        known = await asyncio.gather(*(engine.start() for engine in self.engines))
        if len({each.fingerprint for each in known}) > 1:
            reason = "the same request would get another answer from another one"
            raise UnsupportedError("replicas that compute differently", reason, ("devices of one kind",))
        self._started.set()
        assert self.description is not None, "all are loaded"
        return self.description

    async def submit(
        self,
        ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        eos_ids: Iterable[int] = (),
        request_id: str | None = None,
        salt: str = "",
    ) -> Stream:
        """Send a request to one of them and return its stream. While none is up this waits.

        Raises:
            RequestError, CapacityError: as RemoteEngine.submit.
        """
        params = params or SamplingParams()
        prompt, eos = token_ids("prompt", ids), token_ids("eos_ids", eos_ids)
        candidates = await self._up()
        description = self.description
        assert description is not None, "all were loaded"
        check_request(prompt, params, eos, description.vocab_size, description.max_model_len)
        name = request_id if request_id is not None else uuid.uuid4().hex
        if any(name in engine.streams for engine in self.engines):
            raise RequestError(400, "duplicate_request", f"request_id {name!r} is in use", param="request_id")
        keys = keys_of(prompt, salt) if self._prefixes else []
        chosen, uncomputed = choose(candidates, prompt, keys)
        stream = await chosen.engine.submit(prompt, params, eos_ids=eos, request_id=name, salt=salt)
        self._turn += 1
        chosen.given(stream, keys, uncomputed, self._turn)
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one answer of it, where it is computed."""
        for engine in self.engines:
            engine.abort(request_id, index)

    def stats(self) -> EngineStats:
        """The counters of the present processes together."""
        return total(engine.stats() for engine in self.engines)

    async def close(self, timeout: float = 5.0) -> None:
        """Close all of them at the same time; see RemoteEngine."""
        self._closing = True
        await asyncio.gather(*(engine.close(timeout) for engine in self.engines))
        self._started.set()

    async def _up(self) -> list[Candidate]:
        """Those that compute now; waits while there is none. Raises RequestError when there will be none."""
        await self._started.wait()
        while not (up := [candidate for candidate in self._candidates if candidate.engine.ready]):
            hoped = [engine for engine in self.engines if engine.failure is None]
            if self._closing or not hoped:
                raise RequestError(503, "engine_unavailable", self.engines[0].failure or CLOSED)
            waits = [asyncio.ensure_future(engine.settled()) for engine in hoped]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return up
