"""Ours and the peers on the same workloads, taking turns within each row; every row is kept as soon as it is measured.

    make bench-peers            or    python -m benchmarks.peers --peers DIR --adapters DIR [--only ROWS] [--with vllm]

DIR of the peers holds their environments and models, as the adapters' setup.sh makes them. Run again after a cut, it
goes on where it stopped. The machine should have nothing else to do.
"""

import argparse
import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks import starts, table
from benchmarks.processes import Missing, Worker
from benchmarks.rows import (
    GROUPS,
    OURS,
    PATIENCE,
    PEERS,
    RANDOM,
    Row,
    chosen,
    estimate,
    peers_of,
)

HOST = Path(__file__).with_name("host.py")
ROOT = Path(__file__).parents[1]
CLI = "import sys; from roofline.cli.main import main; sys.exit(main())"


def set_up(peers: Path, adapters: Path, names: set[str]) -> None:
    """Run the adapters' setup.sh when an environment or a model of `names` is missing, and make the random models.

    What it cannot set up is missing in the rows, and they say so.
    """
    wanted = [PEERS[name] for name in names]
    paths = [peers / peer.environment / "bin/python" for peer in wanted]
    paths += [peers / peer.model for peer in wanted if peer.model not in RANDOM]
    if not all(path.exists() for path in paths):
        print(f"setting the peers up in {peers}: this takes minutes", flush=True)
        switches = {
            "WITH_AVX2": str(int("llama.cpp AVX2" in names)),
            "WITH_VLLM": str(int("vLLM" in names)),
        }
        command = ["bash", "setup.sh", str(peers)]
        if subprocess.run(command, cwd=adapters, env={**os.environ, **switches}).returncode:
            print("setup.sh failed: the rows will say which peers are missing", flush=True)
    for peer in wanted:
        path = peers / peer.model
        if peer.model in RANDOM and not path.exists():
            part = path.with_suffix(".part")
            python = str(peers / "hf/bin/python")
            made = subprocess.run([python, str(adapters / "random_gguf.py"), *RANDOM[peer.model], str(part)])
            if made.returncode == 0:
                part.replace(path)


