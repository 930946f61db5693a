"""Fine-tuning beside peft with transformers' Trainer: one model, one adapter to begin with, one data set, in turns.

    python -m benchmarks.finetune -o benchmarks/records/DATE-finetune.json [--model MODEL] [--rounds 6] [--steps 12]

Ours and peft's pad each batch to its longest sample and take the same samples in each step; ours once more with packed
samples tells the gain of packing. Each is a process of its own that takes `steps` steps when its turn comes and waits
otherwise. Their losses are compared as `roofline parity` does, for which rounds x steps must be 64 at least. Needs the
packages peft, transformers and accelerate. The machine should have nothing else to do.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train import WARM, Contestant

OURS, PACKED, PEFT = "roofline", "roofline packed", "peft"
CONTESTANTS = (OURS, PACKED, PEFT)  # ours begins: peft loads the adapter that it begins with
DOCUMENTS = Path(__file__).parents[1] / "docs"
SPEED, MEMORY = 1.5, 0.8  # what ours must reach beside peft's


@dataclass(frozen=True)
class Task:
    """What all of them train: LoRA beside every linear layer of a model in bf16, AdamW, clipping, bf16 autocast, on
    passages of this project's documents whose lengths are evenly spread; the last quarter of each is trained on."""

    length: int = 512
    shortest: int = 32
    batch: int = 4
    rank: int = 16
    alpha: int = 32
    lr: float = 2e-4
    threads: int = 2

    @property
    def packed(self) -> int:
        """Rows of a step of packed samples, so that it has about as many tokens."""
        return max(1, round(self.batch * (self.length + self.shortest) / 2 / self.length))


class Tuner(Contestant):
    """A contestant that says how many tokens each step had, without and with padding."""

    module = "benchmarks.finetune_worker"

    def __init__(self, name: str, task: Task, folder: Path) -> None:
        self.real: list[list[int]] = []  # tokens of each step, by turns
        self.computed: list[list[int]] = []
        super().__init__(name, task, folder)

    def turn(self, steps: int) -> dict[str, Any]:
        told = super().turn(steps)
        self.real.append(told["real"])
        self.computed.append(told["computed"])
        return told

    def forget(self) -> None:
        """Count from now on."""
        for turns in (self.seconds, self.real, self.computed):
            turns.clear()

    def rates(self) -> list[float]:
        """Tokens a second of each turn, without padding."""
        return [sum(real) / sum(seconds) for real, seconds in zip(self.real, self.seconds, strict=True)]


def measure(task: Task, model: str, names: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Figures of each, ratios of ours to peft's, and what parity says of their losses."""
    with tempfile.TemporaryDirectory(prefix="roofline-bench-finetune-") as folder:
        place = Path(folder)
        prepare(task, model, place, (rounds * steps + WARM) * task.batch)
        field = [Tuner(name, task, place) for name in names]
        for each in field:
            each.turn(WARM)
            each.forget()
        for number in range(rounds):
            for each in field if number % 2 == 0 else reversed(field):
                each.turn(steps)
                print(f"round {number + 1}, {each.name}: {each.rates()[-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
        for each in field:
            each.end()
    return {"results": {each.name: result(each) for each in field}, **compared({each.name: each for each in field})}


def result(each: Tuner) -> dict[str, Any]:
    """Rates over all steps and of each turn; the peak of its memory behind the first steps."""
    seconds, real, computed = (
        [value for turn in turns for value in turn] for turns in (each.seconds, each.real, each.computed)
    )
    return {
        "tokens_per_s": round(sum(real) / sum(seconds), 1),
        "with_padding_per_s": round(sum(computed) / sum(seconds), 1),
        "padding_share": round(1 - sum(real) / sum(computed), 4),
        "turns": [round(rate, 1) for rate in each.rates()],
        "step_s": {"p50": round(statistics.median(seconds), 4), "p95": round(float(np.quantile(seconds, 0.95)), 4)},
        "peak_bytes": each.peak,
        "losses": [round(loss, 6) for loss in each.losses],
    }


def compared(field: dict[str, Tuner]) -> dict[str, Any]:
    """Medians over the rounds of ours to peft's in the same round, and of packed to padded."""
    found: dict[str, Any] = {}
    if OURS in field and PEFT in field:
        ours, theirs = field[OURS], field[PEFT]
        if ours.real != theirs.real:
            raise SystemExit("the two did not train on the same samples in each step: nothing is compared")
        speed, memory = _ratio(ours, theirs), round(ours.peak / theirs.peak, 3)
        found["to_peft"] = {"tokens_per_s": speed, "peak_memory": memory, "parity": parity(ours, theirs)}
        found["reached"] = {"tokens_per_s": speed >= SPEED, "peak_memory": memory <= MEMORY}
    if OURS in field and PACKED in field:
        found["packed_to_padded"] = {"tokens_per_s": _ratio(field[PACKED], field[OURS])}
    return found


def _ratio(one: Tuner, other: Tuner) -> float:
    return round(statistics.median(a / b for a, b in zip(one.rates(), other.rates(), strict=True)), 3)


def parity(ours: Tuner, theirs: Tuner) -> dict[str, Any]:
    """What `roofline parity` says of their losses."""
    from roofline.train.parity.compare import compare
    from roofline.train.parity.recorded_run import RecordedRun

    def run(each: Tuner) -> RecordedRun:
        losses = np.array(each.losses)
        steps = np.arange(1, len(losses) + 1)
        return RecordedRun(Path(each.name), steps, losses, np.full(len(losses), np.nan), (), None, ())

    said = compare(run(ours), run(theirs))
    difference = np.array(theirs.losses) - np.array(ours.losses)
    return {
        "verdict": said.verdict,
        "why": said.why,
        "mean_difference": float(difference.mean()),
        "largest_difference": float(np.abs(difference).max()),
    }


def prepare(task: Task, model: str, folder: Path, count: int) -> None:
    """The model as a folder of safetensors in bf16, and the samples: for peft, padded and packed."""
    from roofline.bundle.rewrite import RewriteWork, write_safetensors
    from roofline.train.finetune.packing import pack
    from roofline.weights.checkpoint import open_checkpoint
    from roofline.weights.sources import resolve

    checkpoint = open_checkpoint(resolve(model))
    write_safetensors(checkpoint, folder / "model", "BF16", RewriteWork())
    samples = passages(task, model, count)
    np.savez(folder / "samples.npz", *samples)
    _shards(task, [[number] for number in range(count)], samples, folder / "padded")
    _shards(task, pack([len(sample) for sample in samples], task.length), samples, folder / "packed")


def passages(task: Task, model: str, count: int) -> list[np.ndarray]:
    """Token ids of passages that begin anywhere in the documents."""
    from roofline.bench.serving.recount import tokenizer_of

    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer: name a model that has one")
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCUMENTS.rglob("*.md")))
    ids = np.array(tokenizer.encode(text, add_special=False), np.int64)
    rng = np.random.default_rng(1)
    lengths = rng.integers(task.shortest, task.length + 1, count)
    return [ids[start : start + length] for length in lengths for start in rng.integers(0, len(ids) - length, 1)]


