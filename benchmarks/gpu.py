"""Everything that is claimed of a GPU, measured on one: kernels, the ladder, 4-bit decoding, serving, exactness.

    python -m benchmarks.gpu [PART ...] -o benchmarks/records/DATE-gpu-NAME.json [--preset llama-2-7b]

Parts: roofs, kernels, grid, four_bit, serve, exact; all of them by default, each a few minutes. It runs from the source
tree with torch, triton and transformers and builds nothing; weights are random, with repeated rows. The record is
written after each part; a part that fails is recorded with its error and ends the run with status 1.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
TYPICAL = ROOT / "benchmarks" / "typical-lengths.json"
BATCHES = (1, 8, 16)
Record = dict[str, Any]


def typical_lengths(count: int, seed: int = 0, most: tuple[int, int] = (960, 80)) -> list[tuple[int, int]]:
    """(prompt, answer) tokens of `count` requests: our sampler for a workload of which only the maxima are published.

    Prompts are log-normal with median 200 and sigma 0.9, answers log-normal with median 30 and sigma 0.7, each cut to
    its maximum, prompts to what the answer leaves of the context; numbers from a Philox generator's raw bits, so that
    they are the same everywhere. Source of the maxima: context up to 960, generation up to 80 (MK1, 2023).
    """
    bits = np.random.Philox(key=seed).random_raw(4 * count).astype(np.float64) / 2**64
    radius, angle = np.sqrt(-2 * np.log(1 - bits[: 2 * count])), 2 * math.pi * bits[2 * count :]
    normal = (radius * np.cos(angle)).reshape(count, 2)
    answers = np.clip(np.rint(30 * np.exp(0.7 * normal[:, 1])), 1, most[1]).astype(int)
    prompts = np.clip(np.rint(200 * np.exp(0.9 * normal[:, 0])), 1, most[0] - answers).astype(int)
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))


def roofs(args: argparse.Namespace) -> Record:
    """Copy and GEMM, beside the data sheet."""
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.roofs import measure_roofs

    found, measured = find(), measure_roofs()
    product = found.device.product
    figures = {"bf16": product.bf16, "bandwidth": product.bandwidth} if product else {}
    sheet = {name: figure.value for name, figure in figures.items() if figure is not None}
    return measured.record() | {"device": found.device.title, "chip": found.chip.name, "datasheet": sheet}


def kernels(args: argparse.Namespace) -> Record:
    """Every kernel: error against float64, median time, share of the limit at the measured roofs."""
    import torch
    from triton.testing import do_bench

    from benchmarks.gpu_kernels import Bench, Shapes, error
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.roofs import measure_roofs

    limit, rows, began = measure_roofs(), [], time.monotonic()
    bench = Bench(find().chip, "cuda", Shapes())
    for make in bench.cases():
        case = make()
        found = error(case)
        milliseconds = do_bench(case.run, warmup=10, rep=40, return_mode="median")
        least = max(case.flops / limit.flops, case.nbytes / limit.bytes_per_s)
        rows.append(
            {
                "name": case.name,
                "error": found,
                "ok": bool(found <= case.tolerance),
                "ms": milliseconds,
                "share": least * 1e3 / milliseconds,
                "bound": "compute" if case.flops / limit.flops == least else "bandwidth",
            }
        )
        print(
            f"{case.name:50} {'ok ' if rows[-1]['ok'] else 'BAD'} {milliseconds:8.4f} ms {rows[-1]['share']:6.1%}",
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    wrong = [row["name"] for row in rows if not row["ok"]]
    return {"roofs": limit.record(), "rows": rows, "wrong": wrong, "seconds": time.monotonic() - began}


def grid(args: argparse.Namespace) -> Record:
    """The ladder on prefill 2048 and decode, at batch 1, 8 and 16; transformers' rungs in the same run."""
    from roofline.bench.latency import bench_latency

    return bench_latency(
        args.preset, args.rungs, device="cuda", batches=BATCHES, tell=lambda text: print(text, flush=True)
    )


