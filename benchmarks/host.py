"""Runs a peer's adapter and answers requests for single timed runs: python host.py ADAPTER.py ARGUMENTS...

The adapter believes that it runs all workloads; `workloads.run` is replaced by a loop that reads a request a line,
{"kind": "prefill" | "decode" | "serve", "shape": [...]}, and writes {"seconds": ...}, so that engines can take turns
within a row. The first line written is {"engine", "load_s"}. Runs in the peer's environment: standard library only.
"""

import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

Timed = Callable[..., float]
WARM_UP = 32


def streams() -> tuple[TextIO, TextIO]:
    """Requests and answers on what was stdin and stdout; what the engine prints itself goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def main() -> None:
    adapter = Path(sys.argv[1]).resolve()
    requests, answers = streams()

    def write(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def answer_requests(
        engine: str, load_seconds: float, prefill: Timed, decode: Timed, serve: Timed, **_: object
    ) -> None:
        """Stands in for `workloads.run`."""
        calls = {"prefill": prefill, "decode": lambda n, k: decode(n, k) * k, "serve": serve}
        write({"engine": engine, "load_s": round(load_seconds, 2)})
        for line in requests:
            request = json.loads(line)
            prefill(WARM_UP)
            write({"seconds": calls[request["kind"]](*request["shape"])})

    spec = importlib.util.spec_from_file_location("workloads", adapter.with_name("workloads.py"))
    assert spec is not None
    assert spec.loader is not None
    workloads = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workloads)
    workloads.run = answer_requests  # type: ignore[attr-defined]
    sys.modules["workloads"] = workloads
    sys.path.insert(0, str(adapter.parent))
    sys.argv = [str(adapter), *sys.argv[2:]]
    runpy.run_path(str(adapter), run_name="__main__")


if __name__ == "__main__":
    main()
