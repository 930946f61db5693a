"""The engine's own speed on the workloads every peer is timed on, each row beside the limit of this chip.

Prefix cache and speculation are off. All repeats are kept; a row's figure is that of its fastest repeat.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roofline.backends.base import Executable
from roofline.bench import workloads
from roofline.common.errors import ConfigError, RooflineError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats

REPEATS, SERVE_REPEATS = 3, 2
TOLERANCE = 1.02  # a share of the roof above this is an error of the measurement


@dataclass(frozen=True)
class Repeat:
    """One timed run: seconds, and what the engine counted during it."""

    seconds: float
    stats: EngineStats

    def share(self) -> float | None:
        """Time at the measured roofs / measured time; None when no roofs are known."""
        return self.stats.limit_seconds / self.seconds if self.stats.priced_seconds else None


class Bench:
    """Runs the workloads through a LocalEngine.

    Args:
        executable: a loaded model; it must hold the largest workload's tokens in its cache to run it as it is meant.
    """

    def __init__(self, executable: Executable, max_batch_tokens: int = 512) -> None:
        config = EngineConfig(prefix_cache=False, max_batch_tokens=max_batch_tokens)
        self.engine = LocalEngine(executable, config)
        self.vocab = min(30000, executable.vocab_size)

    def run(self, rows: Sequence[str]) -> dict[str, list[Repeat]]:
        """All repeats of each row in `rows` (keys as in `workloads.row_names`)."""
        runs: dict[str, tuple[int, Callable[[], Repeat]]] = {}
        for n in workloads.PREFILL:
            runs[workloads.prefill_name(n)] = (REPEATS, lambda n=n: self.generate(1, n, 1))  # type: ignore[misc]
        for n, k in workloads.DECODE:
            runs[workloads.decode_name(n)] = (REPEATS, lambda n=n, k=k: self.decode(n, k))  # type: ignore[misc]
        for n, i, o in workloads.SERVE:
            run = lambda n=n, i=i, o=o: self.generate(n, i, o)  # type: ignore[misc]  # noqa: E731
            runs[workloads.serve_name(n, i, o)] = (SERVE_REPEATS, run)
        self.generate(1, workloads.WARM_UP, 1)
        return {name: [runs[name][1]() for _ in range(runs[name][0])] for name in rows}

    def generate(self, n: int, prompt: int, answer: int) -> Repeat:
        """`n` requests submitted at once, `prompt` and `answer` tokens each, until the last has ended."""
        before, started = self.engine.stats(), time.perf_counter()
        for seed in range(n):
            self._submit(prompt, answer, seed)
        while self.engine.has_work:
            self._step()
        return Repeat(time.perf_counter() - started, self.engine.stats().since(before))

    def decode(self, prompt: int, count: int) -> Repeat:
        """`count` greedy tokens after `prompt` tokens; the prompt's time and its first token are not in it."""
        self._submit(prompt, count + 1, 0)
        while not self._step():
            pass
        before, started = self.engine.stats(), time.perf_counter()
        while self.engine.has_work:
            self._step()
        return Repeat(time.perf_counter() - started, self.engine.stats().since(before))

    def _submit(self, prompt: int, answer: int, seed: int) -> None:
        ids = workloads.token_ids(prompt, seed, self.vocab)
        params = SamplingParams(temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True)
        self.engine.submit(ids, params)

    def _step(self) -> int:
        """Run a step; how many tokens it gave. A failed answer would time something else, so it ends the bench."""
        events = self.engine.step()
        for event in events:
            if event.finish_reason == "error":
                raise RooflineError(f"the engine failed during the bench: {event.error}")
        return sum(len(event.ids) for event in events)


def tokens_of(row: str) -> int:
    """Tokens that a row's rate counts: prompt tokens of prefill, generated tokens of the others."""
    counts = {
        **{workloads.prefill_name(n): n for n in workloads.PREFILL},
        **{workloads.decode_name(n): k for n, k in workloads.DECODE},
        **{workloads.serve_name(n, i, o): n * o for n, i, o in workloads.SERVE},
    }
    return counts[row]


def report(figures: dict[str, list[Repeat]], head: dict[str, Any]) -> dict[str, Any]:
    """The record of a run: the peers' keys on top, then per row what bounds it.

    Raises RooflineError when a row is faster than the measured roof: then one of the two measurements is wrong.
    """
    record = dict(head)
    rows: dict[str, dict[str, Any]] = {}
    for name, repeats in figures.items():
        best = min(repeats, key=lambda repeat: repeat.seconds)
        record[name] = round(tokens_of(name) / best.seconds, 1)
        share = best.share()
        if share is not None and share > TOLERANCE:
            raise RooflineError(
                f"{name} reached {share:.0%} of the measured roof, which cannot be. "
                "The roofs were measured on a busy machine: run `roofline doctor --measure` on an idle one."
            )
        moved = best.stats.weight_bytes + best.stats.kv_bytes
        rows[name] = {
            "seconds": [round(repeat.seconds, 6) for repeat in repeats],
            "tok_s": [round(tokens_of(name) / repeat.seconds, 1) for repeat in repeats],
            "gb_s": round(moved / best.seconds / 1e9, 2),
            "gop_s": round(best.stats.flops / best.seconds / 1e9, 1),
            "share_of_roof": None if share is None else round(share, 4),
            "steps": best.stats.steps,
            "python_share": round(best.stats.python_seconds / best.seconds, 4),
        }
    return {**record, "rows": rows}


def bench_engine(
    model: str,
    *,
    threads: int | None = None,
    isa: str | None = None,
    weights: str | None = None,
    rows: Sequence[str] | None = None,
    serve: bool = True,
    measure: bool = True,
) -> dict[str, Any]:
    """Load `model` on the CPU backend and run the workloads. Roofs are measured first, in this process.

    Args:
        rows: run only rows whose key contains one of these; None runs all.
        serve: run the serve rows, which take longest.
        measure: measure the roofs again even where they are stored (the higher figures are kept).

    Raises ConfigError when `rows` name nothing.
    """
    from dataclasses import asdict

    import roofline
    from roofline import bundle
    from roofline.backends.cpu.roofs import ensure_roofs
    from roofline.hardware.detect import detect

    names = workloads.chosen(rows, serve)
    if not names:
        raise ConfigError(f"no row matches; the rows are: {', '.join(workloads.row_names())}")
    roofs = ensure_roofs(quick=True, threads=threads, isa=isa, again=measure)
    most = max(n * (i + o) for n, i, o in workloads.SERVE)
    loaded = bundle.load(
        model,
        threads=threads,
        isa=isa,
        weights=weights,
        cache_tokens=most + 64 * 16,  # every request may leave its last page partly empty
        max_running=64,
        text=False,
    )
    try:
        figures = Bench(loaded.executable).run(names)
    finally:
        loaded.executable.close()
    machine = detect()
    head = {"engine": "roofline", "load_s": round(loaded.load_seconds, 2)}
    setting = {
        "version": roofline.__version__,
        "model": loaded.name,
        "fingerprint": loaded.executable.fingerprint,
        "chosen": dict(loaded.notes),
        "prefix_cache": "off",
        "speculation": "off",
        "repeats": {"best_of": REPEATS, "serve_best_of": SERVE_REPEATS},
        "machine": {"chip": machine.chip, "cores": machine.usable_cores, "memory_bytes": machine.memory_total},
        "roofs": asdict(roofs),
    }
    return {**report(figures, head), **setting}
