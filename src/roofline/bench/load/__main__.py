"""python -m roofline.bench.load PLAN.json [--key] [--progress]: the load generator, as a process of its own.

--key: the first line of standard input is the target's key. Files of plans hold no secrets, nor do command lines, which
all users of a machine can read. --progress: a line of JSON on standard output every half second.
"""

import sys
from pathlib import Path

import msgspec

from roofline.bench.load.events import write_events
from roofline.bench.load.generator import Generator, run_on_fast_loop
from roofline.bench.load.plan import read_plan
from roofline.bench.load.progress import Progress
from roofline.bench.traffic.traffic import read_traffic
from roofline.common.errors import RooflineError
from roofline.common.files import cause_of
from roofline.common.processes import allow_all_files


def main(words: list[str]) -> int:
    """Run the plan and write its file of events, also when SIGINT or SIGTERM ends it early (status 130 then)."""
    if not words or not {*words[1:]} <= {"--key", "--progress"}:
        print("usage: python -m roofline.bench.load PLAN.json [--key] [--progress]", file=sys.stderr)
        return 2
    key = sys.stdin.readline().strip() if "--key" in words else None
    on_progress = _print if "--progress" in words else None
    allow_all_files()
    try:
        plan = read_plan(Path(words[0]))
        generator = Generator(plan, read_traffic(Path(plan.traffic)), key, on_progress)
        events = run_on_fast_loop(generator)
        write_events(events, Path(plan.events))
    except RooflineError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: {cause_of(error)}", file=sys.stderr)
        return 1
    return 130 if generator.stopped else 0


def _print(progress: Progress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
