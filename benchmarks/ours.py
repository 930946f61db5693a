"""Our engine as a worker: python -m benchmarks.ours MODEL. One timed run a request, between two measurements of the
roofs at the row's own working set, in this process.

A line read is {"workload": KEY}; a line written {"seconds", "share_of_roof", ...} as in `roofline bench engine`. The
first line written says what was loaded.
"""

import json
import sys

from benchmarks.host import streams


def main() -> None:
    requests, answers = streams()
    from roofline import _native
    from roofline.bench.adjacent_roofs import AdjacentRoofs
    from roofline.bench.engine import open_bench, setting
    from roofline.bench.workloads import WORKLOADS

    loaded, bench = open_bench(sys.argv[1])

    def write(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    write({"load_s": round(loaded.load_seconds, 2), "build": _native.build_id(), **setting(loaded)})
    for line in requests:
        name = json.loads(line)["workload"]
        beside = AdjacentRoofs(loaded.executable, WORKLOADS[name].tokens_held)
        bench.warm_up()
        run = bench.repeat(name)
        moved = run.stats.weight_bytes + run.stats.kv_bytes
        answer: dict[str, object] = {
            "seconds": run.seconds,
            "bytes_per_token": round(moved / WORKLOADS[name].tokens),
            "gb_s": round(moved / run.seconds / 1e9, 2),
            "gop_s": round(run.stats.flops / run.seconds / 1e9, 1),
            "steps": run.stats.steps,
            "python_share": round(run.stats.python_seconds / run.seconds, 4),
        }
        shares = beside.roof(run.seconds, run.works).record(run.seconds, moved)
        # A published share needs roofs that were measured: of others only the time stands.
        answer |= {"no_share": shares["correction"]} if shares["correction"] else shares
        write(answer)
    loaded.executable.close()


if __name__ == "__main__":
    main()