def trained(sample: np.ndarray) -> np.ndarray:
    """Which tokens of a sample are targets, bool [tokens]: the last quarter."""
    return np.arange(len(sample)) >= len(sample) * 3 // 4


def _shards(task: Task, rows: list[list[int]], samples: list[np.ndarray], folder: Path) -> None:
    from roofline.train.data.mds import ShardWriter
    from roofline.train.finetune.prepare import COLUMNS

    with ShardWriter(folder, COLUMNS) as writer:
        for numbers in rows:
            members = [samples[number] for number in numbers]
            writer.write(
                {
                    "tokens": np.concatenate(members).astype(np.uint32),
                    "documents": np.array([len(member) for member in members], np.uint32),
                    "trained": np.concatenate([trained(member) for member in members]).astype(np.uint8),
                }
            )


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--task", default="{}", help="JSON of what is other than the defaults")
    given = parser.parse_args()
    task = Task(**json.loads(given.task))
    record = {
        "date": datetime.date.today().isoformat(),
        "model": given.model,
        "task": asdict(task),
        "software": software(),
        **measure(task, given.model, given.only.split(","), given.rounds, given.steps),
    }
    print(json.dumps(record, indent=1))
    print(table(record), file=sys.stderr)
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict[str, Any]) -> str:
    """The record as Markdown, for documents."""
    lines = ["| | tokens/s (of the turns) | with padding | step, p50 and p95 | peak memory |", "|---|---|---|---|---|"]
    for name, each in record["results"].items():
        turns = f"{each['tokens_per_s']:,.0f} ({min(each['turns']):,.0f} to {max(each['turns']):,.0f})"
        step = f"{each['step_s']['p50']:.2f} s, {each['step_s']['p95']:.2f} s"
        cells = [name, turns, f"{each['with_padding_per_s']:,.0f}", step, f"{each['peak_bytes'] / 1e9:.2f} GB"]
        lines.append(f"| {' | '.join(cells)} |")
    if "to_peft" in record:
        ratios, said = record["to_peft"], record["to_peft"]["parity"]
        lines.append(
            f"\nOurs to peft's, padded alike: {ratios['tokens_per_s']:.2f} x the tokens/s and "
            f"{ratios['peak_memory']:.2f} x the memory; losses {said['verdict']} ({said['why']})."
        )
    if "packed_to_padded" in record:
        lines.append(f"\nPacked to padded: {record['packed_to_padded']['tokens_per_s']:.2f} x the tokens/s.")
    return "\n".join(lines)


def software() -> dict[str, str | None]:
    """Versions of all that took part, and the chip."""
    from importlib.metadata import version

    from roofline.hardware.detect import detect
    from roofline.train.report.machine import versions

    theirs = {name: version(name) for name in ("transformers", "peft", "accelerate")}
    return {**versions(), **theirs, "chip": detect().chip}


if __name__ == "__main__":
    main()
