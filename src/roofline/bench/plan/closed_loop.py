"""A closed loop on one engine: so many requests at a time, each replaced when it ends, on the engine's own clock.

The engine may be real, then this measures, or simulated, then its clock says what would have been measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roofline.bench.plan.decode_stretches import DecodeStretches
from roofline.bench.workloads import token_ids
from roofline.common.errors import CapacityError, ConfigError, RooflineError
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats

WAVES = 4  # how many times as many requests as run at once are counted, after as many that warm up


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request."""

    prompt: int
    answer: int


@dataclass(slots=True)
class Served:
    """A request: tokens, and its moments in seconds of the engine's clock. last: when its latest id came."""

    prompt: int
    answer: int
    submitted: float
    first: float | None = None
    last: float = 0.0
    ids: int = 0
    counted: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first id."""
        assert self.first is not None, "it has ended"
        return self.first - self.submitted

    @property
    def tpot(self) -> float | None:
        """Seconds for each id after the first; None where there is none."""
        assert self.first is not None, "it has ended"
        return (self.last - self.first) / (self.ids - 1) if self.ids > 1 else None

    @property
    def seconds(self) -> float:
        """From submission to the last id."""
        return self.last - self.submitted


@dataclass(frozen=True)
class Run:
    """What the counted part of a closed loop gave. ids: generated in it; ended: requests that ended in it, those among
    them that began before; stats: of the engine during it; simulated: the requests at a time of the run that it was
    taken from, 0 where it is a run itself."""

    concurrency: int
    requests: list[Served]
    seconds: float
    ids: int
    ended: int
    stats: EngineStats
    simulated: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.ids / self.seconds

    @property
    def requests_per_s(self) -> float:
        """Requests that ended a second."""
        return self.ended / self.seconds


class ClosedLoop:
    """Keeps `concurrency` requests in an engine, taking their lengths in turn. Counts after the first `concurrency`
    have ended, and until `waves` times as many more have.

    skips: whether simulated steps that only decode are taken without the scheduler (`decode_stretches.py`), which
    changes no figure.
    """

    def __init__(
        self,
        engine: LocalEngine,
        lengths: Sequence[Lengths],
        concurrency: int,
        waves: int = WAVES,
        skips: bool = True,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency {concurrency}: give at least 1")
        self._engine, self._lengths, self.concurrency = engine, lengths, concurrency
        self._most = concurrency * waves
        self._stretches = DecodeStretches(engine) if skips else None
        self._open: dict[str, Served] = {}
        self._begun = self._warmed = 0
        self._prompts: dict[int, list[int]] = {}
        self._started, self._before = 0.0, engine.stats()
        self._ids = self._ended = 0

    def run(self) -> Run:
        """Raises RooflineError where an answer failed, CapacityError where a request never fits."""
        engine, clock = self._engine, self._engine.executable.clock
        done: list[Served] = []
        for _ in range(self.concurrency):
            self._submit()
        while len(done) < self._most:
            self._skip()
            events = engine.step()
            now = clock.now()
            ended = 0
            for event in events:
                request = self._open[event.request_id]
                if event.finish_reason == "error":
                    raise RooflineError(f"a request failed: {event.error}")
                if event.ids:
                    request.first = now if request.first is None else request.first
                    request.last, request.ids = now, request.ids + len(event.ids)
                    self._ids += len(event.ids)
                if event.finish_reason is not None:
                    del self._open[event.request_id]
                    ended += 1
                    if request.counted:
                        done.append(request)
            for _ in range(ended):
                self._replace(now)
        seconds, stats = clock.now() - self._started, engine.stats().since(self._before)
        engine.abort_all()
        while engine.has_work:
            engine.step()
        return Run(
            concurrency=self.concurrency,
            requests=done,
            seconds=seconds,
            ids=self._ids,
            ended=self._ended,
            stats=stats,
        )

    def _skip(self) -> None:
        """Take the decode steps before the next end at once, where the engine is simulated."""
        count = self._stretches.skip() if self._stretches is not None else 0
        if count:
            running = self._engine.state.running
            self._ids += count * len(running)
            for sequence in running:
                self._open[sequence.request.id].ids += count

    def _replace(self, now: float) -> None:
        """Another request in place of one that has ended."""
        if self._warmed == self.concurrency:
            self._ended += 1
        else:
            self._warmed += 1
            if self._warmed == self.concurrency:
                self._started, self._before, self._ids = now, self._engine.stats(), 0
        self._submit()

    def _submit(self) -> None:
        lengths = self._lengths[self._begun % len(self._lengths)]
        longest = self._engine.limits.max_model_len
        if lengths.prompt + lengths.answer > longest:
            remedy = "Shorten prompt and answer, or take more devices."
            raise CapacityError(
                "a request of the workload", lengths.prompt + lengths.answer, longest, "tokens of a sequence", remedy
            )
        prompt = self._prompts.get(lengths.prompt)
        if prompt is None:
            prompt = self._prompts[lengths.prompt] = token_ids(lengths.prompt, self._begun, self._vocab)
        params = SamplingParams(temperature=0.0, max_tokens=lengths.answer, min_tokens=0, ignore_eos=True, seed=0)
        name = self._engine.submit(prompt, params)
        served = Served(lengths.prompt, lengths.answer, self._engine.executable.clock.now())
        served.counted = self._warmed >= self.concurrency
        self._open[name] = served
        self._begun += 1

    @property
    def _vocab(self) -> int:
        return min(30000, self._engine.executable.vocab_size)
