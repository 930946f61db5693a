"""One process of a run: `torchrun --nproc-per-node N -m roofline.train CONFIG.yaml [--set KEY=VALUE ...]`."""

import argparse
import signal
import sys
from pathlib import Path

from roofline.common import env, log
from roofline.common.errors import RooflineError, SaidElsewhere
from roofline.common.processes import die_with_parent
from roofline.train.config.read import read_config


def main() -> int:
    """Exit status: 0, 1 after an error with a cause and a remedy, 128 + the signal that stopped the run."""
    parser = argparse.ArgumentParser(prog="roofline.train")
    parser.add_argument("config", type=Path)
    # `roofline train --nproc` names itself, and a file through which its processes find each other.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.parent is not None or env.foreign("TORCHELASTIC_RUN_ID"):
        die_with_parent(options.parent)
    log.configure()
    try:
        from roofline.train.report.console import Console
        from roofline.train.run import preflight
        from roofline.train.run.loop import train

        # `roofline train` has checked it already.
        config = read_config(options.config, options.changes, preflight.faults if options.parent is None else None)
        console = Console(config) if env.foreign("RANK") in (None, "0") else None
        finished = train(config, console.show if console else None, options.store)
        if console:
            console.end(finished)
        return finished.status
    except SaidElsewhere:
        return 1
    except RooflineError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
