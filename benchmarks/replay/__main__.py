"""One run three times, and whether it is the same run: alone and eager; shared and compiled; handed between the two.

    python -m benchmarks.replay --data ROWS -o docs/replays/NAME [--steps 1000] [--every 200] [--work FOLDER]

ROWS holds `train` and `val`, as `roofline data tokenize` writes them (8,192 ids, rows of 256). Run (c) goes through an
object store (SeaweedFS) on this machine. Goes on where it was stopped. The folder -o gets the plots and a README.md.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from roofline.train.run_folder import read_lines

CONFIG = Path(__file__).with_name("mpt-10m.yaml")
CLI = [sys.executable, "-c", "import sys; from roofline.cli.main import main; sys.exit(main())"]
# What (b) does otherwise than (a): two processes, other microbatches, compiled blocks.
SHARED = ["device_train_microbatch_size=3", "compile_config={}"]


def run(work: Path, name: str, *words: str, code: int | None = 0) -> str:
    """A command of ours; what it printed. Its time is kept beside."""
    done = work / f"{name}.txt"
    if done.exists():
        return done.read_text()
    begin = time.monotonic()
    print(f"$ roofline {' '.join(words)}", file=sys.stderr, flush=True)
    found = subprocess.run([*CLI, *words], stdout=subprocess.PIPE, text=True)
    if code is not None and found.returncode != code:
        raise SystemExit(f"{name} ended with {found.returncode}: {found.stdout}")
    text = f"{found.stdout.strip()}\n({time.monotonic() - begin:.0f} s)\n"
    done.write_text(text)
    return text


@contextlib.contextmanager
def object_store(work: Path) -> Iterator[None]:
    """A server whose place and keys are in the environment."""
    from tests.train import seaweed

    folder = work / "seaweed"
    folder.mkdir(exist_ok=True)
    server, process = seaweed.start(folder)
    try:
        if not (work / "bucket").exists():
            server.bucket("replay")
            (work / "bucket").touch()
        os.environ.update(server.environment())
        yield
    finally:
        seaweed.stop(process)


def main() -> None:
    """Run all three, compare them, write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("replay-work"))
    given = parser.parse_args()
    work, steps, every = given.work.resolve(), given.steps, given.every
    work.mkdir(parents=True, exist_ok=True)
    common = [f"data={given.data.resolve()}", f"max_duration={steps}ba", f"save_interval={every}ba"]
    common += [f"eval_interval={every}ba"]

    def settings(name: str, *more: str) -> list[str]:
        return [f"--set={change}" for change in (*common, f"run_folder={work / name}", *more)]

    config = str(CONFIG)
    run(work, "run-a", "train", config, *settings("a", "autoresume=true"))
    run(work, "run-b", "train", config, "--nproc=2", *settings("b", "autoresume=true", *SHARED))
    with object_store(work):
        legs = ["--leg=alone:", f"--leg=shared: nproc=2 {' '.join(SHARED)}", f"--every={every}"]
        folder = "save_folder=s3://replay/c"
        relayed = run(work, "run-c", "train", "relay", config, *legs, *settings("c", folder))
    given.out.mkdir(parents=True, exist_ok=True)
    said = {}
    for pair in ("ab", "ac", "bc"):
        a, b = (str(work / name) for name in pair)
        said[f"order {pair}"] = run(work, f"order-{pair}", "data", "verify-order", a, b)
        plot = str(given.out / f"{pair}.svg")
        said[f"parity {pair}"] = run(work, f"parity-{pair}", "parity", a, b, "-o", plot, code=None)
    columns = [losses(work / name) for name in "abc"]
    lines = [",".join(map(repr, (step, *each))) for step, each in enumerate(zip(*columns, strict=True), start=1)]
    (given.out / "losses.csv").write_text("\n".join(["step,a,b,c", *lines]) + "\n")
    (given.out / "README.md").write_text(written(work, steps, every, relayed, said))


def losses(folder: Path) -> list[float]:
    """Of each step of a run."""
    lines = read_lines(folder / "log.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


def written(work: Path, steps: int, every: int, relayed: str, said: dict[str, str]) -> str:
    """The figures, as a page."""
    rows = []
    what = {
        "a": "1 process, eager, microbatches of 8",
        "b": "2 processes (FSDP2), compiled, microbatches of 3",
        "c": f"(a) and (b) in turns, every {every} steps, through an object store",
    }
    for name, setting in what.items():
        lines = read_lines(work / name / "log.jsonl")
        found = losses(work / name)
        held = [line["eval_loss"] for line in lines if "eval_loss" in line]
        seconds = re.findall(r"\((\d+) s\)", (work / f"run-{name}.txt").read_text())[-1]
        rows.append(f"| {name} | {setting} | {len(found):,} | {found[-1]:.4f} | {held[-1]:.4f} | {seconds} |")
    parts = [
        f"# One run three times: {steps:,} batches of an MPT with 10.6 million parameters without embeddings\n",
        "`python -m benchmarks.replay`; configuration: benchmarks/replay/mpt-10m.yaml; losses: losses.csv.\n",
        "| run | setting | steps | last loss | held-out loss | seconds |",
        "|---|---|---|---|---|---|",
        *rows,
        "\n## The relay\n",
        "```",
        relayed.strip(),
        "```",
        *(f"\n## {title}\n\n```\n{text.strip()}\n```" for title, text in said.items()),
        *(f"\n![{pair}]({pair}.svg)" for pair in ("ab", "ac", "bc")),
    ]
    return "\n".join(parts).replace(f"{work}/", "") + "\n"


if __name__ == "__main__":
    main()
