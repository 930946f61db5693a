"""Fine-tunes a model with one batch size after the other, each in a process of its own, and makes a point of each."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from roofline.bench.lora.options import LoraBenchOptions
from roofline.bench.lora.point import Outcome, point_of
from roofline.bench.lora.rows import Samples, random_lengths, samples_in, write_random
from roofline.bench.results.point import Point
from roofline.bench.serving.surroundings import this_host
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.common.units import now_utc
from roofline.train.finetune.plan import LR, LR_FULL
from roofline.train.finetune.prepare import HELD_OUT, TRAIN

ROWS = "rows"  # in the folder of a sweep
HELD_OUT_SHARE = 0.05  # of data
KILLED = "the process was killed, as the system does when its memory runs out"


@dataclass(frozen=True)
class LoraSweepSettings:
    """What is timed. model: files or a catalogue name; batches: rows of a step, a run each; changes: of the runs'
    configurations, as `--set` has them."""

    model: str
    options: LoraBenchOptions = field(default_factory=LoraBenchOptions)
    batches: tuple[int, ...] = (1, 16, 64, 128)
    changes: tuple[str, ...] = ()

    def preset(self, batch: int) -> str:
        """What two points share whose speeds may be compared."""
        of = self.options
        method = "full" if of.method == "full" else f"{of.method} of rank {of.rank} beside {of.base}"
        rows = f"batch {batch} of {of.max_seq_len} tokens{', packed' * of.pack}"
        return ", ".join([method, rows, *self.changes])

    @property
    def command(self) -> str:
        """Which measures the same again."""
        words = ["roofline", "bench", "lora", self.model, "--batches", ",".join(map(str, self.batches))]
        for name, value in self.options.changes().items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join([*words, *(word for change in self.changes for word in ("--set", change))])


def sweep(settings: LoraSweepSettings, show: bool = True) -> Iterator[Point]:
    """A point for each batch size, as soon as it is measured; one that does not fit into memory has no figures but says
    why. show: lines of the runs on stderr.

    Raises ConfigError, UnsupportedError for what no batch size could be measured with; RooflineError: a run failed.
    """
    run = os.urandom(8).hex()
    with tempfile.TemporaryDirectory(prefix="roofline-bench-lora-") as place:
        folder = Path(place)
        samples = _prepare(settings, folder)
        configs = {batch: _configuration(settings, batch, folder) for batch in settings.batches}
        for batch, config in configs.items():
            if show:
                print(f"batch {batch}:", file=sys.stderr, flush=True)
            started, host = now_utc(), this_host()
            outcome = measure(config, show)
            yield point_of(settings, batch, samples, outcome, run=run, started=started, host=host)


def _prepare(settings: LoraSweepSettings, folder: Path) -> Samples:
    """Write the rows into a folder."""
    from roofline.train.config.schema import ModelSection
    from roofline.train.model.shapes import model_config

    options = settings.options
    section = ModelSection(name="hf_causal_lm", pretrained_model_name_or_path=settings.model)
    vocab, length = model_config(section, options.max_seq_len)["vocab"], options.max_seq_len
    if options.data is None:
        lengths = random_lengths(length, options.seed)
        write_random(lengths, length, vocab, options.seed, options.pack, folder / ROWS / TRAIN)
        return samples_in(folder / ROWS / TRAIN, "random ids, lengths of abstracts")
    from roofline.bundle import load_text_of
    from roofline.train.finetune.prepare import Data, prepare

    data = Data((options.data,), length, pack=options.pack, share=HELD_OUT_SHARE, seed=options.seed)
    prepare(data, folder / ROWS, *load_text_of(settings.model))
    return samples_in(folder / ROWS / TRAIN, options.data.name)


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


def _configuration(settings: LoraSweepSettings, batch: int, folder: Path) -> Path:
    """The file of a run's configuration, which is checked. Raises ConfigError, UnsupportedError."""
    from roofline.train.config.read import parse_config
    from roofline.train.run import preflight

    values = _config(settings, batch, folder)
    path = folder / f"{values['run_name']}.json"
    config = parse_config(values, "", settings.changes, preflight.faults)
    for key in ("run_folder", "global_train_batch_size", "max_seq_len", "max_duration"):
        if getattr(config, key) != values[key]:
            raise ConfigError(
                f"--set {key}: each run has its own here; use --batches, --max-seq-len, --steps, --epochs"
            )
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


def _config(settings: LoraSweepSettings, batch: int, folder: Path) -> JsonObject:
    options = settings.options
    method: JsonObject = {"method": options.method}
    if options.method != "full":
        method |= {"rank": options.rank, "alpha": 2 * options.rank, "base": options.base}
    total = f"{options.warmup + options.steps}ba" if options.epochs is None else f"{options.epochs}ep"
    loader: JsonObject = {"name": "finetuning", "dataset": {"local": str(folder / ROWS / TRAIN), "shuffle": True}}
    config: JsonObject = {
        "run_name": f"lora-batch-{batch}",
        "run_folder": str(folder / f"run-{batch}"),
        "max_seq_len": options.max_seq_len,
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": settings.model},
        "adapter": method,
        "train_loader": loader,
        "optimizer": {"name": "adamw", "lr": LR if options.method != "full" else LR_FULL},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "0.03dur"},
        "algorithms": {"gradient_clipping": {"clipping_threshold": 1.0}},
        "max_duration": total,
        "global_train_batch_size": batch,
        "seed": options.seed,
        "probes": False,
        "callbacks": {"speed_monitor": {"warmup": options.warmup}},
    }
    if (folder / ROWS / HELD_OUT).exists():
        dataset = {"local": str(folder / ROWS / HELD_OUT)}
        config |= {"eval_loader": {"name": "finetuning", "dataset": dataset}, "eval_interval": "1dur"}
    return config
