"""The engine process, or several, seen through the server's interface."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.stats import EngineStats
from roofline.server.facade import EngineFacts

if TYPE_CHECKING:
    from roofline.engine.process.replicas import Replicas


class EngineSide:
    """A RemoteEngine as `facade.Engine`."""

    def __init__(self, remote: "RemoteEngine | Replicas") -> None:
        self.remote = remote

    def facts(self) -> EngineFacts | None:
        known = self.remote.description
        if known is None or not self.remote.ready:
            return None
        return EngineFacts(known.fingerprint, known.vocab_size, known.max_model_len, known.exact)

    async def submit(
        self, ids: Sequence[int], params: SamplingParams, *, eos_ids: Sequence[int], request_id: str
    ) -> AsyncIterator[Event]:
        stream = await self.remote.submit(ids, params, eos_ids=eos_ids, request_id=request_id)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.remote.abort(request_id, index)

    async def stats(self) -> Mapping[str, Any]:
        return {**as_dict(self.remote.stats()), "restarts": self.remote.restarts, "pid": self.remote.pid}


class ReplicasSide(EngineSide):
    """Replicas as `facade.Engine`: all figures of them together, and under `replicas` those of each."""

    def __init__(self, replicas: "Replicas") -> None:
        super().__init__(replicas)
        self.replicas = replicas

    def facts(self) -> EngineFacts | None:
        known = super().facts()
        return known and replace(known, replicas=tuple(engine.ready for engine in self.replicas.engines))

    async def stats(self) -> Mapping[str, Any]:
        each = [
            {
                **await EngineSide(engine).stats(),
                "ready": engine.ready,
                "failure": engine.failure,
                "outstanding_tokens": tokens,
            }
            for engine, tokens in zip(self.replicas.engines, self.replicas.outstanding(), strict=True)
        ]
        return {**await super().stats(), "replicas": each}


def as_dict(stats: EngineStats) -> dict[str, Any]:
    """The counters with what follows from them."""
    return {
        **asdict(stats),
        "generated_tokens": stats.generated_tokens,
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "share_of_roof": stats.share_of_roof,
        "acceptance": stats.acceptance,
    }
