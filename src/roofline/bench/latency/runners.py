"""What a rung of the ladder is timed through: one small interface over torch's model and over our engine."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

from roofline import bundle
from roofline.backends import table
from roofline.backends.base import CapturesGraphs
from roofline.bench.engine import Bench
from roofline.bench.latency.ladder import Rung, missing
from roofline.bench.peers.available import Here
from roofline.bundle import LoadedModel
from roofline.common.errors import UnsupportedError, describe_error
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.hardware.tuning.location import NOTHING_WON, SWITCHED_OFF
from roofline.weights.random_weights import pooled_checkpoint
from roofline.weights.to_hf import hf_config

STEP_TOKENS = {"cpu": 512, "gpu": 8192}  # tokens in a step of our engine; longer prompts are computed in chunks
PAGE_ROOM = 16  # every sequence may leave its last page partly empty


class Runner(Protocol):
    """A model that is ready to run. The first call of a kind may compile; it is timed like any other."""

    def prefill(self, batch: int, length: int) -> float:
        """Seconds from `batch` prompts of `length` tokens to the first token of each."""

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds of `steps` decoding steps of `batch` sequences after `context` tokens, whose own pass is left out."""

    def notes(self) -> JsonObject:
        """What a record says about this runner besides its figures."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True)
class Subject:
    """The model that is timed.

    source: as `bundle.load` takes it ("preset:NAME" or a folder); config: the canonical configuration; cut: whether it
    has fewer layers than the source; seed: of its random weights.
    """

    source: str
    config: JsonMapping
    cut: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """Without the folder it lies in: records are shared."""
        name = self.source.removeprefix("preset:").rstrip("/").rpartition("/")[2]
        return f"{name} cut to {self.config['layers']} layers" if self.cut else name


@dataclass(frozen=True)
class Most:
    """The largest sizes in a grid: sequences at once, tokens of all sequences together, tokens of one sequence, and
    prompt tokens that one decoding cell starts from."""

    batch: int
    tokens: int
    length: int
    started: int


class EngineRunner:
    """Our engine, through its own scheduler and paged cache.

    Args:
        backend: "cpu" or "gpu".
        tuned: use the kernels that `roofline tune` chose.
        graphs: replay decode steps as device graphs, on a GPU.
        shares_model_of: another runner whose loaded model this one uses too, since two may not fit a device.

    Raises UnsupportedError where `tuned` is asked for and nothing was tuned.
    """

    def __init__(
        self,
        subject: Subject,
        backend: str,
        most: Most,
        *,
        tuned: bool,
        graphs: bool = False,
        threads: int | None = None,
        shares_model_of: "EngineRunner | None" = None,
    ) -> None:
        self._tokens = max(STEP_TOKENS[backend], most.started)
        self._backend, self._tuned, self._graphs, self._owner = backend, tuned, graphs, shares_model_of is None
        owner = shares_model_of
        self.loaded: LoadedModel = owner.loaded if owner is not None else self._load(subject, most, threads)
        self._bench = Bench(self.loaded.executable, self._tokens)

    def _load(self, subject: Subject, most: Most, threads: int | None) -> LoadedModel:
        loaded = bundle.load(
            pooled_checkpoint(subject.config, subject.seed),
            backend=self._backend,
            threads=threads,
            tuned=self._tuned,
            text=False,
            cache_tokens=max(most.tokens + most.batch * PAGE_ROOM, most.length),
            max_model_len=most.length,
            max_running=most.batch,
            max_batch_tokens=self._tokens,
        )
        variants = loaded.notes.get("variants", "")
        if self._tuned and variants.startswith("default"):
            loaded.executable.close()
            raise _without_tuned(variants, subject, self._backend, threads)
        return loaded

    def serves(self, tuned: bool) -> bool:
        """Whether its model can be another runner's too."""
        return self._owner and self._tuned == tuned

    def prefill(self, batch: int, length: int) -> float:
        with self._switched():
            return self._bench.generate(batch, length, 1).seconds

    def decode(self, batch: int, context: int, steps: int) -> float:
        with self._switched():
            return self._bench.decode(context, steps, batch).seconds

    def notes(self) -> JsonObject:
        executable, notes = self.loaded.executable, dict(self.loaded.notes)
        if self._graphs and isinstance(executable, CapturesGraphs):
            notes["graphs"] = executable.graphs_captured()
        return notes

    def close(self) -> None:
        if self._owner:
            self.loaded.executable.close()

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Sets torch's process-wide switches for matrix products as this rung needs them, on a GPU.

        After an error a new engine is made, since requests that were still open would be timed with the next run.
        """
        from roofline.backends.gpu.runtime.libraries import summing_in_float32, switched

        gpu = self._backend == "gpu"
        executable = self.loaded.executable
        if isinstance(executable, CapturesGraphs):
            executable.captures = self._graphs
        try:
            with summing_in_float32() if gpu else nullcontext(), switched(self._tuned) if gpu else nullcontext():
                yield
        except Exception:
            self._bench = Bench(self.loaded.executable, self._tokens)
            raise


def _without_tuned(variants: str, subject: Subject, backend: str, threads: int | None) -> UnsupportedError:
    """Why the model has no tuned kernels, with what would give it some: nothing where it is tuned and no choice won."""
    what = "our engine with tuned kernels"
    if NOTHING_WON in variants:
        reason = "every default stayed when this model was tuned, so this rung is the one without tuned kernels"
        return UnsupportedError(what, reason)
    if SWITCHED_OFF in variants:
        return UnsupportedError(what, variants, ("without that variable",))
    command = "tune" if backend == "cpu" else "tune gemms"
    count = "" if threads is None or backend != "cpu" else f" --threads {threads}"
    first = f"roofline {command} {subject.source} --weights random:{subject.seed}{count}"
    then = "then this again" + (" with all layers" if subject.cut else "")
    return UnsupportedError(what, variants, (f"{first}, {then}",))


@dataclass
class Opened:
    """runners: by rung, in the ladder's order; missing: rung -> why it does not run here."""

    runners: dict[str, Runner] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Close every runner."""
        for runner in self.runners.values():
            runner.close()


def open_rungs(ladder: list[Rung], subject: Subject, here: Here, most: Most, threads: int | None = None) -> Opened:
    """Open every rung that runs here; torch's rungs share one model. here: see bench/peers/available.py."""
    opened, model = Opened(), None
    for rung in ladder:
        why = why_missing(rung, subject, here)
        try:
            if why:
                opened.missing[rung.name] = why
            elif rung.ours:
                backend = "cpu" if here.device == "cpu" else "gpu"
                tuned, graphs = (name in rung.techniques for name in ("tuned", "graphs"))
                ours = [runner for runner in opened.runners.values() if isinstance(runner, EngineRunner)]
                model_owner = next((runner for runner in ours if runner.serves(tuned)), None)
                opened.runners[rung.name] = EngineRunner(
                    subject, backend, most, tuned=tuned, graphs=graphs, threads=threads, shares_model_of=model_owner
                )
            else:
                from roofline.bench.peers.transformers_model import TransformersRunner, random_model

                model = model or random_model(hf_config(subject.config), here.device, subject.seed, threads)
                opened.runners[rung.name] = TransformersRunner(model, rung.techniques, subject.seed)
        except Exception as error:  # a rung that cannot run here is a result too
            opened.missing[rung.name] = describe_error(error)
    return opened


def why_missing(rung: Rung, subject: Subject, here: Here) -> str:
    """Why a rung cannot run in this process, empty where nothing is known against it."""
    return missing(rung, here, subject.config, table.names(), find_spec("roofline._native") is not None)
