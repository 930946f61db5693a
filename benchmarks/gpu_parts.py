"""The parts of benchmarks/gpu.py. Each gives its rows, and keeps what it has of them after every one."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TYPICAL = Path(__file__).parent / "typical-lengths.json"
BATCHES = (1, 8, 16)
STEP = 16384  # tokens of a step: all prompts that decoding starts from fit into one
REPEATS = 3
GRID = "eager,static,sdpa,xformers,flash,tuned,graphs"  # what does not run on a device is recorded with its reason
COMPILED = "eager,compile,paged"
Record = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """What was asked for, as benchmarks/gpu.py has it; keep: puts rows that are ready into the record."""

    preset: str
    rungs: str | None
    batches: tuple[int, ...]
    repeats: int | None
    keep: Callable[[Record], None]


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


def roofs(given: Given) -> Record:
    """Copy and GEMM, beside the data sheet; five times, as clocks and neighbours change."""
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.measure.roofs import measure_roofs

    found = find()
    measured = [measure_roofs().record() for _ in range(5)]
    figures = {name: spread([each[name] for each in measured]) for name in ("flops", "bytes_per_s")}
    return {
        "device": found.device.title,
        "chip": found.chip.name,
        "datasheet": datasheet(),
        "rows": measured,
        **figures,
    }


def datasheet() -> dict[str, float]:
    """What the maker says of the device here, {} where we know no such product."""
    from roofline.backends.gpu.devices import find

    product = find().device.product
    figures = {name: getattr(product, name) for name in ("bf16", "fp8", "bandwidth")} if product else {}
    return {name: figure.value for name, figure in figures.items() if figure is not None}


def spread(values: Sequence[float]) -> Record:
    """Median, least and most."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def kernels(given: Given) -> Record:
    """Every kernel: error against float64, median time, share of the limit at the measured roofs. One that fails is a
    row with its error."""
    import torch

    from benchmarks.gpu_kernels import Bench, Shapes
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.measure.roofs import measure_roofs
    from roofline.common.errors import describe_error

    limit = measure_roofs()
    rows: list[Record] = []
    bench = Bench(find().chip, "cuda", Shapes())
    made: Record = {"roofs": limit.record(), "seed": bench.seed, "rows": rows, "wrong": []}
    for make in bench.cases():
        try:
            row = _kernel(make, limit)
        except Exception as error:  # unless the device is gone: then the next case says so, and ends the part
            torch.cuda.synchronize()
            row = {"name": getattr(make, "__name__", str(make)), "ok": False, "failed": describe_error(error)}
        rows.append(row)
        if not row["ok"]:
            made["wrong"].append(row["name"])
        print(_line(row), flush=True)
        given.keep(made)
        torch.cuda.empty_cache()
    return made


def _kernel(make: Callable[[], Any], limit: Any) -> Record:
    from triton.testing import do_bench

    from benchmarks.gpu_kernels_case import error, errors

    case = make()
    found = error(case)
    times = do_bench(case.run, warmup=20, rep=60, quantiles=[0.5, 0.2, 0.8])
    compute, move = case.flops / limit.flops, case.nbytes / limit.bytes_per_s
    known = case.roof == "bf16"  # of 8-bit products no roof was measured
    wrong = {} if found <= case.tolerance else {"errors": errors(case)}
    return {
        "name": case.name,
        "error": found,
        "tolerance": case.tolerance,
        "ok": bool(found <= case.tolerance),
        "ms": times[0],
        "ms_20_80": times[1:],
        "share": max(compute, move) * 1e3 / times[0] if known or move > compute else None,
        "bound": "compute" if compute > move else "bandwidth",
        **wrong,
    }


def _line(row: Record) -> str:
    if "failed" in row:
        return f"{row['name']:50} FAILED {row['failed']}"
    share = f"{row['share']:6.1%}" if row["share"] is not None else ""
    return f"{row['name']:50} {'ok ' if row['ok'] else 'BAD'} {row['ms']:8.4f} ms {share}"


def grid(given: Given) -> Record:
    """The ladder on prefill 2048 and decode, at batch 1, 8 and 16; transformers' rungs in the same run."""
    return _ladder(given, given.rungs or GRID, given.repeats or 5)


def grid_compiled(given: Given) -> Record:
    """The same for torch.compile without a static cache, which compiles for minutes, and our steps without graphs."""
    return _ladder(given, COMPILED, given.repeats or REPEATS)


