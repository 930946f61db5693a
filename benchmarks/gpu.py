"""Everything that is claimed of a GPU, measured on one: kernels, the ladder, 4-bit decoding, serving, exactness.

    python -m benchmarks.gpu [PART ...] -o benchmarks/records/DATE-gpu-NAME.json [--preset llama-2-7b]

Parts: roofs, kernels, grid, grid_compiled, four_bit, serve, exact; all of them by default, each a few minutes. It runs
from the source tree with torch, triton and transformers and builds nothing; weights are random, with repeated rows.
Each part runs in a process of its own, since none computes after an illegal access, and the record is written after
every row: what is cut off or ends in an error keeps its rows. Status 1 where a part failed or a kernel was wrong. The
parts lie in gpu_parts.py, what is asked of them in gpu_targets.py.
"""

import argparse
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCHEMA = "bench.gpu/2"
SAME = ("schema", "device", "chip", "versions", "commit", "preset")  # of all parts of one record
STATE = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu", "clocks_event_reasons.active")
Record = dict[str, Any]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the process where it cannot be meant."""
    from benchmarks.gpu_parts import BATCHES, PARTS

    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Measure a GPU.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the record; parts of it that are there stay")
    parser.add_argument("--preset", default="llama-2-7b", help="shape of the model")
    parser.add_argument("--rungs", help="of the ladder, as `roofline bench latency --rungs`; grids of others stay")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="of the grid and four_bit")
    parser.add_argument("--repeats", type=int, help="of the grid")
    parser.add_argument("--seconds", type=float, help="for all parts together; what is not done then is cut off")
    parser.add_argument("--commit", help="of the tree, where git cannot be asked")
    parser.add_argument("--in-process", choices=("part", "head"), help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    try:
        args.batches = tuple(int(part) for part in args.batches.split(","))
    except ValueError:
        parser.error(f"--batches {args.batches!r} are not numbers with commas between them")
    args.parts = args.parts or list(PARTS)
    return args


def main(given: list[str] | None = None) -> int:
    """Run the parts that were asked for; 1 where one failed, or a kernel was wrong."""
    words = sys.argv[1:] if given is None else given
    args = arguments(words)
    if args.in_process == "head":
        print(json.dumps(_head(args)))
        return 0
    if args.in_process:
        return in_process(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    options = _without(words)
    asked = subprocess.run(
        _command([*options, "--in-process=head"]), cwd=ROOT, env=_variables(), stdout=subprocess.PIPE
    )
    if asked.returncode:
        return asked.returncode
    begin(args.out, json.loads(asked.stdout.splitlines()[-1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the part's process ends with this one
    deadline = time.monotonic() + args.seconds if args.seconds else math.inf
    for name in args.parts:
        began = time.monotonic()
        try:
            said = _child([*options, name, "--in-process=part"], deadline - began)
        except BaseException:
            finish(args.out, key(name, args), error="interrupted")
            raise
        if said:
            finish(args.out, key(name, args), error=said)
        print(f"{name}: {time.monotonic() - began:.0f} s{': ' + said if said else ''}", flush=True)
    return int(any(wrong(json.loads(args.out.read_text())["parts"].get(key(name, args))) for name in args.parts))


def in_process(args: argparse.Namespace) -> int:
    """Run the one part here, its rows into the record as they come; 1 where it failed."""
    from benchmarks.gpu_parts import PARTS, Given
    from benchmarks.gpu_targets import judged
    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.common.errors import describe_error

    (name,) = args.parts
    kernel_cache.use()
    before, began = _state(), time.monotonic()

    def keep(rows: Mapping[str, Any], **more: Any) -> None:
        seconds = round(time.monotonic() - began, 1)
        part = {"complete": False, "seconds": seconds, "before": before, **rows, **more}
        store(args.out, key(name, args), part)

    keep({})
    try:
        given = Given(args.preset, args.rungs, args.batches, args.repeats, keep)
        rows = PARTS[name](given)
        keep({**rows, "targets": judged(name, rows)}, complete=True, after=_state())
    except Exception as error:
        traceback.print_exc()
        finish(args.out, key(name, args), error=describe_error(error))
        return 1
    return 0


def key(name: str, args: argparse.Namespace) -> str:
    """A part's name in the record: grids of several rungs lie beside each other."""
    return f"grid {args.rungs}" if name == "grid" and args.rungs else name


