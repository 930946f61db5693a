"""`roofline bench engine`: the engine's speed on the workloads that other engines are timed on too.

Prefix cache and speculation are off. The record has all repeats; a row's figure is that of its fastest repeat. The
roofs of a row are measured just before and after it (`bench/adjacent_roofs.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import roofline
from roofline import bundle
from roofline.backends.base import Executable, Queueing, StepCost
from roofline.backends.options import LoadOptions
from roofline.backends.sampling import Sampled, SampleRows
from roofline.bench.adjacent_roofs import AdjacentRoofs, Roof
from roofline.bench.workloads import WARM_UP, WORKLOADS, chosen, token_ids
from roofline.bundle import LoadedModel
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats
from roofline.hardware.detect import detect

REPEATS, SERVE_REPEATS = 3, 2


@dataclass(frozen=True)
class Repeat:
    """One timed run: seconds, what the engine counted during it, and the sizes of its steps (`StepCost.work`)."""

    seconds: float
    stats: EngineStats
    works: tuple[tuple[float, ...], ...] = ()


class Watched:
    """An executable that records the size of each step, so that steps can be priced at roofs measured later."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self.works: list[tuple[float, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def step_cost(self) -> StepCost:
        cost = self._executable.step_cost()
        self.works.append(cost.work)
        return cost


class WatchedQueueing(Watched):
    """The same of an executable that queues steps."""

    def queue_sample(self, rows: SampleRows) -> Callable[[], Sampled]:
        assert isinstance(self._executable, Queueing), "Bench asked"
        return self._executable.queue_sample(rows)


class Bench:
    """Runs the workloads through a LocalEngine.

    Args:
        executable: a loaded model whose cache holds the tokens of the largest workload.
    """

    def __init__(self, executable: Executable, max_batch_tokens: int = 512) -> None:
        config = EngineConfig(prefix_cache=False, max_batch_tokens=max_batch_tokens)
        self.watched = WatchedQueueing(executable) if isinstance(executable, Queueing) else Watched(executable)
        self.engine = LocalEngine(cast(Executable, self.watched), config)
        self.vocab = min(30000, executable.vocab_size)

    def run(self, row: str) -> list[Repeat]:
        """All repeats of a row (a key of `WORKLOADS`)."""
        return [self.repeat(row) for _ in range(SERVE_REPEATS if WORKLOADS[row].kind == "serve" else REPEATS)]

    def warm_up(self) -> None:
        """Answer a short prompt, as every engine does before it is timed."""
        self.generate(1, WARM_UP, 1)

    def repeat(self, row: str) -> Repeat:
        """One timed run of a row."""
        workload = WORKLOADS[row]
        if workload.kind == "decode":
            return self.decode(workload.prompt, workload.answer)
        return self.generate(workload.requests, workload.prompt, workload.answer)

    def generate(self, n: int, prompt: int, answer: int) -> Repeat:
        """`n` requests submitted at once, `prompt` and `answer` tokens each, until the last has ended."""
        prompts = self._prompts(n, prompt)
        before, started = self._start()
        for ids in prompts:
            self._submit(ids, answer)
        while self.engine.has_work:
            self._step()
        return self._end(before, started)

    def decode(self, prompt: int, count: int, n: int = 1) -> Repeat:
        """`count` greedy tokens of each of `n` sequences after `prompt` tokens, timed without the prompts and the first
        token of each. Raises ConfigError where several prompts do not fit into one step: the other prompts would be
        timed too."""
        if n > 1 and n * prompt > self.engine.limits.tokens:
            limit = self.engine.limits.tokens
            raise ConfigError(f"{n} prompts of {prompt} tokens are more than the {limit} of a step")
        for ids in self._prompts(n, prompt):
            self._submit(ids, count + 1)
        while not self._step():
            pass
        before, started = self._start()
        while self.engine.has_work:
            self._step()
        return self._end(before, started)

    def _start(self) -> tuple[EngineStats, float]:
        del self.watched.works[: -1 if self.engine.under_way else None]  # the last one is queued: its time counts
        return self.engine.stats(), time.perf_counter()

    def _end(self, before: EngineStats, started: float) -> Repeat:
        seconds = time.perf_counter() - started
        return Repeat(seconds, self.engine.stats().since(before), tuple(self.watched.works))

    def _prompts(self, n: int, length: int) -> list[list[int]]:
        return [token_ids(length, seed, self.vocab) for seed in range(n)]

    def _submit(self, ids: list[int], answer: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True)
        self.engine.submit(ids, params)

    def _step(self) -> int:
        """Run a step and return how many tokens it gave. Raises RooflineError when an answer failed."""
        events = self.engine.step()
        for event in events:
            if event.finish_reason == "error":
                raise RooflineError(f"the engine failed during the bench: {event.error}")
        return sum(len(event.ids) for event in events)


