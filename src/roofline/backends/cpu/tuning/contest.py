"""One contest: which variant of a group of ops is fastest, decided from interleaved rounds without touching a clock.

A round holds every entry once in random order, and the default twice: the two give the noise. Three stages, each on
samples of its own, so that what was lucky in one must prove itself in the next: `screen` all candidates, `race` the
best and a combination of them, `confirm` the winner.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from roofline.backends.cpu.tuning.variants import OpGroup, combined
from roofline.backends.paired import LEAST_PAIRS, interval, noise
from roofline.common.json_types import JsonMapping, JsonObject

STAGES = ("screen", "race", "confirm")
FINALISTS = 3
BUSY = 0.1  # where two runs of one variant differ by more, the machine was too busy to tell
LEAST_WIN = 0.005  # a gain below half a percent is not worth a choice


@dataclass(frozen=True)
class Rounds:
    """Rounds of each stage."""

    screen: int = 10
    race: int = 16
    confirm: int = 40

    def scaled(self, share: float) -> "Rounds":
        """Fewer rounds for a smaller budget; never so few that nothing could win."""
        least = (4, 6, 2 * LEAST_PAIRS)
        return Rounds(*(max(n, min(of, round(of * share))) for n, of in zip(least, vars(self).values(), strict=True)))

    def slots(self, candidates: int) -> int:
        """Forwards of a contest between that many candidates."""
        if not candidates:
            return 0
        return (candidates + 2) * self.screen + (min(FINALISTS, candidates) + 3) * self.race + 3 * self.confirm


@dataclass(frozen=True)
class ContestOutcome:
    """variant: the choice; reason: in words; figures: see hardware.tuning.store.TuningRecord."""

    variant: str
    reason: str
    figures: Mapping[str, object]


class Contest:
    """The state of a contest. Ask `entry`, run a step with it at every point, and `tell` the seconds.

    Args:
        default: the variant to beat.
        candidates: what may win; empty decides for the default at once.
        seed: of the order of entries.
    """

    def __init__(self, group: OpGroup, default: str, candidates: Sequence[str], rounds: Rounds, seed: int = 0) -> None:
        self.group, self.default, self.rounds = group, default, rounds
        self.candidates = [name for name in candidates if name != default]
        self.stage, self.names = 0, list(self.candidates)
        self.tried: dict[str, float] = {}
        self._random = random.Random(seed)
        self._default_seconds: list[float] = []
        self._begin_stage()
        self.outcome: ContestOutcome | None = None
        if not self.names:
            self.outcome = ContestOutcome(default, "there is nothing to choose from", {})

    def entry(self) -> str:
        """The variant to run next."""
        return self.default if self.outcome or self._queue[0] < 2 else self.names[self._queue[0] - 2]

    def tell(self, seconds: Sequence[float]) -> None:
        """Seconds of the entry's step at each point."""
        if self.outcome:
            return
        self._round[self._queue.pop(0)] = [math.log(s) for s in seconds]
        if not self._queue:
            self._end_round()

    def state(self) -> JsonObject:
        """All whole rounds so far, as JSON values, for `resume`."""
        return {
            "default": self.default,
            "candidates": self.candidates,
            "stage": self.stage,
            "names": self.names,
            "logs": self._logs,
            "same": self._same,
            "default_seconds": self._default_seconds,
            "tried": self.tried,
        }

    def resume(self, state: JsonMapping) -> bool:
        """Go on where `state` stopped; False, changing nothing, where it belongs to another contest."""
        if self.outcome or (state["default"], state["candidates"]) != (self.default, self.candidates):
            return False
        self.stage, self.names = int(state["stage"]), [str(name) for name in state["names"]]
        self._begin_stage()
        self._logs |= {name: [float(x) for x in state["logs"][name]] for name in self.names}
        self._same += [float(x) for x in state["same"]]
        self._default_seconds = [float(x) for x in state["default_seconds"]]
        self.tried = {str(name): float(ratio) for name, ratio in state["tried"].items()}
        return True

    def _begin_stage(self) -> None:
        self._logs: dict[str, list[float]] = {name: [] for name in self.names}
        self._same: list[float] = []
        self._begin_round()

    def _begin_round(self) -> None:
        self._queue = list(range(len(self.names) + 2))  # 0 and 1 are the default
        self._random.shuffle(self._queue)
        self._round: dict[int, list[float]] = {}

    def _end_round(self) -> None:
        first, second = self._round[0], self._round[1]
        points = range(len(first))
        self._same.append(sum(second[p] - first[p] for p in points) / len(first))
        for i, name in enumerate(self.names):
            own = self._round[i + 2]
            self._logs[name].append(sum(own[p] - (first[p] + second[p]) / 2 for p in points) / len(first))
        self._default_seconds.append(math.exp((first[0] + second[0]) / 2))
        self._begin_round()
        if len(self._same) >= getattr(self.rounds, STAGES[self.stage]):
            self._end_stage()

    def _end_stage(self) -> None:
        medians = {name: median(logs) for name, logs in self._logs.items()}
        self.tried |= {name: round(math.exp(value), 4) for name, value in medians.items()}
        if STAGES[self.stage] == "confirm":
            self.outcome = self._judge(self.names[0])
            return
        faster = sorted((name for name in self.names if medians[name] < 0), key=medians.__getitem__)
        if not faster:
            self._keep("none of the candidates was faster")
            return
        if STAGES[self.stage] == "screen":
            self.names = faster[:FINALISTS]
            mixture = combined([name for name in faster if medians[name] < -LEAST_WIN])
            if mixture not in (*self.names, self.default, "default"):
                self.names.append(mixture)
        elif math.exp(medians[faster[0]]) > 1 - LEAST_WIN:
            self._keep(f"the best, {faster[0]}, gained less than {LEAST_WIN:.1%}")
            return
        else:
            self.names = faster[:1]
        self.stage += 1
        self._begin_stage()

    def _keep(self, reason: str) -> None:
        self.outcome = ContestOutcome(self.default, reason, self._figures())

    def _judge(self, name: str) -> ContestOutcome:
        """The winner of the race has to win by more than the noise on fresh pairs."""
        gain, same = interval(self._logs[name]), noise(self._same)
        wins = gain.high < 1 - max(same, LEAST_WIN)
        figures = self._figures() | {"ratio": gain.ratio, "low": gain.low, "high": gain.high, "noise": same}
        figures |= {"rounds": len(self._same), "best": name}
        if wins:
            return ContestOutcome(name, f"faster by {1 - gain.ratio:.1%}", figures)
        if gain.ratio < 1:
            reason = f"{name} was faster by {1 - gain.ratio:.1%}, which does not exceed the noise"
        else:
            reason = f"{name} did not win again on fresh measurements"
        return ContestOutcome(self.default, reason, figures)

    def _figures(self) -> dict[str, object]:
        """busy: two runs of the default differed by so much in most rounds that the outcome says little."""
        busy = bool(self._same) and median(abs(x) for x in self._same) > BUSY
        figures: dict[str, object] = {"busy": busy}
        figures["tried"] = dict(sorted(self.tried.items(), key=lambda item: item[1]))
        figures["noise"] = noise(self._same) if len(self._same) >= LEAST_PAIRS else None
        if self._default_seconds:
            figures["default_us"] = round(median(self._default_seconds) * 1e6, 2)
        return figures
