"""The files of a run's folder that several parts of training read: their names, and the reading of JSON lines."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.train.config.schema import TrainConfig

LOG = "log.jsonl"  # a line for each step and each evaluation
PROBES = "probes.jsonl"  # figures of activations and gradients at checkpoints
CONFIG = "config.json"  # the checked configuration
RELAY = "relay.json"  # the legs of `roofline train relay`
CARD = "card.json"  # speed and memory, with what they are measured against
PAGE = "run.html"
ROLLOUTS = "rollouts.jsonl"  # the answers that a run of GRPO sampled, with their rewards
ANSWERS = "answers.json"  # what the model said before and after the run
OWNER = "owner.json"  # who trains here, while it does; also beside checkpoints
COMMAND = "command.json"  # which command prepares, trains and asks the model here, while it does
ADAPTER, MODEL = RESULTS = ("adapter", "model")  # folders of what is trained, one of which a run writes


def folder_of(config: "TrainConfig") -> Path:
    """The folder of a run."""
    return Path(config.run_folder or f"runs/{config.run_name}")


def checkpoints_of(config: "TrainConfig") -> str:
    """The folder or URL of a run's checkpoints."""
    if config.save_folder:
        return config.save_folder.replace("{run_name}", config.run_name or "")
    return str(folder_of(config) / "checkpoints")


def read_lines(path: Path) -> list[JsonObject]:
    """The objects of a JSON lines file, without lines that a crash cut or that are being written."""
    lines = []
    for text in path.read_text("utf-8").split("\n"):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def keep_lines(path: Path, last: int) -> None:
    """Remove from a JSON lines file the lines of steps after `last`, which an earlier attempt wrote; at 0 all lines."""
    lines = read_lines(path) if last and path.exists() else []
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines if line.get("step", 0) <= last))
