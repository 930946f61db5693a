"""Fine-tunes a model with one batch size after the other, each in a process of its own, and makes a point of each."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roofline.bench.lora.point import Outcome, point_of
from roofline.bench.lora.rows import samples, write_rows
from roofline.bench.results.point import Point
from roofline.bench.serving.surroundings import this_host
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.common.units import now_utc

KILLED = "the process was killed, as the system does when its memory runs out"


@dataclass(frozen=True)
class Settings:
    """What is timed. model: files or a catalogue name; epochs: over the same data, instead of `steps` of each size."""

    model: str
    method: str = "lora"
    base: str = "bf16"
    rank: int = 16
    batches: tuple[int, ...] = (1, 16, 64, 128)
    steps: int = 200
    warmup: int = 10
    epochs: int | None = None
    length: int = 512
    seed: int = 17
    changes: tuple[str, ...] = ()

    def preset(self, batch: int) -> str:
        """What two points share whose speeds may be compared."""
        kept = "full" if self.method == "full" else f"{self.method} of rank {self.rank} beside {self.base}"
        return ", ".join([kept, f"batch {batch} of {self.length} tokens", *self.changes])

    @property
    def command(self) -> str:
        """Which measures the same again."""
        words = ["roofline", "bench", "lora", self.model, "--method", self.method]
        words += [] if self.method == "full" else ["--base", self.base, "--rank", str(self.rank)]
        words += ["--batches", ",".join(map(str, self.batches))]
        words += ["--steps", str(self.steps)] if self.epochs is None else ["--epochs", str(self.epochs)]
        words += ["--warmup", str(self.warmup), "--max-seq-len", str(self.length), "--seed", str(self.seed)]
        return shlex.join([*words, *(word for change in self.changes for word in ("--set", change))])


def sweep(settings: Settings, show: bool = True) -> Iterator[Point]:
    """A point for each batch size, as soon as it is measured; one that does not fit into memory has no figures but says
    why. show: lines of the runs on stderr.

    Raises ConfigError, UnsupportedError for what no batch size could be measured with; RooflineError: a run failed.
    """
    from roofline.train.config.schema import ModelSection
    from roofline.train.model.shapes import model_config

    section = ModelSection(name="hf_causal_lm", pretrained_model_name_or_path=settings.model)
    vocab = model_config(section, settings.length)["vocab"]
    drawn, run = samples(settings.length, settings.seed), os.urandom(8).hex()
    with tempfile.TemporaryDirectory(prefix="roofline-bench-lora-") as place:
        folder = Path(place)
        write_rows(drawn, vocab, settings.seed, folder / "rows")
        configs = {batch: _written(settings, batch, folder) for batch in settings.batches}
        for batch, config in configs.items():
            if show:
                print(f"batch {batch}:", file=sys.stderr, flush=True)
            started, host = now_utc(), this_host()
            outcome = measure(config, show)
            yield point_of(settings, batch, drawn, outcome, run=run, started=started, host=host)


def measure(config: Path, show: bool) -> Outcome:
    """What the run of a configuration came to, in a process of its own."""
    result = config.with_suffix(".result")
    command = [sys.executable, "-m", "roofline.bench.lora.worker", str(config), str(result), *["--show"] * show]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        status = process.wait()
    if status == -signal.SIGKILL:
        return Outcome(out_of_memory=KILLED)
    if status > 128:
        raise KeyboardInterrupt
    if status or not result.exists():
        raise RooflineError(f"{config.stem} failed; what it said stands above")
    return Outcome(**json.loads(result.read_text()))


def _written(settings: Settings, batch: int, folder: Path) -> Path:
    """The file of a run's checked configuration, in the folder of the rows. Raises ConfigError, UnsupportedError."""
    from roofline.train.config.read import parse_config
    from roofline.train.run import preflight

    values = _config(settings, batch, folder)
    path = folder / f"{values['run_name']}.json"
    config = parse_config(values, path.name, settings.changes, preflight.faults)
    for key in ("run_folder", "global_train_batch_size", "max_seq_len", "max_duration"):
        if getattr(config, key) != values[key]:
            raise ConfigError(
                f"--set {key}: each run has its own here; use --batches, --max-seq-len, --steps, --epochs"
            )
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


def _config(settings: Settings, batch: int, folder: Path) -> JsonObject:
    method: JsonObject = {"method": settings.method}
    if settings.method != "full":
        method |= {"rank": settings.rank, "alpha": 2 * settings.rank, "base": settings.base}
    total = f"{settings.warmup + settings.steps}ba" if settings.epochs is None else f"{settings.epochs}ep"
    return {
        "run_name": f"lora-batch-{batch}",
        "run_folder": str(folder / f"run-{batch}"),
        "max_seq_len": settings.length,
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": settings.model},
        "adapter": method,
        "train_loader": {"name": "finetuning", "dataset": {"local": str(folder / "rows"), "shuffle": True}},
        "optimizer": {"name": "adamw", "lr": 2e-4 if settings.method != "full" else 1e-5},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "0.03dur"},
        "algorithms": {"gradient_clipping": {"clipping_threshold": 1.0}},
        "max_duration": total,
        "global_train_batch_size": batch,
        "seed": settings.seed,
        "probes": False,
        "callbacks": {"speed_monitor": {"warmup": settings.warmup}},
    }