def best_of(repeats: Sequence[Repeat]) -> Repeat:
    """The fastest repeat."""
    return min(repeats, key=lambda repeat: repeat.seconds)


def row_record(name: str, repeats: Sequence[Repeat], roof: Roof) -> JsonObject:
    """The record of a row: every repeat, and the limits of the fastest one."""
    tokens, best = WORKLOADS[name].tokens, best_of(repeats)
    moved = best.stats.weight_bytes + best.stats.kv_bytes
    return {
        "seconds": [round(repeat.seconds, 6) for repeat in repeats],
        "tok_s": [round(tokens / repeat.seconds, 1) for repeat in repeats],
        "bytes_per_token": round(moved / tokens),
        "gb_s": round(moved / best.seconds / 1e9, 2),
        "gop_s": round(best.stats.flops / best.seconds / 1e9, 1),
        "steps": best.stats.steps,
        "python_share": round(best.stats.python_seconds / best.seconds, 4),
        **roof.record(best.seconds, moved),
    }


def report(rows: dict[str, JsonObject], head: JsonObject) -> JsonObject:
    """The record of a run: the best rate of each row under the keys that peers' records have, then the rows."""
    rates = {name: max(row["tok_s"]) for name, row in rows.items()}
    return {**head, **rates, "rows": rows}


def open_bench(model: str, load: LoadOptions = LoadOptions()) -> tuple[LoadedModel, Bench]:
    """Load a model with a cache for the largest workload, and warm it up. load: its sizes are replaced."""
    max_tokens = max(row.requests * (row.prompt + row.answer) for row in WORKLOADS.values())
    # Every request may leave its last page partly empty.
    load = replace(load, cache_tokens=max_tokens + 64 * 16, max_running=64)
    loaded = bundle.load(model, load, text=False)
    bench = Bench(loaded.executable)
    bench.warm_up()
    return loaded, bench


def bench_engine(
    model: str, rows: Sequence[str] | None = None, *, serve: bool = True, load: LoadOptions = LoadOptions()
) -> JsonObject:
    """Load `model` and run the workloads, each between two measurements of the roofs.

    Args:
        rows: run only rows whose key contains one of these; None runs all.
        serve: run the serve rows, which take longest.

    Raises ConfigError where `rows` name nothing.
    """
    names = chosen(rows, serve)
    if not names:
        raise ConfigError(f"no row matches; the rows are: {', '.join(WORKLOADS)}")
    loaded, bench = open_bench(model, load)
    try:
        figures = {}
        for name in names:
            roofs = AdjacentRoofs(loaded.executable, WORKLOADS[name].tokens_held)
            repeats = bench.run(name)
            best = best_of(repeats)
            figures[name] = row_record(name, repeats, roofs.roof(best.seconds, best.works))
        return {**report(figures, {"engine": "roofline", "load_s": round(loaded.load_seconds, 2)}), **setting(loaded)}
    finally:
        loaded.executable.close()


def setting(loaded: LoadedModel) -> JsonObject:
    """Model, machine and choices that figures depend on. Folders are cut from file names, since records are shared."""
    machine = detect()
    chosen = {**loaded.notes}
    if chosen.get("weights", "").startswith("bundle "):
        chosen["weights"] = f"bundle {Path(chosen['weights'].removeprefix('bundle ')).name}"
    return {
        "version": roofline.__version__,
        "model": Path(loaded.name).name,
        "fingerprint": loaded.executable.fingerprint,
        "chosen": chosen,
        "prefix_cache": "off",
        "speculation": "off",
        "repeats": {"best_of": REPEATS, "serve_best_of": SERVE_REPEATS},
        "machine": {"chip": machine.chip, "cores": machine.usable_cores, "memory_bytes": machine.memory_total},
    }
