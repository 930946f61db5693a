"""LocalEngine: token ids to token ids with an executable in this process."""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from roofline.backends.base import (
    ComputesNothing,
    CountsExperts,
    Executable,
    GivesHidden,
    KeepsHidden,
    KeepsState,
    is_encoder,
)
from roofline.common.errors import ConfigError, RequestError, UnsupportedError, describe_error
from roofline.engine.adapters import Adapters
from roofline.engine.cache.naive import NaiveCache
from roofline.engine.cache.paged import PagedCache, root_key
from roofline.engine.cache.state_slots import StateSlots
from roofline.engine.checks import RequestOptions, check_request, check_unused, request_parts
from roofline.engine.config import EngineConfig, StepLimits, resolve
from roofline.engine.constraint import Constraint
from roofline.engine.events import Event
from roofline.engine.params import SamplingParams, check_logits, fresh_seed
from roofline.engine.pooling import check_able
from roofline.engine.schedule import naive
from roofline.engine.schedule.continuous import schedule
from roofline.engine.schedule.plan import State
from roofline.engine.schedule.sequence import Request
from roofline.engine.speculation.speculator import Drafter, Speculator
from roofline.engine.stats import EngineStats, StatsMeter
from roofline.engine.step import Stepper
from roofline.weights.facts import ModelFacts
from roofline.weights.vectors import VectorKind

if TYPE_CHECKING:
    from concurrent.futures import Future

    from roofline.engine.cache.page_file import PageFile
    from roofline.engine.constraints.grammars import Grammar, Grammars
    from roofline.engine.recording.recorder import StepRecorder
    from roofline.text.tokenizers.tokenizer import Tokenizer

COMPILE_WAIT = 0.005  # seconds that a step waits for a constraint where there is nothing else to do
SCHEDULERS = {"continuous": schedule, "naive": naive.schedule}


