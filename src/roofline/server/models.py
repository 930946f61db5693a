"""Further models beside the first one: loaded when a request names them, within a budget of memory.

    absent ──a request names it──> waits for room ──> loading ──> loaded ──room is needed for another──> absent

Each model has an engine process of its own, so one that leaves gives all its memory back, and one that crashes takes
no other along. Models are loaded one at a time. The least recently used leaves first, and only while none of its
requests is open; while a load waits for that, new requests for the models that may leave wait behind it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common import log
from roofline.common.errors import CapacityError, RequestError, RooflineError
from roofline.common.files import text_of
from roofline.common.json_types import JsonObject
from roofline.server.adapters import ServedAdapters
from roofline.server.context import Context
from roofline.server.golden import GoldenState
from roofline.server.metrics import engine_figures

if TYPE_CHECKING:
    from roofline.engine.facade import AsyncEngine
    from roofline.server.text_side import TextSide

LOOK_SECONDS = 0.05  # between looks at whether a model may leave
REMEDY = "Raise --model-megabytes, lower --cache-tokens, or pin fewer models."
LOG = log.get("server")

Start = Callable[[], Awaitable[tuple["AsyncEngine", "TextSide"]]]
Check = Callable[["AsyncEngine", "TextSide", GoldenState], Coroutine[object, object, None]]


@dataclass(eq=False)
class ExtraModel:
    """A model that may be absent.

    start: makes an engine process with the model loaded, and its text side. check: compares golden prompts, once it is
    loaded. nbytes: memory that it takes, at first an estimate, later what was measured.
    """

    name: str
    start: Start
    nbytes: int
    pinned: bool = False
    check: Check | None = None
    context: Context | None = None  # of its requests, while it is loaded
    golden: GoldenState | None = None
    uses: int = 0  # requests that have not ended
    waiting: int = 0  # requests that wait for it to be loaded
    used_at: float = 0.0  # time.monotonic()
    load_seconds: float | None = None  # that the latest load took
    loading_since: float | None = None  # time.monotonic()
    problem: str | None = None  # why the latest load failed
    loading: "asyncio.Task[None] | None" = None
    checking: "asyncio.Task[None] | None" = None
    failing: "asyncio.Task[str] | None" = None  # ends when its engine is given up

    @property
    def loaded(self) -> Context | None:
        """The context of its requests, unless its engine was given up."""
        return None if self.failing is None or self.failing.done() else self.context

    @property
    def may_leave(self) -> bool:
        """Whether it is loaded and nobody needs it."""
        context = self.context
        if context is None or self.pinned or self.uses or self.waiting:
            return False
        return self.loaded is None or not context.engine.outstanding  # of answers that are computed in the background

    def status(self) -> str:
        """Where it is, for people."""
        if self.context is not None:
            return "loaded"
        if self.loading_since is not None:
            expected = f" of about {self.load_seconds:.0f} s" if self.load_seconds is not None else " s"
            return f"loading, {time.monotonic() - self.loading_since:.0f}{expected}"
        if self.loading is not None:
            return "waiting for memory"
        return "absent" if self.problem is None else f"absent: {self.problem}"


class Models:
    """The extra models of one server.

    Args:
        first: the context of the model that is always loaded; those of the others differ in engine, text and name.
        max_bytes: memory of all loaded models, the first one's too.
        first_bytes: what the first one takes, once it is loaded.
    """

    def __init__(
        self, first: Context, extra: Sequence[ExtraModel], max_bytes: int, first_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self.extra = {model.name: model for model in extra}
        self._first, self._max_bytes, self._first_bytes = first, max_bytes, first_bytes
        self._lock = asyncio.Lock()
        self._open = asyncio.Event()  # no load waits for a model to leave
        self._open.set()

    def find(self, name: object) -> ExtraModel | None:
        """The extra model of that name, also with the tag `latest` as Ollama's clients write it."""
        if not isinstance(name, str):
            return None
        return self.extra.get(name) or self.extra.get(name.removesuffix(":latest"))

    def contexts(self) -> list[Context]:
        """Of all models that are loaded, the first one's first."""
        return [self._first, *(extra.context for extra in self.extra.values() if extra.context is not None)]

    def missing(self) -> ExtraModel | None:
        """A pinned model that is not loaded; None: all are."""
        return next((extra for extra in self.extra.values() if extra.pinned and extra.loaded is None), None)

    def window(self) -> int:
        """As a context's, of all that are loaded."""
        return sum(context.window() for context in self.contexts())

    def shown(self) -> list[JsonObject]:
        """What /ready tells of each."""
        return [
            {
                "name": extra.name,
                "status": extra.status(),
                "pinned": extra.pinned,
                "bytes": extra.nbytes,
                "golden": extra.golden.shown() if extra.golden is not None else None,
            }
            for extra in self.extra.values()
        ]

    async def enter(self, model: ExtraModel) -> Context:
        """Before a request: the model's context, once it is loaded; `leave` comes after it. Raises RequestError 503
        where it cannot be loaded, or not within the seconds that a first token may take."""
        seconds = self._first.limits.first_token_seconds
        try:
            async with asyncio.timeout(seconds or None):
                return await self._acquire(model)
        except TimeoutError as error:
            message = f"The model {model.name!r} was not loaded within {seconds:g} s: {model.status()}."
            raise RequestError(503, "model_not_loaded", message, param="model") from error

    def leave(self, model: ExtraModel) -> None:
        """A request that has entered is over."""
        model.uses -= 1
        model.used_at = time.monotonic()

    async def load_pinned(self) -> None:
        """Load those that stay. Raises as loading does."""
        for model in self.extra.values():
            if model.pinned:
                await self.enter(model)
                self.leave(model)

    async def close(self) -> None:
        """End all engines."""
        loading = [
            task for extra in self.extra.values() for task in (extra.loading, extra.checking) if task is not None
        ]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._unload(extra) for extra in self.extra.values() if extra.context is not None))

    async def _acquire(self, model: ExtraModel) -> Context:
        while True:
            if not model.pinned:
                await self._open.wait()
            if (context := model.loaded) is not None:
                model.uses += 1
                return context
            model.waiting += 1  # so that it does not leave between its load and this request's turn
            try:
                if model.loading is None:
                    model.loading = asyncio.create_task(self._load(model))
                await asyncio.shield(model.loading)
                if (context := model.loaded) is not None:
                    model.uses += 1
                    return context
            finally:
                model.waiting -= 1

    async def _load(self, model: ExtraModel) -> None:
        """Make room, start the engine, and see what it takes. Raises RequestError 503."""
        try:
            async with self._lock:
                if model.context is not None:  # its engine was given up
                    await self._unload(model)
                await self._make_room(model)
                await self._start(model)
                try:
                    await self._make_room(model)  # it may take more than was expected
                except CapacityError:
                    await self._unload(model)
                    raise
            model.problem = None
        except RooflineError as error:
            model.problem = str(error)
            message = f"The model {model.name!r} cannot be loaded: {error}"
            raise RequestError(503, "model_not_loaded", message, param="model") from error
        finally:
            model.loading = model.loading_since = None

    async def _start(self, model: ExtraModel) -> None:
        began = model.loading_since = time.monotonic()
        engine, text = await model.start()
        model.load_seconds, model.nbytes = time.monotonic() - began, engine_bytes(engine) or model.nbytes
        golden = model.golden if model.golden is not None and model.golden.status != "pending" else GoldenState()
        first, name = self._first, model.name
        metrics = first.metrics.of_model(name)
        adapters = ServedAdapters(engine, [name], 0)
        model.context = replace(
            first, engine=engine, text=text, name=name, aliases=(), metrics=metrics, golden=golden, adapters=adapters
        )
        model.failing = asyncio.create_task(engine.failed())
        if model.golden is not golden and model.check is not None:
            model.checking = asyncio.create_task(model.check(engine, text, golden))
        model.golden = golden
        LOG.info("model %s: %d bytes, loaded in %.1f s", name, model.nbytes, model.load_seconds)

    async def _make_room(self, model: ExtraModel) -> None:
        """Have the least recently used leave until the model fits. Raises CapacityError where it cannot."""
        other_models = [extra for extra in self.extra.values() if extra is not model]
        try:
            while True:
                loaded = [extra for extra in other_models if extra.context is not None]
                staying = self._first_bytes() + sum(extra.nbytes for extra in loaded if extra.pinned)
                if staying + model.nbytes > self._max_bytes:
                    what, free = f"The model {model.name!r}", max(0, self._max_bytes - staying)
                    raise CapacityError(what, model.nbytes, free, "bytes beside those that stay", REMEDY)
                if self._first_bytes() + model.nbytes + sum(extra.nbytes for extra in loaded) <= self._max_bytes:
                    return
                idle = [extra for extra in loaded if extra.may_leave]
                if idle:
                    await self._unload(min(idle, key=lambda extra: extra.used_at))
                else:
                    self._open.clear()
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._open.set()

    async def _unload(self, model: ExtraModel) -> None:
        context, tasks = model.context, [task for task in (model.checking, model.failing) if task is not None]
        model.context = model.checking = model.failing = None  # from here on requests load it anew
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if context is not None:
            context.metrics.engine_left(engine_figures(context.engine))
            await context.engine.close()
            LOG.info("model %s has left", model.name)


def engine_bytes(engine: "AsyncEngine") -> int:
    """Memory of an engine process as if its cache, and its slots of recurrent state, were full; pages that it shares
    with others are counted by their share. 0 where the system does not tell."""
    total = sum(_resident_bytes(one_engine.pid) for one_engine in (engine.engines or (engine,)))
    loaded = engine.description
    if not total or loaded is None:
        return 0
    cache_bytes = loaded.num_pages * loaded.page_bytes + loaded.state_slots * loaded.slot_bytes
    return total + cache_bytes * max(1, len(engine.engines))


def _resident_bytes(pid: int | None) -> int:
    text = text_of(Path(f"/proc/{pid}/smaps_rollup")) or ""
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def source_bytes(path: Path) -> int:
    """The size of a model's files: what it takes at least."""
    from roofline.weights.files.gguf_parts import part_names

    files: Iterable[Path] = path.rglob("*") if path.is_dir() else part_names(path)
    return sum(file.stat().st_size for file in files if file.is_file())
