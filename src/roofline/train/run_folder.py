"""The files of a run's folder that several parts of training read: their names, and the reading of JSON lines."""

import json
from pathlib import Path

from roofline.common.json_types import JsonObject

LOG = "log.jsonl"  # a line for each step and each evaluation
PROBES = "probes.jsonl"  # figures of activations and gradients at checkpoints
CONFIG = "config.json"  # the checked configuration
RELAY = "relay.json"  # the legs of `roofline train relay`
CARD = "card.json"  # speed and memory, with what they are measured against
PAGE = "run.html"


def read_lines(path: Path) -> list[JsonObject]:
    """The objects of a JSON lines file, without lines that a crash cut or that are being written."""
    lines = []
    for text in path.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
