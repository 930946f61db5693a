"""Training beside transformers' Trainer and a plain compiled torch loop: one model, one data set, turns in one run.

    python -m benchmarks.train -o benchmarks/records/DATE-train.json [--rounds 3] [--steps 20]

Each contestant is a process of its own that takes `steps` steps when its turn comes and waits otherwise; its rate is
the median over its steps, those of the warm-up left out. Needs the packages transformers and accelerate. The machine
should have nothing else to do.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
WARM = 3  # steps of the first turn that do not count: compilation is in them


@dataclass(frozen=True)
class Task:
    """What all of them train: a Llama of random weights on rows of random ids, AdamW, clipping, bf16 autocast."""

    width: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 6
    ffn: int = 1024
    vocab: int = 8192
    length: int = 512
    batch: int = 8
    lr: float = 3e-4
    threads: int = 2

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.batch


CONTESTANTS = ("roofline", "roofline eager", "trainer", "trainer compiled", "plain compiled", "plain eager")


class Contestant:
    """A process that trains when it is told to."""

    module = "benchmarks.train_worker"

    def __init__(self, name: str, task: Any, folder: Path) -> None:
        self.name, self.seconds, self.losses, self.peak = name, [], [], 0  # type: ignore[var-annotated]
        command = [sys.executable, "-m", self.module, name, json.dumps(asdict(task)), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._told()

    def turn(self, steps: int) -> dict[str, Any]:
        """Take steps; what the process says of them."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        told = self._told()
        self.seconds.append(told["seconds"])
        self.losses += told["losses"]
        self.peak = told["peak"]
        return told

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):  # what others print on the way is theirs
                return dict(json.loads(line[1:]))
        raise SystemExit(f"{self.name} ended: its error stands above")


def measure(task: Task, names: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Rates of all, in turns."""
    with tempfile.TemporaryDirectory(prefix="roofline-bench-train-") as folder:
        place = Path(folder)
        rows(task, place, (rounds * steps + WARM) * task.batch)
        field = [Contestant(name, task, place) for name in names]
        for each in field:
            each.turn(WARM)
            each.seconds.clear()
        for number in range(rounds):
            for each in field if number % 2 == 0 else reversed(field):
                each.turn(steps)
                rate = task.tokens / statistics.median(each.seconds[-1])
                print(f"round {number + 1}, {each.name}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        for each in field:
            each.end()
    return {each.name: result(each, task) for each in field}


def result(each: Contestant, task: Task) -> dict[str, Any]:
    """Medians over all steps and over each turn; the peak of its memory."""
    every = [second for turn in each.seconds for second in turn]
    return {
        "tokens_per_s": round(task.tokens / statistics.median(every), 1),
        "turns": [round(task.tokens / statistics.median(turn), 1) for turn in each.seconds],
        "step_s": round(statistics.median(every), 4),
        "peak_bytes": each.peak,
        "first_loss": each.losses[0],
        "last_loss": each.losses[-1],
    }


def rows(task: Task, folder: Path, count: int) -> None:
    """A data set that has something to learn: random walks over the ids."""
    from roofline.train.data.mds import ShardWriter

    rng = np.random.default_rng(1)
    steps = rng.integers(0, 8, (count, task.length))
    walks = (rng.integers(0, task.vocab, (count, 1)) + np.cumsum(steps, 1)) % task.vocab
    np.save(folder / "rows.npy", walks.astype(np.int64))
    with ShardWriter(folder / "shards", {"tokens": f"ndarray:uint16:{task.length}"}) as writer:
        for row in walks:
            writer.write({"tokens": row.astype(np.uint16)})


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--task", default="{}", help="JSON of what is other than the defaults")
    given = parser.parse_args()
    task = Task(**json.loads(given.task))
    found = measure(task, given.only.split(","), given.rounds, given.steps)
    record = {"date": datetime.date.today().isoformat(), "task": asdict(task), "results": found}
    print(json.dumps(record, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
