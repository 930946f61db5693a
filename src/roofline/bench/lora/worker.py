"""The process of one batch size: `python -m roofline.bench.lora.worker CONFIG.json RESULT.json [--show]`.

It is a process of its own, so that its peak of memory is its own, and so that memory that runs out ends nothing else.
The result is a JSON object of what an `Outcome` has.
"""

import json
import os
import sys
from pathlib import Path

from roofline.common import log
from roofline.common.errors import CapacityError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.common.processes import die_with_parent


def main() -> int:
    """Exit status: 0 with a result, 1 after an error that has been said, 128 + the signal that stopped the run."""
    from roofline.train.config.read import read_config
    from roofline.train.memory.exhausted import is_out_of_memory

    config, result, *show = sys.argv[1:]
    die_with_parent(os.getppid())
    log.configure()
    try:
        outcome, status = _run(read_config(Path(config)).run_folder or "", Path(config), bool(show))
    except CapacityError as error:
        outcome, status = {"out_of_memory": str(error)}, 0
    except RooflineError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        outcome, status = {"out_of_memory": " ".join(str(error).split()) or type(error).__name__}, 0
    Path(result).write_text(json.dumps(outcome))
    return status


def _run(folder: str, path: Path, show: bool) -> tuple[JsonObject, int]:
    from roofline.train.config.read import read_config
    from roofline.train.report import cards
    from roofline.train.report.console import Console
    from roofline.train.run.loop import train

    config, steps, before = read_config(path), list[tuple[float, int, float]](), 0
    console = Console(config)

    def watch(line: JsonObject) -> None:
        nonlocal before
        if "loss" in line:
            steps.append((line["seconds"], line["tokens"] - before, line["loss"]))
            before = line["tokens"]
        if show:
            console.show(line)

    finished = train(config, watch)
    return {"card": cards.read(folder), "steps": steps, "held_out": finished.evaluations}, finished.status


if __name__ == "__main__":
    sys.exit(main())
