"""`roofline bench train`: the training loop timed on random rows, without any files."""

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from roofline.common.errors import RooflineError
from roofline.common.json_types import JsonObject
from roofline.common.units import human_seconds

STDERR = 2
LENGTH, BATCH = 2048, 8  # tokens of a row and rows of a batch, where nothing else is said


def bench_train(
    what: str, changes: Sequence[str] = (), *, steps: int = 10, warmup: int = 3, processes: int = 1, show: bool = True
) -> JsonObject:
    """Train for `warmup` + `steps` steps and give the record: the card of the last `steps`, and the command.

    Args:
        what: a preset of models.presets, or a YAML file of a run; its data sets, checkpoints and loggers are left out.
        changes: as `roofline train --set` has them. processes: on this machine. show: lines of the run on stderr.

    Raises ConfigError, UnsupportedError, CapacityError as a run does; RooflineError: one of several processes failed.
    """
    from roofline.train.report import cards

    with tempfile.TemporaryDirectory(prefix="roofline-bench-") as place:
        folder = Path(place) / "run"
        config = config_of(what, changes, folder, steps, warmup)
        path = Path(place) / "config.json"
        path.write_text(json.dumps(config))
        if show:
            print(announcement(path, what, warmup + steps, processes), file=sys.stderr, flush=True)
        if processes > 1:
            run_processes(processes, path)
        else:
            from roofline.train.config.read import read_config
            from roofline.train.report.console import Console
            from roofline.train.run.loop import train

            settings = read_config(path)
            if train(settings, Console(settings).show if show else None).signal:
                raise KeyboardInterrupt
        card = cards.read(str(folder))
    for name in ("command", "run"):  # of a folder that no longer exists
        card.pop(name, None)
    command = _command(what, changes, steps, warmup, processes)
    return {"bench": "train", "command": command, "card": card | {"run": f"bench {what}"}}


def run_processes(count: int, path: Path) -> None:
    """Train as the configuration in a file says, in so many processes of their own, with what they say on stderr.

    Raises KeyboardInterrupt where Ctrl-C ended them, RooflineError: one of them failed.
    """
    from roofline.train.run.launch import launch

    status = launch(count, path, [], out=STDERR)
    if status > 128:
        raise KeyboardInterrupt
    if status:
        raise RooflineError("one of the processes failed; what it said stands above")


def announcement(path: Path, what: str, steps: int, processes: int) -> str:
    """What is about to be timed, and how long it takes at least: so many `steps` of the configuration in a file, at the
    peak of the devices, or at their measured roof (0.1 s)."""
    import torch

    from roofline.train.config.read import read_config
    from roofline.train.model.shapes import model_config
    from roofline.train.parallel.processes import COMPUTE
    from roofline.train.report import machine
    from roofline.train.report.flops import per_token

    config = read_config(path)
    length, rows = config.max_seq_len, config.global_train_batch_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak, _ = machine.peak_of(device, config.precision, config.callbacks.speed_monitor.gpu_flops_available)
    rate = peak.flops if peak else machine.measured_roof(device, COMPUTE[config.precision])["flops"]
    devices = 1 if device.type == "cpu" else processes  # processes share the machine's cores
    work = per_token(model_config(config.model, length), length)["matmul"].model * length * rows * steps
    least = human_seconds(work / rate / devices)
    return f"{what}: {steps} steps of {rows} rows of {length:,} random tokens, {least} at least; Ctrl-C stops it"


def config_of(what: str, changes: Sequence[str], folder: Path, steps: int, warmup: int) -> JsonObject:
    """The configuration of the timed run, as plain data. Raises ConfigError."""
    from roofline.models import presets
    from roofline.train.config.read import parse_config, read_config

    if what.endswith((".yaml", ".yml", ".json")):
        settled = read_config(Path(what), changes)
    else:
        what = what.removeprefix("preset:")
        yaml_keys = {
            "run_name": f"bench-{what}",
            "max_seq_len": min(LENGTH, presets.preset(what)["max_position"]),
            "model": {"name": what},
            "train_loader": {"name": "synthetic"},
            "optimizer": {"name": "decoupled_adamw", "lr": 1e-4},
            "max_duration": "1ba",
            "global_train_batch_size": BATCH,
        }
        settled = parse_config(yaml_keys, f"bench-{what}.yaml", changes)
    values = settled.model_dump(mode="json")
    for key in ("eval_loader", "loggers", "save_folder", "load_path", "stop_after", "console_log_interval"):
        values.pop(key)
    if values["optimizer"]["lr"] > 1e-4:
        values["optimizer"]["lr"] = 1e-4  # random ids teach nothing: it only has to stay finite
    return values | {
        "run_folder": str(folder),
        "train_loader": {"name": "synthetic", "num_workers": values["train_loader"]["num_workers"]},
        "max_duration": f"{warmup + steps}ba",
        "eval_interval": "0ba",
        "eval_first": False,
        "save_interval": "0ba",
        "autoresume": False,
        "callbacks": values["callbacks"] | {"speed_monitor": values["callbacks"]["speed_monitor"] | {"warmup": warmup}},
    }


def _command(what: str, changes: Sequence[str], steps: int, warmup: int, processes: int) -> str:
    words = ["roofline", "bench", "train", what, "--steps", str(steps), "--warmup", str(warmup)]
    words += ["--nproc", str(processes)] if processes > 1 else []
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])