def begin(out: Path, head: Record) -> None:
    """A new record, or one that goes on; ends the process where that is of another device, tree or shape."""
    if not out.exists():
        _write(out, {**head, "parts": {}})
        return
    there = json.loads(out.read_text())
    others = [name for name in SAME if there.get(name) != head[name]]
    if others:
        differ = ", ".join(f"{name} {there.get(name)!r} and not {head[name]!r}" for name in others)
        sys.exit(f"benchmarks.gpu: {out} is of {differ}: name another file")


def store(out: Path, name: str, part: Record) -> None:
    """Put a part, or what there is of it, into the record."""
    record = json.loads(out.read_text())
    record["parts"][name] = _finite(part)
    _write(out, record)


def finish(out: Path, name: str, error: str) -> None:
    """A part ended before it was complete: its rows stay, beside the reason."""
    part = json.loads(out.read_text())["parts"].get(name, {"complete": False})
    if not part.get("complete"):
        store(out, name, {**part, "error": part.get("error", error)})


def wrong(part: Record | None) -> bool:
    """Whether a part failed, or what it measured is not what it should compute."""
    return part is None or "error" in part or not part.get("complete") or bool(part.get("wrong"))


def _child(words: list[str], seconds: float) -> str:
    """Run a part in a process of its own; why it did not end well, or ""."""
    if seconds <= 0:
        return "no time was left for it"
    with subprocess.Popen(_command(words), cwd=ROOT, env=_variables()) as process:
        try:
            status = process.wait(None if seconds == math.inf else seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"cut off after {seconds:.0f} s"
        except BaseException:  # we are told to end: so is it
            process.kill()
            raise
    return f"it ended with status {status}" if status else ""


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *words]


def _variables() -> dict[str, str]:
    """The environment of parts: they find the package in the source tree."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _without(words: list[str]) -> list[str]:
    """The options of a command line, without its parts; the record's path whole, as parts run in the tree's folder."""
    kept, at = [], 0
    while at < len(words):
        word = words[at]
        if word in ("-o", "--out"):
            kept += [word, str(Path(words[at + 1]).resolve())]
            at += 1
        elif word.startswith("--out="):
            kept.append(f"--out={Path(word.removeprefix('--out=')).resolve()}")
        elif word.startswith("-"):
            kept.append(word)
            if "=" not in word and at + 1 < len(words):
                kept.append(words[at + 1])
                at += 1
        at += 1
    return kept


def _write(out: Path, record: Record) -> None:
    from roofline.common.files import write_atomically

    write_atomically(out, json.dumps(record, indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _state() -> dict[str, str]:
    """Clocks, power, temperature and what holds the clocks back, as the driver says them; {} where it says nothing."""
    return _driver(STATE)


def _driver(fields: tuple[str, ...]) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (part.strip() for part in said.split(",")), strict=False))


def _head(args: argparse.Namespace) -> Record:
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no GPU here; `roofline doctor` says why")
    from roofline.backends.gpu.devices import find

    found, about = find(), torch.cuda.get_device_properties(0)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda or ""}
    versions |= {"hip": torch.version.hip or "", **_driver(("driver_version",))}
    for package in ("triton", "transformers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "chip": found.chip.name,
        "units": about.multi_processor_count,
        "memory_bytes": about.total_memory,
        "versions": versions,
        "commit": args.commit or _commit(),
        "preset": args.preset,
    }


def _commit() -> str:
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