def _load(
    args: argparse.Namespace, form: str, running: int, length: int, exact: bool = False, tokens: int = 8192
) -> Any:
    from roofline import bundle
    from roofline.models.presets import preset
    from roofline.weights.random_weights import pooled_checkpoint

    return bundle.load(
        pooled_checkpoint(preset(args.preset), 0, form),
        backend="gpu",
        text=False,
        exact=exact,
        max_model_len=length,
        cache_tokens=running * (length + 16),
        max_running=running,
        max_batch_tokens=tokens,
    )


def _decode(executable: Any, batch: int, context: int, steps: int = 64) -> dict[str, float]:
    """Seconds a token of greedy decoding, the median of three repeats, and bytes and share of the measured copy."""
    from roofline.backends.gpu.roofs import measure_roofs
    from roofline.bench.engine import Bench

    bench = Bench(executable, 8192)
    bench.decode(context, 8, batch)  # compiles, and captures what the repeats replay
    repeats = [bench.decode(context, steps, batch) for _ in range(3)]
    seconds = statistics.median(repeat.seconds for repeat in repeats) / steps
    kv = executable.page_bytes / 16 * batch * (context + steps / 2)
    moved = executable.weight_bytes + kv
    limit = measure_roofs()
    return {
        "ms_per_token": seconds * 1e3,
        "tok_s": batch / seconds,
        "bytes": moved,
        "share_of_copy": moved / limit.bytes_per_s / seconds,
        "copy_bytes_per_s": limit.bytes_per_s,
    }


def four_bit(args: argparse.Namespace) -> Record:
    """Decoding with 4-bit weights, and with 16 bits beside it."""
    rows: Record = {}
    for form in ("BF16", "Q4_0", "Q4_K"):
        loaded = _load(args, form, 16, 2048 + 128)
        for batch in BATCHES:
            rows[f"{form} batch {batch}"] = _decode(loaded.executable, batch, 8)
        rows[f"{form} batch 1, context 2048"] = _decode(loaded.executable, 1, 2048)
        loaded.executable.close()
        _free()
    return rows


def serve(args: argparse.Namespace) -> Record:
    """64 and 256 requests of typical lengths, all submitted at once, in bf16 and in 4 bits; also without overlap: the
    engine then waits for a step's ids before it schedules the next."""
    rows: Record = {"lengths": TYPICAL.name}
    published = [tuple(pair) for pair in json.loads(TYPICAL.read_text())["lengths"]]
    for form in ("BF16", "Q4_0"):
        loaded = _load(args, form, 256, 960 + 80)
        for count, overlap in ((64, True), (256, True), (64, False), (256, False)):
            _requests(loaded.executable, published[:8], overlap)  # compiles
            seconds, events = min(_requests(loaded.executable, published[:count], overlap) for _ in range(2))
            answers = sum(answer for _, answer in published[:count])
            rows[f"{form} {count} requests" + ("" if overlap else ", no overlap")] = {
                "seconds": seconds,
                "requests_per_s": count / seconds,
                "output_tok_s": answers / seconds,
                "tokens_seen": events,
            }
        loaded.executable.close()
        _free()
    return rows


def _requests(executable: Any, lengths: list[Any], overlap: bool) -> tuple[float, int]:
    """Seconds until the last of the requests has ended, and tokens that came."""
    from roofline.bench import workloads
    from roofline.engine.config import EngineConfig
    from roofline.engine.local import LocalEngine
    from roofline.engine.params import SamplingParams

    config = EngineConfig(prefix_cache=False, max_batch_tokens=8192, max_running=256, overlap=overlap)
    engine = LocalEngine(executable, config)
    for seed, (prompt, answer) in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True)
        engine.submit(workloads.token_ids(prompt, seed, min(30000, executable.vocab_size)), params)
    began, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += len(engine.step())
    return time.perf_counter() - began, tokens