def _ladder(given: Given, rungs: str, repeats: int) -> Record:
    from roofline.bench.latency.grid import bench_latency
    from roofline.bench.latency.options import LatencyOptions

    sheet = {"datasheet": datasheet()}
    options = LatencyOptions(
        preset=given.preset, rungs=rungs, device="cuda", batch=",".join(map(str, given.batches)), repeats=repeats
    )
    record = bench_latency(
        options,
        tell=lambda text: print(text, flush=True),
        keep=lambda record: given.keep({**record, "complete": False, **sheet}),
    )
    return {**record, **sheet}


@contextmanager
def loaded(
    given: Given, form: str, *, tokens: int, running: int, length: int, exact: bool = False, step: int = STEP
) -> Iterator[Any]:
    """Our engine's executable of the preset's shape with random weights and a cache of so many tokens."""
    from roofline import bundle
    from roofline.models.presets import preset
    from roofline.weights.random_weights import pooled_checkpoint

    model = bundle.load(
        pooled_checkpoint(preset(given.preset), 0, form),
        backend="gpu",
        text=False,
        exact=exact,
        max_model_len=length,
        cache_tokens=tokens,
        max_running=running,
        max_batch_tokens=step,
    )
    try:
        yield model
    finally:
        model.executable.close()


def decode(model: Any, batch: int, context: int, copy: float, steps: int = 64) -> Record:
    """Greedy decoding: seconds of each repeat, and by the median the bytes and the share of the copy's bytes/s."""
    from roofline.bench.engine import Bench

    bench = Bench(model.executable, model.executable.limits.tokens)
    bench.decode(context, 8, batch)  # compiles
    bench.decode(context, steps, batch)  # captures what the repeats replay
    repeats = sorted((bench.decode(context, steps, batch) for _ in range(REPEATS)), key=lambda each: each.seconds)
    middle = repeats[len(repeats) // 2]
    moved = middle.stats.weight_bytes + middle.stats.kv_bytes
    return {
        "ms_per_token": middle.seconds / steps * 1e3,
        "seconds": [each.seconds for each in repeats],
        "tok_s": batch * steps / middle.seconds,
        "bytes": moved / steps,
        "share_of_copy": moved / copy / middle.seconds,
        "graphs": model.executable.graphs_captured(),
    }


def four_bit(given: Given) -> Record:
    """Decoding with 4-bit weights, and with 16 bits beside it."""
    rows: Record = {}
    made: Record = {"rows": rows, "copy": {}, "notes": {}}
    most, context = max(given.batches), 2048
    for form in ("BF16", "Q4_0", "Q4_K"):
        with loaded(given, form, tokens=most * 256 + context + 256, running=most, length=context + 128) as model:
            made["notes"][form], copy = dict(model.notes), copied()
            made["copy"][form] = copy
            for batch in given.batches:
                rows[f"{form} batch {batch}"] = decode(model, batch, 8, copy)
                given.keep(made)
            rows[f"{form} batch 1, context {context}"] = decode(model, 1, context, copy)
            given.keep(made)
    return made


def copied() -> float:
    """Bytes a second of a copy, now."""
    from roofline.backends.gpu.measure.roofs import measure_roofs

    return measure_roofs().bytes_per_s


def serve(given: Given) -> Record:
    """64 and 256 requests of typical lengths, all submitted at once, in bf16 and in 4 bits; in turns with overlap and
    without: the engine then waits for a step's ids before it schedules the next."""
    published = [(prompt, answer) for prompt, answer in json.loads(TYPICAL.read_text())["lengths"]]
    pages = sum(-(-(prompt + answer + 1) // 16) for prompt, answer in published)
    rows: Record = {}
    made: Record = {"lengths": TYPICAL.name, "rows": rows, "notes": {}}
    for form in ("BF16", "Q4_0"):
        with loaded(given, form, tokens=16 * pages, running=256, length=960 + 80, step=8192) as model:
            made["notes"][form] = dict(model.notes)
            for count in (64, 256):
                rows |= _served(model.executable, form, published[:count])
                made["notes"][f"{form} graphs"] = model.executable.graphs_captured()
                given.keep(made)
    return made


def _served(executable: Any, form: str, lengths: list[tuple[int, int]]) -> Record:
    ways = {"": True, ", no overlap": False}
    for overlap in (True, False):  # meet every size twice: the second time it is captured
        requests(executable, lengths, overlap)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(REPEATS):
        for way in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            times[way].append(requests(executable, lengths, ways[way]))
    answers, rows = sum(answer for _, answer in lengths), {}
    for way, seconds in times.items():
        median = statistics.median(seconds)
        rows[f"{form} {len(lengths)} requests{way}"] = {
            "seconds": seconds,
            "requests_per_s": len(lengths) / median,
            "output_tok_s": answers / median,
            "prompt_tok_s": sum(prompt for prompt, _ in lengths) / median,
        }
    return rows


def requests(executable: Any, lengths: Sequence[tuple[int, int]], overlap: bool) -> float:
    """Seconds until the last of the requests has ended. Raises RooflineError where one fails or lacks tokens."""
    import time

    from roofline.bench import workloads
    from roofline.common.errors import RooflineError
    from roofline.engine.config import EngineConfig
    from roofline.engine.local import LocalEngine
    from roofline.engine.params import SamplingParams

    limits = executable.limits
    config = EngineConfig(
        prefix_cache=False, max_batch_tokens=limits.tokens, max_running=limits.segments, overlap=overlap
    )
    engine = LocalEngine(executable, config)
    vocab = min(30000, executable.vocab_size)
    prompts = [workloads.token_ids(prompt, seed, vocab) for seed, (prompt, _) in enumerate(lengths)]
    began, tokens = time.perf_counter(), 0
    for ids, (_, answer) in zip(prompts, lengths, strict=True):
        engine.submit(ids, SamplingParams(temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True))
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason == "error":
                raise RooflineError(f"the engine failed during the bench: {event.error}")
            tokens += len(event.ids)
    seconds = time.perf_counter() - began
    wanted = sum(answer for _, answer in lengths)
    if tokens != wanted:
        raise RooflineError(f"{tokens} tokens came, {wanted} were asked for")
    return seconds


def exact(given: Given) -> Record:
    """The same prompts alone and in company, chunked and whole: equal bits with exact, and what it costs."""
    rows: Record = {}
    made: Record = {"rows": rows, "notes": {}}
    for form in ("BF16", "Q4_K"):
        for order in (True, False):
            name = f"{form} {'exact' if order else 'fast'}"
            with loaded(given, form, tokens=64 * 512, running=64, length=2048, exact=order) as model:
                made["notes"][name], copy = dict(model.notes), copied()
                rows[name] = differences(model.executable)
                given.keep(made)
                for batch in (1, 16, 64):
                    rows[name][f"decode batch {batch}"] = decode(model, batch, 256, copy)["ms_per_token"]
                rows[name]["prefill 2 x 1000, ms"] = _prefill(model.executable, 1000, 2)
                given.keep(made)
    return made


def _prefill(executable: Any, prompt: int, count: int) -> Record:
    """Milliseconds of `count` prompts at once."""
    from roofline.bench.engine import Bench

    bench = Bench(executable, executable.limits.tokens)
    bench.generate(count, prompt, 1)
    return spread([bench.generate(count, prompt, 1).seconds * 1e3 for _ in range(5)])


def differences(executable: Any, prompts: int = 32, shortest: int = 40, growing: int = 21) -> Record:
    """Over prompts of 40, 61, ... tokens: how many have the same last logits alone, beside all others, and in chunks of
    64; and how many the same next ones beside the others and alone."""
    from roofline.bench import workloads
    from roofline.ops.batch import Segment

    vocab = min(30000, executable.vocab_size)
    texts = [workloads.token_ids(shortest + growing * i, i, vocab) for i in range(prompts)]
    pages, at = [], 0
    for ids in texts:
        each = -(-(len(ids) + 1) // 16)
        pages.append(list(range(at, at + each)))
        at += each
    both = list(zip(texts, pages, strict=True))

    def last(segments: list[Any]) -> np.ndarray:
        ends = np.cumsum([len(segment.ids) for segment in segments]) - 1
        executable.batch.fill(segments, ends.tolist())
        executable.forward()
        return np.array(executable.logits())

    def in_chunks(ids: list[int], held: list[int]) -> np.ndarray:
        parts = [last([Segment(ids[start : start + 64], start, held)])[0] for start in range(0, len(ids), 64)]
        return parts[-1]

    alone = [last([Segment(ids, 0, held)])[0] for ids, held in both]
    chunked = [in_chunks(ids, held) for ids, held in both]
    together = last([Segment(ids, 0, held) for ids, held in both])
    step = last([Segment([7], len(ids), held) for ids, held in both])
    single = [last([Segment([7], len(ids), held)])[0] for ids, held in both]

    def equal(those: Any, these: Any) -> int:
        return sum(np.array_equal(a, b) for a, b in zip(those, these, strict=True))

    return {
        "equal in company": equal(alone, together),
        "equal in chunks": equal(alone, chunked),
        "equal decoding": equal(step, single),
        "of": prompts,
        "finite": bool(np.isfinite(np.array(alone)).all()),
    }


PARTS: dict[str, Callable[[Given], Record]] = {
    "roofs": roofs,
    "kernels": kernels,
    "grid": grid,
    "grid_compiled": grid_compiled,
    "four_bit": four_bit,
    "serve": serve,
    "exact": exact,
}
