"""LocalEngine: token ids to token ids with an executable in this process."""

import os
from collections.abc import Iterable
from typing import Unpack

from roofline.backends.base import Executable
from roofline.common.errors import ConfigError
from roofline.engine.cache.naive import NaiveCache
from roofline.engine.cache.paged import PagedCache, root_key
from roofline.engine.checks import RequestOptions, check_request, check_unused, request_parts
from roofline.engine.config import EngineConfig, StepLimits, resolve
from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.schedule import naive
from roofline.engine.schedule.continuous import State, schedule
from roofline.engine.schedule.sequence import Request
from roofline.engine.speculation.speculator import Drafter, Speculator
from roofline.engine.stats import EngineStats, Meter
from roofline.engine.step import Stepper

SCHEDULERS = {"continuous": schedule, "naive": naive.schedule}


class LocalEngine:
    """Computes token ids in the caller's thread, step by step. Not thread-safe: one thread submits, steps and aborts.

    Args:
        draft: the executable of a smaller model with the same vocabulary, for speculate="draft"; closed with this one.

    Raises ConfigError and CapacityError where the configuration does not fit the executable.
    """

    def __init__(
        self, executable: Executable, config: EngineConfig | None = None, draft: Executable | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self.executable = executable
        self.limits: StepLimits = resolve(self.config, executable)
        pages, simple = executable.num_pages, self.config.cache == "naive"
        cache = NaiveCache(pages) if simple else PagedCache(pages, self.config.prefix_cache)
        self.state = State(cache, self.limits)
        self._meter = Meter(pages, executable.page_bytes)
        self._speculator = _speculator(self.config, executable, draft)
        overlap = self.config.overlap and self.config.scheduler == "continuous"
        scheduler, measure = SCHEDULERS[self.config.scheduler], self.config.measure
        self._stepper = Stepper(executable, self.state, scheduler, self._meter, measure, self._speculator, overlap)
        self._requests: dict[str, Request] = {}
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        return bool(self.state.running or self.state.waiting or self._events or self.under_way)

    @property
    def under_way(self) -> bool:
        """Whether a step was launched whose ids nobody has been told."""
        return self._stepper.flying

    @property
    def lost(self) -> str | None:
        """Why no step can succeed any more, None while they can."""
        return str(self._stepper.lost) if self._stepper.lost is not None else None

    def submit(
        self, ids: Iterable[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Queue a prompt and return the request's id. Raises RequestError for a field that cannot be used, and
        CapacityError, with the numbers, where prompt and answer can never fit."""
        prompt, params, eos, name, salt = request_parts(ids, params, **options)
        check_unused(name, self._requests)
        max_tokens = check_request(prompt, params, eos, self.executable.vocab_size, self.limits.max_model_len)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        # A fresh seed has 53 bits: exact in any JSON reader.
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little") >> 11
        root = root_key(self.executable.fingerprint, salt=salt)
        request = Request(name, prompt, params, stop_ids, max_tokens, seed, root)
        self._requests[name] = request
        self._meter.totals.requests += 1
        self.state.waiting.extend(request.sequences)
        return name

    def step(self) -> list[Event]:
        """Run one step, if there is work, and return what happened since the last call."""
        events, self._events = self._events + self._stepper.step(), []
        for event in events:
            if event.finish_reason is not None:
                request = self._requests.get(event.request_id)
                if request is not None and all(s.finished is not None for s in request.sequences):
                    del self._requests[event.request_id]
        return events

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its n answers. A request that has ended, or never was, is left alone.

        The pages are free when this returns; the next `step` returns the last events.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        chosen = [s for s in request.sequences if index is None or s.index == index]
        self._events += self._stepper.end(chosen, "abort")

    def abort_all(self) -> None:
        """End every request now."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def stats(self) -> EngineStats:
        """A reading of the counters."""
        return self._meter.reading(self.state, self._speculator)

    def close(self) -> None:
        """Abort everything and close the executable."""
        self.abort_all()
        if self._speculator is not None:
            self._speculator.drafter.close()
        self.executable.close()


def _speculator(config: EngineConfig, executable: Executable, draft: Executable | None) -> Speculator | None:
    if (config.speculate == "draft") != (draft is not None):
        raise ConfigError('speculate="draft" needs a draft model, and nothing else takes one')
    if config.speculate == "off":
        return None
    drafter: Drafter
    if draft is None:
        from roofline.engine.speculation.ngram import NgramDrafter

        drafter = NgramDrafter()
    else:
        from roofline.engine.speculation.draft_model import DraftModel

        if draft.vocab_size != executable.vocab_size:
            sizes = f"{draft.vocab_size:,} ids, the model {executable.vocab_size:,}"
            raise ConfigError(f"the draft model has {sizes}: they must share their vocabulary")
        drafter = DraftModel(draft)
    return Speculator(drafter, config.speculate_tokens, executable.clock, not config.speculate_always)