def versions(peers: Path, names: set[str]) -> dict[str, str]:
    """Package versions of the peers' environments."""
    found = {}
    for name in sorted(names):
        peer = PEERS[name]
        python = peers / peer.environment / "bin/python"
        if python.exists() and peer.package not in found:
            code = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
            run = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
            if run.returncode == 0:
                found[peer.package] = run.stdout.strip()
    return found


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    from roofline.hardware.detect import detect

    found = detect()
    return {
        "cpu": found.chip,
        "cores": found.usable_cores,
        "memory_gib": round((found.memory_total or 0) / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def steal() -> tuple[float, float]:
    """(ticks that other guests of the host took, all ticks) since the machine started."""
    try:
        ticks = [float(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    return ticks[7], sum(ticks)


class Session:
    """One run of the command: the engines of the group at hand, and the record."""

    def __init__(self, args: argparse.Namespace, record: records.Record, logs: Path) -> None:
        self.args, self.record, self.logs = args, record, logs
        self.group = ""
        self.workers: dict[str, Worker] = {}

    def run(self, row: Row) -> None:
        """Measure a row and keep it. Raises SystemExit when our own engine fails."""
        if row.group != self.group:
            self.close()
            self.group = row.group
        before, started, load = steal(), time.perf_counter(), os.getloadavg()[0]
        turns, missing = self._starts(row) if row.group == "start" else self._turns(row)
        if not turns[OURS]:
            raise SystemExit(f"{row.key}: ours failed: {missing[OURS]}")
        engines = {name: records.engine(row, turns[name], missing.get(name)) for name in turns}
        after = steal()
        kept = {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - started, 1),
            "load_before": round(load, 2),
            "steal": round((after[0] - before[0]) / max(after[1] - before[1], 1.0), 4),
            "model": GROUPS[row.group].model,
            "isa": GROUPS[row.group].isa,
            "engines": engines,
            **records.judged(row, engines),
        }
        self.record["rows"][row.key] = kept
        records.save(self.record, self.args.out)
        said = [f"{name} {table.shown(row, engine)}" for name, engine in engines.items()]
        print(f"{row.key}: {'  '.join(said)}  ({kept['seconds']:.0f} s)", flush=True)

    def close(self) -> None:
        """End the engines of the group."""
        for worker in self.workers.values():
            worker.close()
        self.workers = {}

    def names(self, row: Row) -> list[str]:
        """Ours and the peers of a row, in the order of their turns."""
        alone = row.workload == "ready"
        return [OURS] if alone else [OURS, *peers_of(row.group, self.args.extra)]

    def _worker(self, name: str, group: str) -> Worker:
        if name in self.workers:
            return self.workers[name]
        log = self.logs / f"{group}-{name.replace(' ', '-')}.log"
        if name == OURS:
            isa = GROUPS[group].isa
            paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
            env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **({"ROOFLINE_ISA": isa} if isa else {})}
            if GROUPS[group].model in RANDOM:
                env["ROOFLINE_BUNDLES"] = "off"  # a bundle holds a tokenizer, and that of a random file is not one
            model = str(self.args.peers / GROUPS[group].model)
            worker = Worker(name, [sys.executable, "-m", "benchmarks.ours", model], log, env=env)
        else:
            peer = PEERS[name]
            python = str(self.args.peers / peer.environment / "bin/python")
            adapter, model = str(self.args.adapters / peer.adapter), str(self.args.peers / peer.model)
            worker = Worker(name, [python, str(HOST), adapter, model], log)
        return self.workers.setdefault(name, worker)

    def _turns(self, row: Row) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        """Rounds of one run of each engine. An engine that fails has no more turns in this row."""
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names(row)}
        missing: dict[str, str] = {}
        for _ in range(self.args.rounds or row.rounds):
            for name, got in turns.items():
                if name in missing or (got and sum(turn["seconds"] for turn in got) >= self.args.patience):
                    continue
                request = {"workload": row.workload} if name == OURS else {"kind": row.kind, "shape": row.shape}
                try:
                    worker = self._worker(name, row.group)
                    if name == OURS:
                        self.record["ours"][row.group] = worker.start()
                    got.append(worker.ask(request))
                except Missing as reason:
                    missing[name] = str(reason)
        return turns, missing

    def _starts(self, row: Row) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        """Fresh processes in turns; of each the first, which reads its files into memory, is dropped."""
        args, log = self.args, self.logs / f"{row.workload}.log"
        gguf = args.peers / GROUPS[row.group].model
        model = str(args.bundle or gguf)
        self.record["ours"][row.group] = {"model": "bundle" if args.bundle else gguf.name}
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names(row)}
        missing: dict[str, str] = {}
        if row.workload == "first_token":
            python = args.peers / PEERS["llama.cpp"].environment / "bin/python"
            commands = starts.first_token_commands(args.roofline, model, python, args.adapters, gguf)
            calls = [partial(starts.run_seconds, command, log) for command in commands]
        else:
            calls = [partial(starts.ready_seconds, [*args.roofline, "serve", model], log)]
        for index in range((args.rounds or row.rounds) + (args.rounds is not None)):
            for (name, got), call in zip(turns.items(), calls, strict=True):
                if name in missing:
                    continue
                try:
                    seconds = call()
                except Missing as reason:
                    missing[name] = str(reason)
                    continue
                if index:
                    got.append({"seconds": seconds})
        return turns, missing


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    today = datetime.date.today().isoformat()
    parser.add_argument("--peers", type=Path, default=ROOT / "../.peers", help="the peers' environments and models")
    parser.add_argument("--adapters", type=Path, default=ROOT / "../shared/peers", help="setup.sh and the adapters")
    parser.add_argument("--out", type=Path, default=ROOT / f"benchmarks/records/{today}-peers.json", help="the record")
    parser.add_argument("--only", default="", help="rows whose key contains one of these, with commas")
    parser.add_argument("--with", dest="extra", default="", help="optional peers: transformers, vllm, with commas")
    parser.add_argument("--bundle", type=Path, help="what our starts load, instead of the model file")
    parser.add_argument("--again", action="store_true", help="measure the chosen rows even where they are kept")
    parser.add_argument("--rounds", type=int, help="turns of each engine in a row, instead of the row's own")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds after which no repeat is added")
    parser.add_argument("--no-setup", action="store_true", help="use what is there")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take, and end")
    parser.add_argument(
        "--documents", type=Path, nargs="+", default=[], help="fill these files' tables once every row is measured"
    )
    parser.add_argument("--logs", type=Path, help="where engines print; a temporary folder when not given")
    args = parser.parse_args()
    args.extra = {part.strip().lower() for part in args.extra.split(",") if part.strip()}
    unknown = args.extra - {name.lower() for name, peer in PEERS.items() if peer.optional}
    if unknown:
        parser.error(f"--with knows transformers and vllm, not {', '.join(sorted(unknown))}")
    args.peers, args.adapters, args.out = args.peers.resolve(), args.adapters.resolve(), args.out.resolve()
    script = Path(sys.executable).with_name("roofline")
    args.roofline = [str(script)] if script.exists() else [sys.executable, "-c", CLI]
    return args


