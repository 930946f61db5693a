"""roofline train: one loop for every chip."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option

Processes = Annotated[int, Option("Processes on this machine, which share each step.", minimum=1)]


def run(
    config: Annotated[Path, Argument("A YAML file with LLM Foundry's keys (docs/reference/training.md).")],
    changes: Annotated[
        list[str] | None, Option("KEY.KEY=VALUE instead of what the file says.", flags=("--set",))
    ] = None,
    nproc: Processes = 1,
) -> int:
    """Train a model as a YAML file says."""
    from roofline.train.config.read import read_config
    from roofline.train.run import preflight
    from roofline.train.run_folder import folder_of

    # What is wrong with it is said once, not by each process.
    settings = read_config(config, changes or [], preflight.faults)
    if nproc > 1:
        from roofline.train.finetune.loaders import prepare_all
        from roofline.train.run.launch import launch
        from roofline.train.run.owner import reserve

        with closing(reserve(folder_of(settings))):
            prepare_all(settings)  # before processes wait for each other
        return launch(nproc, config, changes or [])
    from roofline.cli.training.engine_sampler import sampler_of
    from roofline.train.report.console import Console
    from roofline.train.run.loop import train

    console = Console(settings)
    finished = train(settings, console.show, make_sampler=sampler_of(settings))
    console.end(finished)
    return finished.status


def export(
    checkpoint: Annotated[str, Argument("A run's folder, a folder or URL of checkpoints, or one of them.")],
    out: Annotated[Path, Option("A new folder, or a new file that ends in .bundle.", flags=("--out", "-o"))],
    dtype: Annotated[str, Option("bf16, f16 or f32.")] = "bf16",
    tokenizer: Annotated[str | None, Option("Whose tokenizer goes with it; default: the configuration's.")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, or as a bundle that `roofline serve` runs at once; an adapter as
    PEFT does."""
    import tempfile

    from roofline.train.checkpoint import manifest
    from roofline.train.checkpoint.export import DTYPES, adapts, locate
    from roofline.train.checkpoint.export import export as write

    if dtype.upper() not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(name.lower() for name in DTYPES)}")
    if out.suffix != ".bundle":
        step = write(checkpoint, out, dtype.upper(), tokenizer)
    elif out.exists():
        raise ConfigError(f"{out} is there already: name a new file")
    elif adapts(manifest.facts(*locate(checkpoint))):
        raise ConfigError(f"{checkpoint} holds an adapter: name a folder for it, which `roofline merge` takes")
    else:
        from roofline import bundle

        with tempfile.TemporaryDirectory(prefix="roofline-export-") as folder:
            step = write(checkpoint, Path(folder) / out.stem, dtype.upper(), tokenizer)
            bundle.compile_model(str(Path(folder) / out.stem), out)
    print(f"{out}: the weights of step {step:,}")


def relay(
    config: Annotated[Path, Argument("A YAML file as for `roofline train`, with run_folder.")],
    legs: Annotated[list[str], Option('"NAME: nproc=2 KEY=VALUE ...": a setting; two or more.', flags=("--leg",))],
    every: Annotated[int, Option("Steps after which the next setting takes over.", minimum=1)] = 200,
    changes: Annotated[list[str] | None, Option("KEY.KEY=VALUE, for all of them.", flags=("--set",))] = None,
) -> None:
    """Hand one run back and forth between settings through its checkpoints, and prove that it stays one run.

    At each hand-over the state's fingerprint must be the same bit for bit, and at the end every receipt that of the
    order of samples. save_folder may be an object store.
    """
    from roofline.train.run.relay import RelaySetting
    from roofline.train.run.relay import relay as run_legs

    runners = [RelaySetting.parse(leg) for leg in legs]
    report = run_legs(config, changes or [], every, runners, lambda line: print(line, file=sys.stderr))
    for handover in report.handovers:
        jump = "" if handover.jump is None else f", held-out loss {handover.jump:+.2e} nats"
        print(f"step {handover.step}: {handover.giver} -> {handover.taker}: the same state bit for bit{jump}")
    print(f"{len(report.legs)} legs; all {report.order_steps:,} steps read the samples of the order")