def exact(args: argparse.Namespace) -> Record:
    """The same prompts alone and in company, chunked and whole: equal bits with exact, and what it costs."""
    rows: Record = {}
    for form in ("BF16", "Q4_K"):
        for order in (True, False):
            loaded = _load(args, form, 64, 1024, exact=order, tokens=2048)
            name = f"{form} {'exact' if order else 'fast'}"
            rows[name] = _differences(loaded.executable) | {
                f"decode batch {batch}": _decode(loaded.executable, batch, 512)["ms_per_token"] for batch in (1, 16, 64)
            }
            rows[name]["prefill 2048"] = _prefill(loaded.executable, 1000, 2)
            loaded.executable.close()
            _free()
    return rows


def _prefill(executable: Any, prompt: int, count: int) -> float:
    """Milliseconds of `count` prompts at once, the median of five."""
    from roofline.bench.engine import Bench

    bench = Bench(executable, 2048)
    bench.generate(count, prompt, 1)
    return statistics.median(bench.generate(count, prompt, 1).seconds for _ in range(5)) * 1e3


def _differences(executable: Any) -> Record:
    """Over 32 prompts of 40 to 700 tokens: last logits alone, beside 31 others, and in chunks of 64."""
    from roofline.bench import workloads
    from roofline.ops.batch import Segment

    vocab = min(30000, executable.vocab_size)
    prompts = [workloads.token_ids(40 + 21 * i, i, vocab) for i in range(32)]
    pages, at = [], 0
    for ids in prompts:
        each = -(-(len(ids) + 1) // 16)
        pages.append(list(range(at, at + each)))
        at += each

    def last(segments: list[Any]) -> np.ndarray:
        ends = np.cumsum([len(segment.ids) for segment in segments]) - 1
        executable.batch.fill(segments, ends.tolist())
        executable.forward()
        return np.array(executable.logits())

    alone = [last([Segment(ids, 0, held)])[0] for ids, held in zip(prompts, pages, strict=True)]
    chunked = []
    for ids, held in zip(prompts, pages, strict=True):
        for start in range(0, len(ids), 64):
            found = last([Segment(ids[start : start + 64], start, held)])[0]
        chunked.append(found)
    together = [np.empty(0)] * len(prompts)
    for first in range(0, len(prompts), 4):
        four = range(first, first + 4)
        for i, row in zip(four, last([Segment(prompts[i], 0, pages[i]) for i in four]), strict=True):
            together[i] = row
    step = last([Segment([7], len(ids), held) for ids, held in zip(prompts, pages, strict=True)])
    single = [last([Segment([7], len(ids), held)])[0] for ids, held in zip(prompts, pages, strict=True)]
    return {
        "equal in company": sum(np.array_equal(a, b) for a, b in zip(alone, together, strict=True)),
        "equal in chunks": sum(np.array_equal(a, b) for a, b in zip(alone, chunked, strict=True)),
        "equal decoding": sum(np.array_equal(a, b) for a, b in zip(step, single, strict=True)),
        "of": len(prompts),
        "finite": bool(np.isfinite(np.array(alone)).all()),
    }


def _free() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


PARTS: dict[str, Callable[[argparse.Namespace], Record]] = {
    "roofs": roofs,
    "kernels": kernels,
    "grid": grid,
    "four_bit": four_bit,
    "serve": serve,
    "exact": exact,
}


def main() -> int:
    """Run the parts that were asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Measure a GPU.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--preset", default="llama-2-7b")
    parser.add_argument("--rungs", default=None, help="of the ladder, as `roofline bench latency --rungs`")
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    record = json.loads(args.out.read_text()) if args.out.exists() else _head(args)
    failed = False
    for name in args.parts or PARTS:
        began = time.monotonic()
        try:
            record["parts"][name] = PARTS[name](args)
        except Exception as error:  # the other parts are worth having
            traceback.print_exc()
            record["parts"][name] = {"error": f"{type(error).__name__}: {error}"}
            failed = True
        _free()
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


def _head(args: argparse.Namespace) -> Record:
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no GPU here; `roofline doctor` says why")
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    return {
        "schema": "bench.gpu/1",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "commit": commit,
        "preset": args.preset,
        "parts": {},
    }


if __name__ == "__main__":
    sys.exit(main())