def opened(args: argparse.Namespace, names: set[str]) -> records.Record:
    """The record to go on with, or a new one. Raises SystemExit when the kept rows are of another build or chip."""
    from roofline import _native

    about = {"machine": machine(), "build": _native.build_id()}
    try:
        known = records.load(args.out)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if known is None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {
            "schema": records.SCHEMA,
            "started": now,
            **about,
            "versions": versions(args.peers, names),
            "prefix_cache": "off",
            "speculation": "off",
            "ours": {},
            "rows": {},
        }
    for part in ("build", "machine"):
        if known[part] != about[part] and not args.again:
            raise SystemExit(f"{args.out} was measured with another {part}; give another --out, or --again")
    return {**known, **about, "versions": {**known["versions"], **versions(args.peers, names)}}


def main() -> None:
    args = arguments()
    rows = chosen(args.only)
    if not rows:
        raise SystemExit(f"no row matches {args.only!r}")
    names = {name for row in rows for name in peers_of(row.group, args.extra)}
    if not args.estimate and not args.no_setup:
        if not (args.adapters / "setup.sh").exists():
            raise SystemExit(f"there is no setup.sh in {args.adapters}: name the adapters' folder with --adapters")
        args.peers.mkdir(parents=True, exist_ok=True)
        set_up(args.peers, args.adapters, names)
    record = opened(args, names)
    session = Session(args, record, args.logs or Path(tempfile.mkdtemp(prefix="bench-peers-")))
    left = [row for row in rows if args.again or not records.done(record, row, session.names(row))]
    minutes = estimate(left, args.extra, args.rounds, args.patience) / 60
    print(f"{len(left)} of {len(rows)} rows to measure, about {minutes:.0f} minutes; {args.out}", flush=True)
    if args.estimate:
        return
    session.logs.mkdir(parents=True, exist_ok=True)
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended then too
    try:
        for row in left:
            session.run(row)
    finally:
        session.close()
        signal.signal(signal.SIGTERM, former)
    print(f"\n{table.against(record)}\n\n{table.all_engines(record)}")
    if args.documents and not records.complete(record):
        print(f"{', '.join(map(str, args.documents))}: left as before, because not every row is measured")
        return
    for document in args.documents:
        table.fill(document, args.out)


if __name__ == "__main__":
    main()
