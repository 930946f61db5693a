"""EngineReplicas: `facade.AsyncEngine` over several RemoteEngines, each with the whole model in a process of its own.

submit ──> dispatch.choose ──> one RemoteEngine ──> its Stream
                               the others go on when this one dies; it comes back as any RemoteEngine does
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Unpack

import msgspec

from roofline.common.errors import ConfigError, RequestError, UnsupportedError
from roofline.engine.adapter_info import AdapterInfo
from roofline.engine.checks import RequestOptions, check_request, check_unused, request_parts
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import check_able
from roofline.engine.process.dispatch import Candidate, choose, keys_of
from roofline.engine.process.messages import Checked, Ready
from roofline.engine.process.remote import CLOSED, RemoteEngine
from roofline.engine.process.stream import EventStream
from roofline.engine.stats import EngineStats, total


class EngineReplicas:
    """Sends each request to one of several engines that compute the same. Use it from one event loop, as RemoteEngine.

    engines: not started; the same model with the same settings, each on cores or devices of its own.
    """

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = tuple(engines)
        self._candidates = [Candidate(engine) for engine in self.engines]
        config = self.engines[0].spec.config
        self._prefixes = config.prefix_cache and config.cache == "paged"  # caches find pages by their content
        for engine in self.engines:
            engine.heir = self._least_busy
        self._closing = False
        self._started = asyncio.Event()  # set once all are loaded, and for good when closed
        self._turn = 0

    @property
    def description(self) -> Ready | None:
        """What they have in common, None before all are loaded: the first one's, with the shortest context of all."""
        loaded = [engine.description for engine in self.engines if engine.description is not None]
        if len(loaded) < len(self.engines):
            return None
        return msgspec.structs.replace(loaded[0], max_model_len=min(ready.max_model_len for ready in loaded))

    @property
    def ready(self) -> bool:
        """Whether any computes requests now."""
        return self._started.is_set() and any(engine.ready for engine in self.engines)

    @property
    def checked(self) -> Checked | None:
        """What is wrong with the weights of one, or, once all have compared theirs, that nothing is."""
        checked = [engine.checked for engine in self.engines if engine.checked is not None]
        wrong = next((engine for engine in checked if engine.problem is not None), None)
        return wrong or (Checked(None) if len(checked) == len(self.engines) else None)

    @property
    def problem(self) -> str | None:
        return None if self.ready else next((engine.problem for engine in self.engines if engine.problem), None)

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self.engines)

    @property
    def pid(self) -> None:
        """None: each engine has its own."""

    @property
    def outstanding(self) -> int:
        return sum(engine.outstanding for engine in self.engines)

    def launch(self) -> None:
        for engine in self.engines:
            engine.launch()

    async def start(self) -> Ready:
        """Wait until all have their model. Raises what loading raised in the first that could not, and UnsupportedError
        where they would compute differently, so that an answer depended on who gives it."""
        loaded = await asyncio.gather(*(engine.start() for engine in self.engines))
        if len({ready.fingerprint for ready in loaded}) > 1:
            reason = "the same request would get another answer from another one"
            raise UnsupportedError("replicas that compute differently", reason, ("devices of one kind",))
        self._started.set()
        assert self.description is not None, "all are loaded"
        return self.description

    async def submit(
        self, ids: Iterable[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> EventStream:
        prompt, params, eos, name, salt, adapter, priority = request_parts(ids, params, **options)
        candidates = await self._up()
        description = self.description
        assert description is not None, "all were loaded"
        check_able(params.pooling, description.gives_hidden, adapter, description.encoder)
        sizes = description.vocab_size, description.max_model_len
        check_request(prompt, params, eos, *sizes, description.encoder, description.media_ids)
        for engine in self.engines:
            check_unused(name, engine.requests)
        keys = keys_of(prompt, salt, adapter) if self._prefixes else []
        chosen, uncomputed = choose(candidates, prompt, keys)
        stream = await chosen.engine.submit(
            prompt, params, eos_ids=eos, request_id=name, salt=salt, adapter=adapter, priority=priority
        )
        self._turn += 1
        chosen.record(stream, keys, uncomputed, self._turn)
        return stream

    async def load_adapter(self, path: str, max_bytes: int | None = None) -> AdapterInfo:
        """Load it in all but those that are given up, which compute nothing any more."""
        engines = [engine for engine in self.engines if engine.failure is None]
        if not engines:
            raise RequestError(503, "engine_unavailable", self.engines[0].failure or CLOSED)
        loads = [asyncio.ensure_future(engine.load_adapter(path, max_bytes)) for engine in engines]
        try:
            await asyncio.wait(loads)
            results = [load.result() for load in loads]
            if len({result.digest for result in results}) > 1:
                raise ConfigError(f"{path} changed while it was loaded")
            return results[0]
        except BaseException:  # also where nobody waits for it any more
            for engine, load in zip(engines, loads, strict=True):
                if not load.cancel() and load.exception() is None:
                    engine.unload_adapter(load.result().digest)
            raise

    def unload_adapter(self, digest: str) -> None:
        for engine in self.engines:
            engine.unload_adapter(digest)

    def abort(self, request_id: str, index: int | None = None) -> None:
        for engine in self.engines:
            engine.abort(request_id, index)

    def trouble(self, patience: float) -> str | None:
        troubles = [engine.trouble(patience) for engine in self.engines if engine.ready]
        return None if None in troubles else next(iter(troubles), None)

    def prove(self, seconds: float) -> None:
        for engine in self.engines:
            engine.prove(seconds)

    def stats(self) -> EngineStats:
        return total(engine.stats() for engine in self.engines)

    async def failed(self) -> str:
        reasons = await asyncio.gather(*(engine.failed() for engine in self.engines))
        return reasons[0]

    async def close(self, timeout: float = 5.0) -> None:
        self._closing = True
        await asyncio.gather(*(engine.close(timeout) for engine in self.engines))
        self._started.set()

    def _least_busy(self) -> RemoteEngine | None:
        """Who goes on with the requests of one that is given up; None: they all are."""
        hoped = [engine for engine in self.engines if engine.failure is None and engine.description is not None]
        return min(hoped, key=lambda engine: (not engine.ready, engine.outstanding), default=None)

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
