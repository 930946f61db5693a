"""The start-up check on golden prompts: the engine's logits against a slow reference's on the original file's bytes.

It begins when the server has been ready for DELAY seconds, computes only while no request is open, and ends in a state
that /ready and /metrics show. Beyond the thresholds the engines load the model again with the plainest kernels and
weights packed afresh; where that does not help either, or cannot be done, /ready answers 503.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roofline.common import log
from roofline.common.errors import RequestError, RooflineError, UnsupportedError
from roofline.common.processes import return_freed_memory
from roofline.engine.golden import (
    LEAST_AGREEMENT,
    MOST_KL,
    GoldenComparison,
    GoldenPrompt,
    compare_row,
    golden_prompts,
    summarize,
)
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling

if TYPE_CHECKING:
    import numpy as np

    from roofline.backends.options import LoadOptions
    from roofline.bundle.golden import GoldenTask
    from roofline.common.json_types import JsonObject
    from roofline.engine.facade import AsyncEngine
    from roofline.engine.process.remote import RemoteEngine
    from roofline.server.text_side import TextSide

DELAY = 20.0  # seconds from ready to the first look: a start, and its first requests, have the machine to themselves
LOOK_SECONDS = 0.5  # between looks at whether requests are open
PATIENCE = 600.0  # seconds after which a server that is never idle is checked beside its requests
SALT = "golden"  # shares no prefix with anybody
SAFE: dict[str, object] = {"isa": "portable", "tuned": False}  # options of the cpu backend that trust the least code
PLAINEST = "portable kernels and weights packed anew"
LOG = log.get("server")

Status = Literal["off", "pending", "skipped", "passed", "failed"]


@dataclass
class GoldenState:
    """What is known by now. detail: why it was skipped, or what was wrong; fallback: what the engines run on instead
    of what they were started with, "": nothing else."""

    status: Status = "off"
    comparison: GoldenComparison | None = None
    detail: str = ""
    fallback: str = ""

    @property
    def problem(self) -> str | None:
        """Why the server should not be sent requests, with a remedy."""
        if self.status != "failed":
            return None
        remedy = (
            "Compile the model again (`roofline compile`), check the file against its origin (`roofline pull`), try "
            "another backend, and report this; --golden-check off serves all the same."
        )
        return f"The model does not compute what its file says: {self.detail}. {remedy}"

    def shown(self) -> "JsonObject":
        """As /ready says it."""
        compared = self.comparison
        return {
            "status": self.status,
            "kl": compared and compared.kl,
            "top1_agreement": compared and compared.agreement,
            "positions": compared.positions if compared else 0,
            "thresholds": {"kl": MOST_KL, "top1_agreement": LEAST_AGREEMENT},
            "detail": self.detail or None,
            "fallback": self.fallback or None,
        }


class GoldenCheck:
    """Makes the check of one server; `run` once the engine is ready.

    source, load: the model's name or path, and how it is loaded.
    """

    def __init__(self, state: GoldenState, engine: "AsyncEngine", source: str, load: "LoadOptions") -> None:
        self.state, self._engine, self._source, self._load = state, engine, source, load
        self._looks = int(PATIENCE / LOOK_SECONDS)  # that are left
        state.status = "pending"

    async def run(self, text: "TextSide") -> None:
        """Wait, check, and fall back where that is needed. Raises nothing but what cancels it."""
        try:
            await asyncio.sleep(DELAY)
            await self._check(text)
        except UnsupportedError as error:  # there is no reference, which is no fault
            self._end("skipped", error.reason, logging.INFO)
        except RooflineError as error:
            self._end("skipped", str(error))
        except Exception as error:  # of the check, which must not take the server with it
            LOG.exception("golden prompts could not be checked")
            self._end("skipped", f"{type(error).__name__}: {error}")
        await asyncio.to_thread(return_freed_memory)  # logits of large vocabularies

    async def _check(self, text: "TextSide") -> None:
        from roofline.bundle.golden import GoldenTask, original, reference_logits

        description = self._engine.description
        assert description is not None, "it is ready"
        if description.encoder:
            raise UnsupportedError("golden prompts of an encoder model", "it has no logits to compare")
        if self._load.backend == "simulated":
            raise UnsupportedError("golden prompts of a simulated model", "nothing is computed, so nothing can differ")
        prompts = await asyncio.to_thread(golden_prompts, text.tokenizer.encode, description.max_model_len)
        source = await asyncio.to_thread(original, self._source)
        task = GoldenTask(
            source, self._load.weights, [list(p.ids) for p in prompts], [list(p.positions) for p in prompts]
        )
        await self._idle()
        reference = await reference_logits(task)
        problem = await self._compare(prompts, reference)
        if problem is not None and self._load.backend == "cpu":
            try:
                problem = await self._fall_back(task, prompts, reference, problem)
            except RooflineError as error:
                problem = f"{problem}; and it cannot be loaded with {PLAINEST}: {error}"
        self._end("passed" if problem is None else "failed", problem or "")

    async def _fall_back(
        self, task: "GoldenTask", prompts: "Sequence[GoldenPrompt]", reference: "np.ndarray", problem: str
    ) -> str | None:
        """Have all engines load the model anew, as SAFE says; what is wrong then."""
        from roofline.bundle.golden import forget_packed

        LOG.error("golden prompts: %s; the model is loaded again with %s", problem, PLAINEST)
        await asyncio.to_thread(forget_packed, task.source)
        for engine in _engines(self._engine):
            await engine.reload(task.source, SAFE)
        self.state.fallback = f"{PLAINEST} (slower), because: {problem}"
        after = await self._compare(prompts, reference)
        return None if after is None else f"{after}, with {PLAINEST}"

    async def _compare(self, prompts: "Sequence[GoldenPrompt]", reference: "np.ndarray") -> str | None:
        """What is wrong with the worst of the engines; None: nothing."""
        worst, problem = None, None
        for engine in _engines(self._engine):
            rows: list[tuple[float, bool]] = []  # each is compared as it comes, so that one vector is in memory
            for prompt in prompts:
                for position in prompt.positions:
                    await self._idle()
                    logits = await _logits(engine, prompt.ids[: position + 1])
                    if isinstance(logits, str):
                        return f"the engine gave no logits: {logits}"
                    rows.append(await asyncio.to_thread(compare_row, reference[len(rows)], logits))
            result = summarize(rows)
            if worst is None or not result.kl <= worst.kl:
                worst = result
            if not result.within:
                problem = str(result)
        self.state.comparison = worst
        return problem

    async def _idle(self) -> None:
        """Wait until no request is open: PATIENCE at most, over the whole check."""
        while self._engine.outstanding and self._looks > 0:
            self._looks -= 1
            await asyncio.sleep(LOOK_SECONDS)

    def _end(self, status: Status, detail: str, level: int = logging.WARNING) -> None:
        """level: of the line that says why there was no check."""
        state = self.state
        state.status, state.detail = status, detail
        if state.problem is not None:
            LOG.error("%s", state.problem)
        elif status == "skipped":
            LOG.log(level, "golden prompts were not checked: %s", detail)
        elif state.fallback:
            LOG.warning("golden prompts: %s. The engine runs with %s", state.comparison, state.fallback)
        else:
            LOG.info("golden prompts: %s", state.comparison)


def _engines(engine: "AsyncEngine") -> "Sequence[RemoteEngine]":
    """Those that compute, of one engine or of replicas."""
    from roofline.engine.process.remote import RemoteEngine

    return engine.engines or ([engine] if isinstance(engine, RemoteEngine) else [])


async def _logits(engine: "RemoteEngine", ids: Sequence[int]) -> "np.ndarray | str":
    """All logits after a prompt [vocab]; what is wrong where they are not numbers. Raises RequestError."""
    import numpy as np

    params = SamplingParams(temperature=0, max_tokens=1, pooling=Pooling("logits"))
    async for event in await engine.submit(ids, params, salt=SALT):
        if event.vector is not None:
            return np.frombuffer(event.vector, "<f4")
        if event.finish_reason is not None:
            return event.error or event.finish_reason
    raise RequestError(503, "engine_unavailable", "the engine ended")