class LocalEngine:
    """Computes token ids in the caller's thread, step by step. Not thread-safe: one thread submits, steps and aborts.

    Args:
        draft: the executable of a smaller model with the same vocabulary, for speculate="draft"; closed with this one.
        tokenizer: gives the model's, for constraints; called when the first one comes, by another thread.

    Raises ConfigError and CapacityError where the configuration does not fit the executable.
    """

    def __init__(
        self,
        executable: Executable,
        config: EngineConfig | None = None,
        draft: Executable | None = None,
        tokenizer: "Callable[[], Tokenizer] | None" = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.executable = executable
        self.limits: StepLimits = resolve(self.config, executable)
        pages, simple = executable.num_pages, self.config.cache == "naive"
        shared = self.config.prefix_cache and not self.limits.undivided
        cache = NaiveCache(pages) if simple else PagedCache(pages, shared)
        slots = executable.limits.state_slots
        self.state = State(cache, self.limits, slots=StateSlots(slots, cache.prefix) if slots else None)
        self._page_file = _page_file(self.config, executable, self.state)
        slot_bytes = executable.slot_bytes if isinstance(executable, KeepsState) else 0
        self._speculator = _speculator(self.config, executable, draft, self.state)
        layer = (
            executable.guesser if isinstance(executable, KeepsHidden) else None
        )  # whose pages lie beside the model's
        page_bytes = executable.page_bytes + (layer.page_bytes if layer is not None else 0)
        self.meter = StatsMeter(pages, page_bytes, slots, slot_bytes)
        overlap = self.config.overlap and self.config.scheduler == "continuous"
        self._stepper = Stepper(
            executable,
            self.state,
            schedule=SCHEDULERS[self.config.scheduler],
            meter=self.meter,
            measure=self.config.measure,
            speculator=self._speculator,
            overlap=overlap,
        )
        self._requests: dict[str, Request] = {}
        self.pooling: VectorKind = "last"  # of vectors where nobody says: whoever loads the model knows better
        self.facts: ModelFacts | None = None  # as that one knows them
        self.media_ids: Mapping[int, str] = {}  # that prompts may not have, likewise (`checks.media_in`)
        self.adapters = Adapters(executable, self.config, self._needs)
        self._recorder = self._stepper.recorder = _recorder(self.config, executable, self.adapters)
        self._events: list[Event] = []
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._compiling: list[tuple[Request, Future[Grammar]]] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        return bool(self.state.running or self.state.waiting or self._events or self.under_way or self._compiling)

    @property
    def under_way(self) -> bool:
        """Whether a step was launched whose ids nobody has been told."""
        return self._stepper.flying

    @property
    def gives_hidden(self) -> bool:
        """Whether requests can have vectors of hidden rows."""
        return isinstance(self.executable, GivesHidden)

    @property
    def gives_logits(self) -> bool:
        """Whether ids are sampled from logits, which log-probabilities and forms of answers need."""
        return not isinstance(self.executable, ComputesNothing)

    @property
    def encoder(self) -> bool:
        """Whether the model is one: it gives vectors alone."""
        return self.limits.undivided

    @property
    def lost(self) -> str | None:
        """Why no step can succeed any more, None while they can."""
        return str(self._stepper.lost) if self._stepper.lost is not None else None

    def submit(
        self,
        ids: Iterable[int],
        params: SamplingParams | None = None,
        answers: Mapping[int, list[int]] | None = None,
        scored: int = 0,
        common_noise: bool = False,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queue a prompt and return the request's id. Raises RequestError for a field that cannot be used, and
        CapacityError, with the numbers, where prompt and answer can never fit.

        answers: of a request that another engine began, with this seed: the ids so far of each answer that has not
        ended, by its index. Events bring what follows them. None: all answers, from their beginning.
        scored: how many of its prompt's log-probabilities were told.
        common_noise: the noise of sampling is the seed's alone, the same for every prompt, as older receipts have it.
        """
        prompt, params, eos, name, salt, adapter, priority = request_parts(ids, params, **options)
        check_unused(name, self._requests)
        sizes = self.executable.vocab_size, self.limits.max_model_len
        check_able(params.pooling, self.gives_hidden, adapter, self.encoder)
        check_logits(params, self.gives_logits)
        max_tokens = check_request(prompt, params, eos, *sizes, self.encoder, self.media_ids)
        if params.pooling is not None and params.pooling.hidden:
            self._stepper.pooler.prepare()
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        seed = params.seed if params.seed is not None else fresh_seed()
        slot = self.adapters.slot(adapter)
        root = root_key(self.executable.fingerprint, adapter, salt)
        now = self.executable.clock.now()
        request = Request(
            id=name,
            prompt=prompt,
            params=params,
            stop_ids=stop_ids,
            max_tokens=max_tokens,
            seed=seed,
            root=root,
            submitted_at=now,
            slot=slot,
            priority=priority,
            common_noise=common_noise,
        )
        if answers is not None:
            request.resume(answers, scored)
        if params.constraint is None:
            self.state.enqueue(request)
        else:
            grammar = self.compile(params.constraint)
            if grammar.done():
                self._queue_constrained(request, grammar.result())
            else:
                self._compiling.append((request, grammar))
        self._requests[name] = request
        if self._recorder is not None:
            self._recorder.arrived(request)
        self.meter.totals.requests += 1
        return name

    def compile(self, constraint: Constraint) -> "Future[Grammar]":
        """The compiled form of a constraint, in a thread of its own; its requests can be submitted before it is ready.

        Any thread may call this. The result raises RequestError 400 for a constraint that cannot be compiled.
        """
        from roofline.engine.constraints.grammars import Grammars

        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self.executable.vocab_size)
        return self._grammars.begin(constraint)

    def _queue_constrained(self, request: Request, grammar: "Grammar") -> None:
        params, form = request.params, request.params.constraint
        assert form is not None, "it has a grammar"
        for sequence in request.sequences:
            sequence.matcher = grammar.matcher(request.stop_ids, params.min_tokens, params.ignore_eos, form.begun)
            for token in sequence.ids[sequence.prompt_length :]:  # of an answer that another engine began
                sequence.matcher.take(token)
        self.state.enqueue(request)
        self._events.append(Event(request.id, 0, []))

    def _queue_compiled(self) -> None:
        """Queue the requests whose constraint is compiled by now, and end those whose constraint cannot be."""
        if not self.state.running and not self.state.waiting and not self._events and not self.under_way:
            from concurrent.futures import FIRST_COMPLETED, wait

            wait([grammar for _, grammar in self._compiling], COMPILE_WAIT, FIRST_COMPLETED)
        compiling, self._compiling = self._compiling, []
        open_grammars = {grammar for request, grammar in compiling if not request.ended}
        for request, grammar in compiling:
            if request.ended:  # aborted meanwhile: what nobody waits for is not compiled
                if grammar not in open_grammars:
                    grammar.cancel()
                continue
            if not grammar.done():
                self._compiling.append((request, grammar))
                continue
            try:
                self._queue_constrained(request, grammar.result())
            except Exception as error:
                refused = error.param if isinstance(error, RequestError) else None
                ended = self._stepper.end(request.sequences, "error", describe_error(error))
                self._events += [event._replace(refused=refused) for event in ended]

    def step(self) -> list[Event]:
        """Run one step, if there is work, and return what happened since the last call."""
        if self._compiling:
            self._queue_compiled()
        events, self._events = self._events + self._stepper.step(), []
        for event in events:
            if event.finish_reason is not None:
                request = self._requests.get(event.request_id)
                if request is not None and request.ended:
                    del self._requests[event.request_id]
                    if request.slot:
                        self.adapters.forget_idle()
        return events

    def _needs(self, slot: int) -> bool:
        """Whether a request that has not ended has the adapter of this slot."""
        return any(request.slot == slot for request in self._requests.values())

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
        reading = self.meter.reading(self.state, self._speculator)
        if isinstance(self.executable, CountsExperts):
            counts = self.executable.expert_counts()
            reading.expert_rows, reading.experts_read, reading.expert_layers = counts.rows, counts.read, counts.layers
        return reading

    def close(self) -> None:
        """Abort everything and close the executable. What its cache has goes into the file that keeps it."""
        self.abort_all()
        if self._page_file is not None and self.lost is None:
            assert isinstance(self.state.cache, PagedCache), "only such a one has a file"
            self._page_file.save(self.state.cache, self.state.slots)
        self._stepper.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._speculator is not None:
            self._speculator.drafter.close()
        self.executable.close()


def _page_file(config: EngineConfig, executable: Executable, state: State) -> "PageFile | None":
    """The file of a cache, restored from it."""
    if config.cache_file is None:
        return None
    from roofline.engine.cache.page_file import PageFile

    assert isinstance(state.cache, PagedCache), "EngineConfig refuses others"
    file = PageFile(Path(config.cache_file), executable)
    file.restore(state.cache, state.slots)
    return file


def _recorder(config: EngineConfig, executable: Executable, adapters: Adapters) -> "StepRecorder | None":
    if config.record is None:
        return None
    from roofline.engine.recording.recorder import StepRecorder

    return StepRecorder(Path(config.record), executable, adapters, config.record_megabytes, config.record_ids)


def _speculator(
    config: EngineConfig, executable: Executable, draft: Executable | None, state: State
) -> Speculator | None:
    if (config.speculate == "draft") != (draft is not None):
        raise ConfigError('speculate="draft" needs a draft model, and nothing else takes one')
    if config.speculate == "off":
        return None
    drafter: Drafter
    if draft is not None and is_encoder(draft):
        raise UnsupportedError("an encoder model as a draft", "it generates nothing", ("speculate='ngram'",))
    if draft is not None and draft.limits.state_slots:
        reason = "its state cannot be taken back behind guesses that were wrong"
        raise UnsupportedError("a draft model with recurrent state", reason, ("speculate='ngram'", "another draft"))
    if config.speculate == "mtp":
        from roofline.engine.speculation.layer import LayerDrafter

        if not isinstance(executable, KeepsHidden) or executable.guesser is None:
            reason = "the model was loaded without its layer that guesses"
            raise UnsupportedError('speculate="mtp"', reason, ("load it with guesses=True", "speculate='ngram'"))
        drafter = LayerDrafter(executable, state)
    elif draft is None:
        from roofline.engine.speculation.ngram import NgramDrafter

        drafter = NgramDrafter()
    else:
        from roofline.engine.speculation.draft_model import DraftModel

        if draft.vocab_size != executable.vocab_size:
            sizes = f"{draft.vocab_size:,} ids, the model {executable.vocab_size:,}"
            raise ConfigError(f"the draft model has {sizes}: they must share their vocabulary")
        drafter = DraftModel(draft)
    return Speculator(drafter, config.speculate_tokens, executable.clock, not config.speculate_always)
