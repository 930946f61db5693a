"""One process of a run: `torchrun --nproc-per-node N -m roofline.train CONFIG.yaml [--set KEY=VALUE ...]`."""

import argparse
import sys
from pathlib import Path

from roofline.common import env, log
from roofline.common.errors import RooflineError
from roofline.train.config.read import read_config


def main() -> int:
    """Exit status: 0, or 1 after an error with a cause and a remedy."""
    parser = argparse.ArgumentParser(prog="roofline.train")
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    options = parser.parse_args()
    log.configure()
    try:
        from roofline.train.report.console import Console
        from roofline.train.run.loop import train

        config = read_config(options.config, options.changes)
        console = Console(config) if env.foreign("RANK") in (None, "0") else None
        finished = train(config, console.show if console else None)
        if console:
            console.end(finished)
    except RooflineError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
